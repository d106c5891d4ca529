"""Reads what a user asks for: hosts, options, settings, and the cell.

Text and values come in, frozen records go out; a mistake is a `UsageError` that names the flag or the line. Nothing here
reaches a host or runs the cell. One file is read: a hostfile by config.py.
Read the modules in this order:

    hosts.py         hosts as users write them: lists and hostfiles
    flag_values.py   what a flag is, and an option, a field that declares one; the text after a flag becomes its value
    spec.py          `JobSpec`: what to run, with all checks of values
    access.py        `Access`: how hosts are reached, the same
    command_prefix.py  what stands before a host's Python on its command line
    allocation.py    what is asked of a scheduler
    systems.py       the foreign systems, a row each: what each can
    export.py        for which system a folder is to be written, and where
    flag_table.py    all flags: those of the options, and those of the line alone
    flag_parser.py   flags of a line, one by one, their help and their names
    flags.py         the line of `%%distributed` becomes a `Request`: most flags fill the field of their name; and a script
                     with its arguments, behind such flags
    config.py        the notebook's settings, and which hosts count
    cell.py          the cell: statements for the notebook, one expression for every rank
    notebook_effects.py  which of those statements act in the notebook alone, though they were meant for the ranks
"""

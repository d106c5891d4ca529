"""Parses the user's request: hosts, options and settings; cells/ parses the cell.

Text and values go in, frozen records come out; a mistake raises a `UsageError` that names the flag
or the line. The package contacts no host. It reads one file: config.py reads a hostfile. Read the
modules in this order:

    hosts.py         hosts as users write them: lists and hostfiles
    flag_values.py   flags, and options: the dataclass fields that declare them; parses values of
                     flags
    spec.py          `JobSpec`: what to run, with all checks of values
    access.py        `Access`: how to reach hosts, with the same checks
    command_prefix.py  the command before Python on a host's command line, such as `docker exec`
    allocation.py    a request to a scheduler
    systems.py       the table of external systems, and what each supports
    export.py        the system and the folder of an export
    flag_table.py    all flags: those of options, and those that only a command line has
    flag_parser.py   splits a line into flags; their help and their names
    flags.py         parses the line of `%%distributed`, or a script with arguments: a `Request`
    config.py        the notebook's settings, and which hosts take precedence
"""

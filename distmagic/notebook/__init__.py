"""What a user types in IPython: `%%distributed`, `%distributed`, and their completion.

Here a line and a cell are read, the cell's own statements are executed, and messages for the user are printed. Nothing
here opens a connection, starts a thread or knows how a run proceeds. What does is imported at its first call, so that
`%load_ext distmagic` takes no time. In this order:

    magic.py          the cell: `%%distributed`; loading and unloading of the extension
    local_run.py      the cell's own statements, and what is said of those that were meant for the ranks
    settings.py       what is set once for a notebook: hosts, playground, and the session of all its cells
    commands.py       the table of `%distributed` subcommands, and of `distmagic`'s in a terminal
    host_commands.py  hosts, playground, allocations, down
    job_commands.py   jobs, runs, attach, view, add, stop, logs, stacks, clean, status
    doctor_command.py doctor
    job_hosts.py      which hosts these ask, and how they are reached
    job_tables.py     their tables
    file_commands.py  get, put, env sync
    run_command.py    run: a script instead of a cell
    run_names.py      the variables that a run goes into
    help_pages.py     help: the pages in distmagic/help/, and what answers a question in them
    completion.py     the Tab key
"""

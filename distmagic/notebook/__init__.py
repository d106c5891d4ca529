"""What a user types in IPython: `%%distributed`, `%distributed`, and their tab completion.

The package parses the line and the cell, executes the cell's own statements, and prints messages
for the user. It opens no connection and starts no thread. Modules that do are imported at their
first use, so that `%load_ext distmagic` stays fast. Read in this order:

    magic.py          the cell magic `%%distributed`; loads and unloads the extension
    ranks_cells.py    cells of `%%ranks`, on ranks that stay
    local_run.py      runs the cell's own statements; warns about those meant for the ranks
    settings.py       settings of a notebook: hosts, playground, and the session of all its cells
    commands.py       the table of subcommands of `%distributed`, and of `distmagic` in a terminal
    host_commands.py  hosts, playground, allocations, down, doctor
    job_commands.py   jobs, runs, attach, view, add, stop, logs, stacks, profile, status, and ranks
                      that stay
    job_hosts.py      the hosts that these commands ask, and how to reach them
    job_tables.py     the tables that these commands print
    file_commands.py  get, put, env sync, clean
    run_command.py    run: a script instead of a cell
    run_names.py      the notebook variables that hold runs
    help_pages.py     help: the pages in distmagic/help/, and their search
    completion.py     tab completion
"""

"""Keeps one kernel's connections, and gives the commands of a user their hosts and jobs.

A `Session` lives as long as its process. It begins runs and follows
jobs (runner/ does the work), and asks hosts about jobs of any kernel. Nothing here decides
about a run or waits for its events. In this order:

    session.py        reach hosts, launch a job, attach to one, take down what is kept warm
    ending.py         the end of a run: what is left, its error, or the job that goes on alone
    allocations.py    hosts that systems give: asked for once, used by every cell that asks for the same
    inside.py         this process as one node of a job in which all nodes run the same cell or script
    place.py          where one cell runs; waits for nodes that are still pending, in the background too
    dry_run.py        what a run would start
    programs.py       a script, or a module, on hosts
    background.py     the runs that go on while the notebook does other things
    exporting.py      a cell, or a script, as a folder that starts the same job on a cluster
    local_hints.py    what this machine knows of a file or a module that a rank lacked
    housekeeping.py   what hosts are asked apart from a run: jobs, logs, stacks, clean, status
    spreading.py      files of this machine to all hosts, from host to host
    packages.py       the packages that an environment on hosts is to have
"""

"""Keeps the connections of one kernel, and carries out the user's commands on hosts and jobs.

A `Session` lives as long as its process. It starts runs and follows jobs (runner/ does the work),
and asks hosts about jobs of any kernel. It takes no decisions about a run and does not wait for its
events. Read in this order:

    session.py        connects to hosts, launches a job, attaches to one; makes a run's outcome,
                      its error, or the job that runs on detached; ends warm processes
    allocations.py    hosts from schedulers: requested once, used by all cells with that request
    inside.py         this process as one node of a job whose nodes all run the same cell or script
    place.py          the hosts of one cell; waits for pending nodes, also in the background
    dry_run.py        shows what a run would start
    programs.py       runs a script, or a module, on hosts
    background.py     runs in the background, while the notebook does other things
    exporting.py      exports a cell, or a script, as a folder that starts the same job on a cluster
    local_hints.py    hints for a file or a module that a rank lacked and this machine has
    housekeeping.py   requests to hosts outside of a run: jobs, logs, stacks, clean, status
    spreading.py      copies files of this machine to all hosts, from host to host
    packages.py       the packages that an environment on hosts needs
"""

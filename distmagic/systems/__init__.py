"""The systems that give hosts, that start a job by themselves, or for which a job is exported: a folder each.

    slurm/       gives hosts: the nodes of an allocation, reached by steps of the job
    skypilot/    gives hosts: a cluster of SSH hosts
    osmo/        runs a whole job as a workflow, which is followed by its log
    sing/        SING Cloud: starts the same script on every node
    torchrun/    torchrun by hand: the same, without any scheduler

A folder has all of its system. Four modules may be among its own, and others use no other ones:

    hosts.py     gives hosts to a notebook: `asked`, `preview`, `pool`
    run.py       runs a whole job: `check`, `run`
    inside.py    reads the variables that the system sets on a node: `place`
    export.py    writes the files that start a job there: `files`, `readme`

request/systems.py has a row for each system, which says what it can; nothing else names one. No system imports another.

    protocol.py  the types of `hosts.py`
"""

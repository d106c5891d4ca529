"""External systems that provide hosts, run a job, or start an exported job: a folder each.

    slurm/       provides hosts: the nodes of an allocation, reached by steps of the job
    skypilot/    provides hosts: a cluster of SSH hosts
    osmo/        runs a whole job as a workflow; distmagic follows its log
    sing/        SING Cloud: starts the same script on every node
    torchrun/    torchrun by hand: the same without a scheduler

A folder contains everything about its system. Other packages use only these four modules of it,
each of which may be missing:

    hosts.py     provides hosts to a notebook: `asked`, `preview`, `pool`
    run.py       runs a whole job: `check`, `run`
    inside.py    reads the variables that the system sets on a node: `place`
    export.py    writes the files that start a job on the system: `files`, `readme`

request/systems.py has a row for each system, which lists what it supports; no other module names a
system. No system imports another.

    protocol.py  the types of `hosts.py`, and what held hosts of all systems have in common
"""

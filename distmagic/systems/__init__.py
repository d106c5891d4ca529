"""The systems that give hosts, that start a job by themselves, or for which a job is exported: a folder each.

    slurm/       gives hosts: the nodes of an allocation, reached by steps of the job
    skypilot/    gives hosts: a cluster of SSH hosts
    osmo/        runs a whole job as a workflow, which is followed by its log
    sing/        SING Cloud: starts the same script on every node
    torchrun/    torchrun by hand: the same, without any scheduler

A folder has all of its system: `inside.py` reads the variables that the system sets on a node, `export.py` writes the
files that start a job there, and the rest says how it gives hosts or runs a job. No system imports another.

    folders.py   the whole folder of an exported job, by the system that was asked for      pure
    detect.py    which system has started this process: SkyPilot before the Slurm below it  pure
"""

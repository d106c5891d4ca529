"""What the doctor is told by a host: what may be wrong there, and which other hosts can be dialled from it.

Here: values that the system gives at once, and doors that are open for a moment. Never here: nothing is changed, no file is
written, and no judgement (distmagic/diagnosis/ has that). In any order:

    examination.py  names, limits, variables, versions of packages
    gpu_health.py   GPUs that are held, slowed or broken
    doors.py        who can dial whom
    collective.py   how fast pairs of hosts are; what a run of its own calls, and alone imports torch
"""

"""Examines a host for the doctor: possible faults of the host, and the other hosts to which it can
connect.

These modules read values that the system returns at once, and open ports for a moment. They change
nothing, write no file, and judge nothing (distmagic/diagnosis/ does). Read in any order:

    examination.py  names, limits, variables, versions of packages
    gpu_health.py   GPUs that are in use, slowed down or broken
    nccl_ras.py     asks NCCL which processes it misses in a running job
    doors.py        tests which hosts can connect to which
    collective.py   measures the network between pairs of hosts; the doctor runs it as a job; the
                    only module that imports torch
"""

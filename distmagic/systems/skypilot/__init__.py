"""Uses a SkyPilot cluster as SSH hosts, and exports a job as a SkyPilot task.

sky_words parses `sky status` for a cluster's name and launch. cluster makes Hosts of it. They are
reached with the ssh configuration that SkyPilot writes, and with the host keys seen first in this
launch.

The package does not use ranks. Read in this order:

    sky_words.py   arguments and output of SkyPilot's program                              pure
    sky.py         runs that program: status, launch, hold, down, each with a time limit
    cluster.py     one cluster: found or launched, reached, released
    hosts.py       the clusters of a notebook, and their list
    inside.py      the variables of a node of a task                                       pure
    export.py      two forms: static rendezvous, c10d                                      pure
"""

"""A cluster of SkyPilot as the SSH hosts that it is, and a task of it as an exported folder.

`sky status` --sky_words--> its name and launch --cluster--> Hosts, reached with the file that SkyPilot writes for ssh
and with the host keys that this launch has shown first.

Nothing here knows of ranks. In this order:

    sky_words.py   what SkyPilot's program is told, and what it says of clusters         pure
    sky.py         that program: status, launch, hold, down, each with a time limit
    cluster.py     one cluster: found or launched, reached, given up
    hosts.py       what a notebook has of it: clusters, their list
    inside.py      the variables of a node of a task                                     pure
    export.py      two forms: static rendezvous, c10d                                    pure
"""

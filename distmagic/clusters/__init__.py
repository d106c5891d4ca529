"""Gets hosts from a system that has some, and keeps them until nobody needs them; or has the system run the whole job.

    slurm/     an allocation of Slurm: its nodes, over steps of the job
    cluster    a cluster of SkyPilot: SSH hosts
    osmo       a workflow of OSMO, which no host of ours runs: it is submitted, and followed by its log
    inside/    processes that a system has started on every node itself

A cluster of SkyPilot: `sky status` --sky_words--> its name and launch --cluster--> Hosts, reached with the file that
SkyPilot writes for ssh and with the host keys that this launch has shown first.

Nothing here knows of ranks or torch. What a system says is understood in pure modules of words; few lines act. In this
order:

    sky_words.py     what SkyPilot's program is told, and what it says of clusters         pure
    sky.py           that program: status, launch, hold, down, each with a time limit
    cluster.py       one cluster of SkyPilot: found or launched, reached, given up
    osmo_words.py    what the program `osmo` says: states, refusals, lines of a log        pure
    osmo.py          submit, look, follow the log, cancel, fetch
"""

"""Starts contacts on a node of an allocation, so that what they start outlives the srun that brought them.

A keeper is our process on one node of an allocation, from which everything else of ours there is started. An usher is
the task of one srun, which only hands its three pipes to the keeper.

Under Slurm everything that a step has started ends with the step. So a keeper runs in a step that lasts as long as the
allocation, and starts there what is asked for. Each connection has an usher, which hands its pipes over a unix socket,
and ends as the process ends that got them. Nothing here knows of torch, jobs or the bundle. Three
programs begin here, `usher`, `keeper` and `hold`. They travel as text (transports/program_text.py), before the bundle is there,
and run on any Python from 3.6 on. A module that they import from here stands in the table there, and is imported by
`from distmagic.remote.keeper.NAME import ...`: the package itself is not there.

    usher.py             one connection: hands its pipes to the keeper of its node, and waits
    keeper.py            one node: starts processes on pipes that ushers bring; the lead's ends the allocation when nobody needs it
    allocation_lease.py  when the lead's ends it; pure
    listening.py         the keeper's socket, and what keepers left that were killed
    processes.py         processes of the node: started, sent signals, found in /proc
    hold.py              a job in SkyPilot's own queue, so that a cluster does not stop itself while a job of ours runs
"""

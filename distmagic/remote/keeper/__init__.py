"""Starts contacts on a node of a Slurm allocation, so that their processes outlive the srun call
that started them.

A keeper is distmagic's process on one node of an allocation; it starts all other distmagic
processes of the node. An usher is the task of one srun call, and only passes its three pipes to the
keeper.

Slurm ends all processes of a step with the step. So a keeper runs in a step that lasts as long as
the allocation, and starts processes in that step on request. Each connection has an usher. It
passes its pipes over a unix socket, and ends with the process that uses them. The package does not
use torch, jobs or the bundle.

Three programs start in this package: `usher`, `keeper` and `hold`. They are sent as text
(transports/program_text.py), before the bundle is on the host, and run on Python 3.6 or later.
program_text.py lists the modules that they may import. They import them by `from
distmagic.remote.keeper.NAME import ...`, because the package itself is not on the host.

    usher.py             one connection: passes its pipes to the keeper of its node, and waits
    keeper.py            one node: starts processes on pipes from ushers; on the lead, also ends an
                         unused allocation
    allocation_lease.py  when the lead's keeper ends the allocation; pure
    listening.py         the keeper's socket, and the cleanup after killed keepers
    processes.py         processes of the node: started, signalled, found in /proc
    hold.py              a job in SkyPilot's queue: the cluster stays up while a distmagic job runs
"""

"""Starts all threads of this process, except those of pools.

They are daemons, and named by their task.

What ends each of them:

    allocation, warm       `close` of the object that it keeps alive; otherwise the lease expires
    alone                  the end of its cell, or an interrupt of it
    announce               the end of the block around it, which joins it
    cells                  the end of the connection to its agent, after which it is joined
    break                  its function: an interrupt has taken effect, or process groups are broken
    dialled, feed          the end of the two connections of a process
    doors                  `close` of the doors, which joins it, or their end after some seconds
    frames                 its function, or the end of its rank
    guest                  the answer of a door to it, or its time limit
    dns                    the resolver's answer; its caller waits only until the deadline
    following, process     the end of node 0, or of the process that it asked for
    hardware               the end of its agent
    hold                   the end of `sky exec`
    imports                its function, some imports
    keepalive              `close` of its SSH session
    lease                  `close` of its keeper, at the end of the run
    limit                  the end of the function whose time is over
    limits                 nothing: it sleeps where there are no limits
    meeting                `close` of the meeting, which joins it
    member                 the end of the connection of its member
    osmo-log               the end of the workflow, after which it is joined
    proxy, sky, stderr, wait   the end of the process that it reads or reaps
    ras                    NCCL's answer, or its time limit
    run                    its function: one message, or one connection that is closed
    sweep                  the end of all runs of the sweep, or of the one that it follows
    spread                 `close` of the blob server, which joins it
    touch                  the end of the block around it
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def begin(
    name: str, act: Callable[..., object], *arguments: object
) -> threading.Thread:
    """Run a function on a new thread.

    Raises RuntimeError if the system allows no further thread.
    """
    thread = threading.Thread(
        target=act, args=arguments, name=f"distmagic-{name}", daemon=True
    )
    thread.start()
    return thread

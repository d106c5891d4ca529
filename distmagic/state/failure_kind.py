"""What the end of a rank says of the rank: a success, a failure of its own, or the echo of another's. Pure."""

from __future__ import annotations

import signal

from distmagic.remote.wire.protocol import Ended

_ECHOES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "socket closed",
    "pair closure",
    "remote process exited",
    "ncclremoteerror",
)


def is_good(end: Ended) -> bool:
    """Whether the rank did what it was asked to."""
    return end.outcome == "returned" or (end.outcome == "exited" and end.code == 0)


def is_echo(end: Ended) -> bool:
    """Whether the rank failed because another one was gone, as gloo and NCCL say it."""
    return end.failure is not None and any(word in end.failure.message.lower() for word in _ECHOES)


def is_by_sigterm(end: Ended) -> bool:
    """Whether it was asked to end, as torchrun and the agent ask."""
    return end.outcome == "signalled" and end.code == -signal.SIGTERM

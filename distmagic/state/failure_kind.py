"""Tells a rank's success, its own failure, and the echo of another rank's failure from each other. Pure."""

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
    """Whether the rank returned, or exited with code 0."""
    return end.outcome == "returned" or (end.outcome == "exited" and end.code == 0)


def is_echo(end: Ended) -> bool:
    """Whether the rank failed because a peer was gone, by the words of gloo and NCCL."""
    if end.failure is None:
        return False
    message = end.failure.message.lower()
    return any(word in message for word in _ECHOES)


def is_by_sigterm(end: Ended) -> bool:
    """Whether SIGTERM ended the rank: torchrun and the agent ask so."""
    return end.outcome == "signalled" and end.code == -signal.SIGTERM

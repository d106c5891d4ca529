"""Two nodes on this machine that have met: the second is the host of a transport. Two ends of a connection."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from distmagic.connection.certificate import one_time_secret
from distmagic.inside.following import Following
from distmagic.inside.job_node import JobNode
from distmagic.inside.meeting import Meeting
from distmagic.inside.proof import SharedSecret
from distmagic.remote.contact.mutual_tls import context
from distmagic.transports.channel import Channel
from distmagic.transports.dialled import DialledTransport

HERE = "127.0.0.1"


def places(count: int = 2) -> tuple[JobNode, ...]:
    """Return the nodes of a job of their own, all on this machine."""
    key = secrets.token_hex(4)
    names = tuple(f"n{number}" for number in range(count))
    return tuple(
        JobNode(system="Slurm job 7", key=key, node_rank=number, lead="n0", names=names)
        for number in range(count)
    )


@contextlib.contextmanager
def dialled() -> Iterator[DialledTransport]:
    """Give the way to a second node, which has come to cell 1."""
    first, second = places()
    secret = SharedSecret(one_time_secret())
    with (
        contextlib.closing(Meeting(first, secret)) as meeting,
        contextlib.closing(Following(second, secret, HERE)) as following,
    ):
        following.come(1, "same", 20.0)
        meeting.gather(1, "same", 20.0)
        yield meeting.transport("n1")


@contextlib.contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Give both ends of a connection, on this machine."""
    secret = one_time_secret()
    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    accepts = context(secret, is_server=True)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(accepts.wrap_socket, far, server_side=True)
        connected = context(secret, is_server=False).wrap_socket(near)
    with (
        contextlib.closing(Channel(connected)) as one,
        contextlib.closing(Channel(accepted.result())) as other,
    ):
        yield one, other

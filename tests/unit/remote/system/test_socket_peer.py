"""Sockets that answer only their own user: asked from both ends, with a real other user."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.remote.system import socket_peer

OTHER = 1  # "daemon" where it has a name


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{folder}/s")
        made.listen(8)
        Path(folder).chmod(0o777)  # everybody may come as far as the socket
        Path(folder, "s").chmod(0o777)
        yield made


def as_other(act: Callable[[], bool]) -> bool:
    """Return what `act` returns in a child process of another user."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            code = int(act())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return bool(code)


def test_this_user_is_ours_on_both_ends(listener):
    with socket.socket(socket.AF_UNIX) as conn:
        conn.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert socket_peer.is_ours(conn)
            assert socket_peer.is_ours(accepted)
            socket_peer.check(conn)


@pytest.mark.needs("lab")
def test_another_user_is_not_ours(listener, golden):
    def connect() -> bool:
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(listener.getsockname())
            # For the other user it is we who are a stranger.
            return socket_peer.is_ours(conn)

    assert not as_other(connect)
    accepted, _ = listener.accept()
    with accepted:
        assert not socket_peer.is_ours(accepted)
        with pytest.raises(PermissionError) as caught:
            socket_peer.check(accepted)
    golden(caught.value)


def test_a_socket_that_is_closed_is_nobodys():
    conn = socket.socket(socket.AF_UNIX)
    conn.close()
    assert not socket_peer.is_ours(conn)


def test_a_socket_without_a_peer_is_nobodys():
    with socket.socket(socket.AF_INET) as conn:
        assert not socket_peer.is_ours(conn)

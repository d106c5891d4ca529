"""The border to paramiko: connections that end, and the log."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from distmagic.transports.ssh import client as ssh_client
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.ssh.process import SshProcess
from distmagic.transports.troubles import Trouble
from tests.lab.waiting import HANG_S


class _EndsWhileReading:
    """A channel whose connection ends in the middle of a read of stderr, as paramiko reports it."""

    exit_status = -1

    def __init__(self) -> None:
        self.pieces = [b"half a sen", EOFError()]
        self.status_event = threading.Event()
        self.transport = self

    def recv_stderr(self, _: int) -> bytes:
        piece = self.pieces.pop(0)
        if isinstance(piece, Exception):
            self.status_event.set()
            raise piece
        return piece


def test_a_connection_that_ends_while_stderr_is_read_makes_no_noise(monkeypatch):
    noise: list[object] = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    process = SshProcess(_EndsWhileReading(), "gpu-a", (EOFError,))  # type: ignore[arg-type]
    assert process.wait(10.0) is None
    process._drainer.join(HANG_S)
    assert process.stderr() == "half a sen"
    assert noise == []


def test_a_connection_leaves_nothing_with_the_log(monkeypatch):
    """A kernel connects thousands of times, and may log whatever comes; a handler of each would stay for ever."""
    server = Resolved(name="gpu-a", hostname="gpu-a", user="me", port=22)
    handlers = logging.getLogger("distmagic.ssh").handlers
    before = len(handlers)
    kept: list[logging.LogRecord] = []
    notebooks_own = logging.Handler()
    monkeypatch.setattr(notebooks_own, "emit", kept.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [notebooks_own])
    for _ in range(3):
        ours, theirs = socket.socketpair()
        session = ssh_client.SshSession(ours, "gpu-a", 1.0)
        with theirs:
            theirs.sendall(b"SSH-1.5-old\r\n")
            with pytest.raises(Trouble):
                session.handshake(server)
            session.close()
    assert len(handlers) == before
    assert kept == []


@pytest.mark.parametrize(
    "error", [EOFError(), OSError("reset"), ssh_client.paramiko.SSHException("gone")]
)
def test_the_end_of_a_session_over_a_jump_host_that_is_gone_raises_nothing(error):
    """In paramiko's thread it would be printed as a traceback, in whatever cell runs just then."""

    class Gone:
        def close(self) -> None:
            raise error

    ssh_client._Packetizer(Gone()).close()

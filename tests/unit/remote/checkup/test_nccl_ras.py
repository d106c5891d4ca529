"""What NCCL's health service answers, played by a socket that speaks as NCCL 2.24 and later do."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from distmagic.remote.checkup import nccl_ras

HEAD = b"""NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

"""
DEAD = b"""DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

"""
MISMATCH = b"""Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts

"""


@contextmanager
def played(monkeypatch: pytest.MonkeyPatch, *pieces: bytes) -> Iterator[list[bytes]]:
    """Answer one question with these pieces, then end the connection."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(nccl_ras, "PORT", server.getsockname()[1])

        def answer() -> None:
            try:
                guest, _ = server.accept()
            except OSError:  # nobody has asked
                return
            with guest:
                while not b"".join(asked).endswith(b"verbose status\n"):
                    asked.append(guest.recv(100))
                for piece in pieces:
                    guest.sendall(piece)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_process_that_is_dead(monkeypatch):
    with played(monkeypatch, HEAD, DEAD, MISMATCH) as asked:
        found = nccl_ras.errors()
    assert found == DEAD.decode().strip()
    assert b"".join(asked) == b"verbose status\n", (
        "it waits as long as NCCL thinks right"
    )


class Slow:
    """A connection to a service that answers in two pieces. It notes how long each of them is waited for."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self._pieces = [HEAD, DEAD, b""]

    def sendall(self, data: bytes) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        self.limits.append(seconds)

    def recv(self, _: int) -> bytes:
        return self._pieces.pop(0)


def test_a_service_that_answers_is_given_the_time_that_nccl_takes_for_late_processes(
    monkeypatch,
):
    slow = Slow()
    monkeypatch.setattr(nccl_ras, "_listening", lambda: {"socket"})
    monkeypatch.setattr(nccl_ras, "time", SimpleNamespace(monotonic=lambda: 5.0))
    monkeypatch.setattr(socket, "create_connection", lambda *_: nullcontext(slow))
    assert nccl_ras.errors() == DEAD.decode().strip()
    first_s, later_s, _ = slow.limits
    assert first_s <= 3, "another program may listen, and never answer"
    assert later_s > 10, "NCCL itself gives up after 10 s"


def test_a_process_that_is_stopped_is_not_asked_alone(monkeypatch):
    """All processes of a job listen at one port: the kernel may give a connection to one that answers nothing."""
    monkeypatch.setattr(nccl_ras, "_listening", lambda: {"socket"})
    monkeypatch.setattr(nccl_ras, "_FIRST_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(nccl_ras, "PORT", server.getsockname()[1])

        def answer() -> None:
            with server.accept()[0], server.accept()[0] as guest:
                assert guest.recv(100)
                guest.sendall(HEAD + DEAD)

        thread = threading.Thread(target=answer)
        thread.start()
        found = nccl_ras.errors()
        thread.join()
    assert found == DEAD.decode().strip()


def test_ranks_at_different_calls_are_no_error_of_a_healthy_job(monkeypatch):
    with played(monkeypatch, HEAD, MISMATCH):
        assert nccl_ras.errors() == ""


def test_an_answer_of_something_else(monkeypatch):
    with played(monkeypatch, b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        assert nccl_ras.errors() == ""


def test_the_job_of_another_user_is_not_asked(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with played(monkeypatch, HEAD, DEAD) as asked:
        assert nccl_ras.errors() == ""
    assert asked == []


def test_a_run_asks_only_if_no_other_process_of_the_user_listens(monkeypatch):
    """Each process of a job listens at the port, and the kernel may choose one of another job."""
    with played(monkeypatch, HEAD, DEAD) as asked:
        assert nccl_ras.errors([os.getppid(), 1 << 30]) == ""
    assert asked == []
    with played(monkeypatch, HEAD, DEAD):
        assert nccl_ras.errors([os.getpid()]) == DEAD.decode().strip()


def test_a_host_without_nccl(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(nccl_ras, "PORT", server.getsockname()[1])
    assert nccl_ras.errors() == ""

"""An agent whose torchrun, processes and clock are a test's own: its loop turns when `step` says so."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar

import pytest

from distmagic.remote.agent import agent
from distmagic.remote.agent.agent import Agent
from distmagic.remote.engine import engine_start
from distmagic.remote.records import journal, places
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol

JOB = f"unit-{os.getpid()}"
LEASE_S = 60.0
ENGINE = 4_194_999  # no process: Linux gives no pid beyond 4,194,304
CHILD = processes.ProcessInfo(
    pid=ENGINE + 1, parent=1, started=7, state="S", name="python", exit_status=0
)
A = TypeVar("A", bound=protocol.Message)


class Node:
    """An agent whose torchrun ends when `ended` says so, with what else runs in `tree`; `signals` are those it sent."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, start: protocol.StartNode
    ) -> None:
        self.now = 1000.0
        self.ended: dict[int, int] = {}
        self.tree = (CHILD,)
        self.signals: list[int] = []
        self.limit_of_ranks = 0
        self.pipes = [os.pipe(), os.pipe()]
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = str(places.make_run_dir(start.job, start.node_rank) / "readers")
        self.listener.bind(self.path)
        self.listener.listen(16)
        monkeypatch.setattr(engine_start, "start_engine", self._start_engine)
        monkeypatch.setattr(processes, "reap", self._reap)
        self.news: list[protocol.Hardware] = []
        self.masks: list[str | None] = []
        monkeypatch.setattr(agent, "HardwareWatch", self._watch)
        monkeypatch.setattr(processes, "has_child", lambda: bool(self.tree))
        monkeypatch.setattr(processes, "descendants", lambda _: self.tree)
        monkeypatch.setattr(
            processes, "send", lambda _, number: self.signals.append(number)
        )
        self.agent = Agent(start, self.listener, lambda: self.now)
        self.agent.begin()

    def change_start(self, **changes: object) -> None:
        start = replace(self.agent.start, **changes)
        self.agent.start = self.agent.ending.start = start

    def _start_engine(self, *_: object) -> tuple[int, int, int]:
        self.limit_of_ranks = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ENGINE, self.pipes[0][0], self.pipes[1][0]

    def _watch(self, mask: str | None) -> SimpleNamespace:
        self.masks.append(mask)
        return SimpleNamespace(news=lambda: self.news.pop() if self.news else None)

    def _reap(self) -> dict[int, int]:
        ended, self.ended = self.ended, {}
        return ended

    def step(self, seconds: float = 0.05) -> None:
        self.now += seconds
        self.agent.turn(0.0)

    def end(self, code: int = 0) -> None:
        """End torchrun, and all processes with it."""
        self.ended, self.tree = {ENGINE: code << 8}, ()
        self.step()
        self.step()

    def follow(self, after: int = 0) -> socket.socket:
        """Connect as a notebook's contact does."""
        conn = socket.socket(socket.AF_UNIX)
        conn.connect(self.path)
        self.send(conn, protocol.FollowJob(job=JOB, node_rank=0, after=after))
        return conn

    def send(self, conn: socket.socket, request: protocol.Message) -> None:
        conn.sendall(protocol.encode(request))
        self.step()
        self.step()

    def events(self, kind: type[A]) -> list[A]:
        """Return the journal's events of a kind."""
        found = [
            protocol.decode(line)[1] for _, line in journal.read(self.agent.folder)
        ]
        return [event for event in found if isinstance(event, kind)]

    def close(self) -> None:
        for key in list(self.agent.selector.get_map().values()):
            # Of readers, and the two that listen.
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.agent.selector.close()
        for _, writing in self.pipes:
            os.close(writing)

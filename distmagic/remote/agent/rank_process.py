"""The agent's side of one rank: its socket, its two streams, and what it reports, coalesced."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.records import logs, places
from distmagic.remote.system import exit_codes, memory, processes
from distmagic.remote.wire import protocol

_ROWS_A_LINE = 20


class RankProcess:
    """A rank that has said hello. `ended` is its own last word, None if it went without one.

    `is_open`: more may come over its connection. `is_over`: its end has been told, at `over_at`.
    """

    def __init__(self, conn: socket.socket, hello: protocol.Worker, fds: list[int], folder: Path, now: float) -> None:
        self.conn, self.began = conn, now
        self.hello = hello
        self.streams = tuple(
            RankStream(fd, folder, hello.rank, name, now) for fd, name in zip(fds, STREAMS, strict=True)
        )
        self.process = processes.read(hello.pid)
        self.cgroup = memory.Cgroup(hello.pid)
        self.pidfd = processes.open_pidfd(hello.pid)
        self.ended: protocol.Ended | None = None
        self.is_over = self.is_replaced = False
        self.over_at = math.inf
        self.is_open = True
        self._latest: protocol.Progress | None = None
        self._rows: list[protocol.MetricRow] = []
        self._bars: dict[int, protocol.Bar] = {}
        self._reports = logs.Log(folder / f"rank{hello.rank}.reports.jsonl", places.REPORTS_BYTES)

    def receive(self) -> bool:
        """Take one packet from the rank; False when there is none (now, or for ever)."""
        try:
            packet = self.conn.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self.is_open = False  # it ended, became another program, or closed all that it found open
            return False
        try:
            _, message = protocol.decode(packet)
        except protocol.BadLine:
            return True  # not of the protocol: nothing is lost that could be shown
        if isinstance(message, protocol.Progress):
            self._take(message, packet)
        elif isinstance(message, protocol.Ended):
            self.ended = message
        return True

    def _take(self, message: protocol.Progress, packet: bytes) -> None:
        if message.rows:
            self._reports.append(packet, whole=True)
        old = self._latest or message
        self._latest = replace(
            message, step=old.step if message.step is None else message.step,
            total=old.total if message.total is None else message.total, device=message.device or old.device,
        )  # fmt: skip
        self._rows.extend(message.rows)
        self._bars.update({bar.id: bar for bar in message.bars})

    @property
    def error(self) -> str:
        """Why the disk takes nothing of what it says at present, "" if it does."""
        errors = (self._reports.error, *(stream.error for stream in self.streams))
        return next(filter(None, errors), "")

    def progress(self) -> protocol.Progress | None:
        """Return all reports since the last call as one event, None if there were none."""
        if self._latest is None:
            return None
        event = replace(self._latest, rows=thin(self._rows, _ROWS_A_LINE), bars=tuple(self._bars.values()))
        self._latest, self._rows, self._bars = None, [], {}
        return event

    def last_word(self, watch: memory.Watch) -> protocol.Ended | None:
        """Return how the rank ended, once its process has; None while it runs or where only torchrun can tell."""
        if self.ended is not None:
            return explained(self.ended, lambda: watch.why(None, self.cgroup))
        now = processes.read(self.hello.pid)
        if now is None or self.process is None or now.started != self.process.started:
            return None
        self.process = now  # torch gives it another name on the way
        if now.state not in "ZX" or now.parent == os.getpid() or _is_dead(now.parent):  # torchrun took it along
            return None
        return self.end_by_code(exit_codes.code_of(now.exit_status), watch)

    def end_by_code(self, code: int, watch: memory.Watch) -> protocol.Ended:
        """Return an end made from an exit code; of one that was killed `watch` knows why, perhaps."""
        out_of_memory = watch.why(self.process, self.cgroup) if exit_codes.is_kill(code) else ""
        return protocol.Ended(
            rank=self.hello.rank, restart=self.hello.restart, outcome="replaced" if self.is_replaced and code < 0 else exit_codes.outcome_of(code), code=code,
            meaning=exit_codes.meaning_of(code, out_of_memory=out_of_memory),
        )  # fmt: skip

    def end_as_replaced(self) -> protocol.Ended:
        """Return the end of a rank in whose place torchrun has started another one, because the nodes met anew."""
        hello = self.hello
        return protocol.Ended(rank=hello.rank, restart=hello.restart, outcome="replaced", code=-signal.SIGTERM)

    @property
    def is_running(self) -> bool:
        """Whether its process still runs (a zombie does not)."""
        now = processes.read(self.hello.pid)
        return (
            now is not None
            and self.process is not None
            and now.started == self.process.started
            and now.state not in "ZX"
        )

    @property
    def is_gone(self) -> bool:
        """Whether its end has been told, its process is gone, and nobody holds its streams any more."""
        return self.is_over and not any(stream.is_open for stream in self.streams) and not self.is_running

    def close(self) -> None:
        """Let go of everything."""
        self.conn.close()
        self._reports.close()
        for stream in self.streams:
            stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


STREAMS = ("stdout", "stderr")


def explained(word: protocol.Ended, why: Callable[[], str]) -> protocol.Ended:
    """Return a rank's last word, with the meaning of what killed a child of it: a worker of its DataLoader, say."""
    if word.failure is None or "killed by signal: Killed" not in word.failure.message:
        return word
    return replace(word, meaning=why())


def thin(rows: list[protocol.MetricRow], limit: int) -> tuple[protocol.MetricRow, ...]:
    """Return at most `limit` rows, evenly spaced, the last one always among them."""
    if len(rows) <= limit:
        return tuple(rows)
    return tuple(rows[(i + 1) * len(rows) // limit - 1] for i in range(limit))


def first_packet(conn: socket.socket) -> tuple[protocol.Message | None, list[int]]:
    """Return a packet's message and descriptors; None for a connection's end and for what is not of the protocol."""
    fds: list[int] = []
    try:
        packet, fds, _, _ = socket.recv_fds(conn, 1 << 18, 2)
        return (protocol.decode(packet)[1] if packet else None), fds
    except (OSError, protocol.BadLine):
        return None, fds


def _is_dead(pid: int) -> bool:
    process = processes.read(pid)
    return process is None or process.state in "ZX"

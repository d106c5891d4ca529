"""The agent's side of one rank: its socket, its pipes, its merged progress, and how it ended."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.records import logs, places
from distmagic.remote.system import exit_codes, memory, processes
from distmagic.remote.wire import protocol
from distmagic.remote.wire.codec import Numbers

_POINTS_AN_EVENT = 20  # of one metric
_NAMES_AN_EVENT = 400  # of metrics: an event is a line of at most 1 MiB
# size limit of a line of input, including its end: a pipe takes so much at once or nothing
_LINE_BYTES = 4096


class RankProcess:
    """A rank that has connected.

    `hello` is its first message. `fds` are the reading ends of its stdout and stderr, and the
    writing end of its stdin if a user can type. `others` are streams that are already being read.

    `ended` is its own report of its end, if it has sent one. `is_open`: its connection may bring
    more. `is_over`: its end is in the journal, since `over_at`. `is_replaced`: the agent killed it
    because an elastic job restarts its ranks. `pauses`, and starts and ends of cells, are those
    that are not journaled yet; `is_paused`: it waits for the user's input.
    """

    def __init__(
        self,
        conn: socket.socket,
        hello: protocol.Worker,
        fds: list[int],
        folder: Path,
        now: float,
        others: Sequence[RankStream] = (),
    ) -> None:
        self.conn = conn
        self.began = now
        self.hello = hello
        out, err, *typed = fds
        self.streams = (
            RankStream(out, folder, hello.rank, "stdout", now, others),
            RankStream(err, folder, hello.rank, "stderr", now, others),
        )
        self.process = processes.read(hello.pid)
        self.cgroup = memory.Cgroup(hello.pid)
        self.pidfd = processes.open_pidfd(hello.pid)
        self.ended: protocol.Ended | None = None
        self.is_over = self.is_replaced = False
        self.over_at = math.inf
        self.is_open = True
        self.pictures: list[protocol.Picture] = []
        self.pauses: list[protocol.Message] = []
        self._unsent: list[bytes] = []  # requests to the rank
        # The last cells that it was asked to run, and that it has ended.
        self._cell = self._ended_cell = 0
        self.is_paused = False
        self._stdin = typed
        for fd in typed:
            os.set_blocking(fd, False)
        # number of the prompt that it waits at; 0 for none, or after a line was passed on
        self._prompt = 0
        self._progress: protocol.Progress | None = None  # since the last event
        self._reports = logs.Log(
            folder / f"rank{hello.rank}.reports.jsonl", places.REPORTS_BYTES
        )

    def receive(self) -> bool:
        """Handle one packet of the rank, and return True. Return False if no packet waits.

        If the connection has ended, this also sets `is_open` to False: no packet can follow.
        """
        try:
            packet = self.conn.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            # It ended, became another program (exec), or closed all its descriptors.
            self.is_open = False
            return False
        try:
            _, message = protocol.decode(packet)
        except protocol.BadLine:
            return True  # the user's code wrote to distmagic's socket; more packets may follow
        self._take(message)
        return True

    def _take(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Progress):
            if message.points:
                for stream in self.streams:
                    stream.numbers = None  # it reports some, which take precedence
            self._merge(message)
        elif isinstance(message, protocol.Picture):
            self.pictures = [*self.pictures[-3:], message]
        elif isinstance(message, protocol.Paused | protocol.Resumed):
            self.pauses.append(message)
            self.is_paused = isinstance(message, protocol.Paused)
            self._prompt = message.prompt if self.is_paused else 0
        elif isinstance(message, protocol.OfCells):
            self.pauses.append(message)
            if isinstance(message, protocol.CellEnded):
                self._ended_cell = message.cell
        elif isinstance(message, protocol.Ended):
            self.ended = message

    def read_numbers(self, now: float) -> None:
        """Use the numbers that the rank only printed, if it reports none in another way."""
        at_s = now - self.began
        for stream in self.streams:
            rows = stream.numbers.take(at_s) if stream.numbers else []
            # Reports from before the print may still be in the socket.
            while rows and self.receive():
                pass
            if rows and stream.numbers:
                hello = self.hello
                message = protocol.Progress(
                    rank=hello.rank,
                    restart=hello.restart,
                    at_s=at_s,
                    points=protocol.points_of(rows),
                    is_printed=True,
                )
                self._merge(message)

    def type(self, line: protocol.RankInput) -> None:
        """Pass on a line of input, if the rank waits for it."""
        if line.prompt != self._prompt or not self._stdin:
            return
        self._prompt = 0
        if line.is_end:
            self.end_input()
            return
        first, _, _ = line.text.partition("\n")
        # The rank has closed its stdin, or has filled the pipe itself.
        with suppress(OSError):
            os.write(self._stdin[0], first.encode()[: _LINE_BYTES - 1] + b"\n")

    @property
    def is_at_cell(self) -> bool:
        """Whether the rank runs a cell: it has not ended its last one."""
        return self._cell > self._ended_cell

    def hand_on(self, request: protocol.Message) -> None:
        """Queue a request to the rank, and send it when its socket has room."""
        if isinstance(request, protocol.RunCell):
            self._cell = max(self._cell, request.cell)
        self._unsent.append(protocol.encode(request))
        self.flush()

    def flush(self) -> None:
        """Send queued requests as far as the rank's socket has room.

        A rank that takes nothing any more is about to end.
        """
        with suppress(OSError):
            while self._unsent:
                self.conn.send(self._unsent[0])
                del self._unsent[0]

    def end_input(self) -> None:
        """Close its standard input, and its requests: no more input and no more cells follow."""
        while self._stdin:
            os.close(self._stdin.pop())
        with suppress(OSError):
            self.conn.shutdown(socket.SHUT_WR)

    def _merge(self, message: protocol.Progress) -> None:
        if message.points:
            self._reports.append(kept_line(message), whole=True)
        before = self._progress
        self._progress = message if before is None else joined(before, message)

    @property
    def error(self) -> str:
        """Why the disk rejects its output and reports, "" if it doesn't."""
        out, err = self.streams
        return self._reports.error or out.error or err.error

    def progress(self) -> protocol.Progress | None:
        """Return all progress since the last call as one event, None if there was none."""
        found, self._progress = self._progress, None
        if found is None:
            return None
        points = {
            name: thin(one, _POINTS_AN_EVENT) for name, one in found.points.items()
        }
        return replace(found, points=points)

    def find_end(self, watch: memory.Watch) -> protocol.Ended | None:
        """Return how the rank ended; None while it runs, or if only torchrun can know."""
        if self.ended is not None:
            return explained(self.ended, lambda: watch.why(self.cgroup))
        now = self._now
        # If it is None, torchrun has reaped the rank: its report has the exit code.
        if now is None or (code := now.exit_code) is None:
            return None
        # The exit code of a zombie whose parent is no longer torchrun means nothing:
        # PR_SET_PDEATHSIG killed it because torchrun had ended.
        parent = processes.read(now.parent)
        if now.parent == os.getpid() or parent is None or parent.state in "ZX":
            return None
        return self.end_by_code(code, watch)

    def end_by_code(self, code: int, watch: memory.Watch) -> protocol.Ended:
        """Return how the rank ended, judged by its exit code.

        `watch` explains a kill for lack of memory.
        """
        outcome = exit_codes.outcome_of(code)
        if self.is_replaced and code < 0:
            outcome = "replaced"
        out_of_memory = ""
        if exit_codes.is_kill(code):
            out_of_memory = watch.why(self.cgroup)
        return protocol.Ended(
            rank=self.hello.rank,
            restart=self.hello.restart,
            outcome=outcome,
            code=code,
            meaning=exit_codes.meaning_of(code, out_of_memory=out_of_memory),
        )

    @property
    def is_running(self) -> bool:
        """Whether its process still runs; a zombie does not."""
        now = self._now
        return now is not None and now.state not in "ZX"

    @property
    def _now(self) -> processes.ProcessInfo | None:
        """Its process as it is now, None if it has ended."""
        now = processes.read(self.hello.pid)
        if now is None or self.process is None or now.started != self.process.started:
            return None
        return now

    @property
    def is_gone(self) -> bool:
        """Whether its end is in the journal, its process has ended, and no process has its pipes
        open.
        """
        if not self.is_over or any(stream.is_open for stream in self.streams):
            return False
        return not self.is_running

    def close(self) -> None:
        """Close all descriptors."""
        self.conn.close()
        self.end_input()
        self._reports.close()
        for stream in self.streams:
            stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


def explained(end: protocol.Ended, why: Callable[[], str]) -> protocol.Ended:
    """Return a rank's end; if a killed child made it fail (a DataLoader's worker), with `why()` as
    its meaning.
    """
    if end.failure is None or "killed by signal: Killed" not in end.failure.message:
        return end
    return replace(end, meaning=why())


def joined(before: protocol.Progress, message: protocol.Progress) -> protocol.Progress:
    """Return two messages about a rank's progress merged into one; the later one takes
    precedence.
    """
    bars = {bar.id: bar for bar in (*before.bars, *message.bars)}
    points = dict(before.points)
    for name, more in message.points.items():
        if name in points or len(points) < _NAMES_AN_EVENT:
            points[name] = Numbers((*points.get(name, ()), *more))
    return replace(
        message,
        step=before.step if message.step is None else message.step,
        total=before.total if message.total is None else message.total,
        points=points,
        bars=tuple(bars.values()),
        device=message.device or before.device,
        is_printed=(message if message.points else before).is_printed,
    )


def thin(points: Numbers, limit: int) -> Numbers:
    """Return at most `limit` points of a metric, evenly spaced, including the last one."""
    count = len(points) // 3
    if count <= limit:
        return points
    found: list[float] = []
    for number in range(1, limit + 1):
        end = 3 * (number * count // limit)
        found += points[end - 3 : end]
    return Numbers(found)


def kept_line(message: protocol.Progress) -> bytes:
    """Return the points of a report as the host keeps them, readable for people and programs."""
    points = {}
    for name, one in message.points.items():
        points[name] = list(zip(one[0::3], one[1::3], one[2::3], strict=True))
    line = {"restart": message.restart, "seconds_step_value": points}
    return json.dumps(line).encode() + b"\n"


def first_packet(conn: socket.socket) -> tuple[protocol.Message | None, list[int]]:
    """Return a packet's message and descriptors; the message is None at end of file, and for an
    invalid packet.
    """
    fds: list[int] = []
    try:
        packet, fds, _, _ = socket.recv_fds(conn, 1 << 18, 3)
        return (protocol.decode(packet)[1] if packet else None), fds
    except (OSError, protocol.BadLine):
        return None, fds

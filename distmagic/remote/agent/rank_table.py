"""All ranks of a node: accepts their connections, journals their output and reports, and determines
how each ended.

It also handles torchrun's own output and its reports of failed ranks. Nothing blocks: the agent's
selector calls the methods when a descriptor is readable.
"""

from __future__ import annotations

import errno
import os
import resource
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess, first_packet
from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import processes, socket_peer
from distmagic.remote.system.memory import Watch
from distmagic.remote.wire import protocol

_PROGRESS_S = 0.1
_PROGRESS_S_A_RANK = 0.001
# Time between a rank's end and a notice that its process still runs.
_LINGERING_S = 10.0
_PACKETS_A_TURN = 256  # packets of one rank in one turn


def pace_s(world_size: int) -> float:
    """Return the seconds between two progress events of a rank.

    Reports in between are merged into one event. So a notebook with more than 100 ranks reads 1,000
    events per second, however many ranks there are.
    """
    return max(_PROGRESS_S, _PROGRESS_S_A_RANK * world_size)


def _too_many_files(number: int) -> RuntimeError:
    """Return the error for ranks whose output can't be read.

    It ends the agent: otherwise they would run on unobserved.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RuntimeError(
        f"{os.strerror(number)}: this host allows a process {soft:,}, and the agent has up to 8 for each rank. "
        "Raise the hard limit (ulimit -Hn), or start fewer ranks on this host (--nproc-per-node)"
    )


@dataclass(eq=False)
class RankTable:
    """The ranks that have connected, including restarted ones, each until its process and its pipes
    are gone.
    """

    folder: Path
    journal: Journal
    selector: selectors.BaseSelector
    clock: Callable[[], float]
    _listener: socket.socket | None = None
    _torchrun: socket.socket | None = None  # its connection for reports
    ranks: list[RankProcess] = field(default_factory=list)
    # The exit code of the latest process of each local rank; None while unknown.
    codes: dict[int, int | None] = field(default_factory=dict)
    _started: tuple[int, int] = (0, 0)  # round and restart count of the latest rank
    _local_world_size: int = 0  # as the latest rank reported it
    streams: list[RankStream] = field(default_factory=list)
    last_cell: int = 0  # its number; the cell may be for ranks of other nodes
    # torchrun's last report of ranks that failed.
    engine_exits: tuple[protocol.Exit, ...] = ()
    memory: Watch = field(default_factory=Watch)
    failed_at: float | None = None  # when the first rank failed
    # The same for the ranks of the latest start, until torchrun restarts them.
    waits_since: float | None = None
    progress_at: float = 0.0
    noticed_lingering: bool = False
    noticed_full: bool = False
    noticed_room: bool = False

    # ---- connections

    def listen(self, path: str) -> None:
        """Listen on this unix socket for ranks and for torchrun, instead of the previous one."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
        self._listener = listener
        self.selector.register(
            listener, selectors.EVENT_READ, lambda: self._accept(listener)
        )

    def _accept(self, listener: socket.socket) -> None:
        """Accept all connections that wait."""
        try:
            while True:
                self._await_first(listener.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_many_files(error.errno) from error
            raise

    def _await_first(self, conn: socket.socket) -> None:
        if not socket_peer.is_ours(conn):
            conn.close()
            return
        self.selector.register(
            conn, selectors.EVENT_READ, lambda: self._receive_first(conn)
        )

    def _receive_first(self, conn: socket.socket) -> None:
        """Handle a connection's first packet: a rank's `Worker` with its pipes, a rank's end, or
        torchrun's first message.
        """
        message, fds = first_packet(conn)
        self.selector.unregister(conn)
        if isinstance(message, protocol.Worker):
            if len(fds) < 2:
                # The kernel passes no descriptor beyond the process's limit.
                raise _too_many_files(errno.EMFILE)
            now = self.clock()
            rank = RankProcess(conn, message, fds, self.folder, now, self.streams)
            self._add_rank(rank)
            return
        if isinstance(message, protocol.RankExits):
            conn.setblocking(False)
            self._torchrun = conn
            self.selector.register(conn, selectors.EVENT_READ, self.read_reports)
            return
        if isinstance(message, protocol.Ended):
            # The user's code has closed the rank's first connection, so it opened another one to
            # report its end.
            for rank in self.ranks:
                is_sender = (rank.hello.rank, rank.hello.restart) == (
                    message.rank,
                    message.restart,
                )
                if is_sender and not rank.is_over:
                    rank.ended = message
        for fd in fds:
            os.close(fd)
        conn.close()

    def _add_rank(self, rank: RankProcess) -> None:
        for older in [
            one for one in self.ranks if one.hello.local_rank == rank.hello.local_rank
        ]:
            self._notice_end(older)
            # torchrun has ended and reaped it in order to start this one, because the nodes met
            # again: its exit code is unknown.
            if not older.is_over:
                replaced = protocol.Ended(
                    rank=older.hello.rank,
                    restart=older.hello.restart,
                    outcome="replaced",
                    code=-signal.SIGTERM,
                )
                self._end_rank(older, replaced)
        self.ranks.append(rank)
        started = (rank.hello.round, rank.hello.restart)
        if started != self._started:
            self._started = started
            self.codes = {}  # torchrun restarts all ranks
            self.waits_since = None
        self._local_world_size = rank.hello.local_world_size
        self.codes[rank.hello.local_rank] = None
        self.journal.add(rank.hello)
        rank.conn.setblocking(False)
        self.selector.register(
            rank.conn, selectors.EVENT_READ, lambda: self._receive(rank)
        )
        if rank.pidfd >= 0:
            self.selector.register(
                rank.pidfd, selectors.EVENT_READ, lambda: self._notice_end(rank)
            )
        for stream in rank.streams:
            self.add_stream(stream)

    def add_stream(self, stream: RankStream) -> None:
        """Read a pipe from now on."""
        self.streams.append(stream)
        self.selector.register(
            stream.fd, selectors.EVENT_READ, lambda: self._read(stream)
        )

    # ---- output and progress

    def _read(self, stream: RankStream) -> None:
        stream.drain()
        if not stream.is_open:
            self._unwatch(stream.fd)

    def _receive(self, rank: RankProcess) -> None:
        for _ in range(_PACKETS_A_TURN):
            if not rank.receive():
                break
        else:
            return  # more may follow; the selector calls again
        if rank.ended is not None or not rank.is_open:
            self._unwatch(rank.conn)
            self._notice_end(rank)

    def write(self, now: float, *, last: bool = False) -> None:
        """Journal all output and pauses, and progress at the rate of `pace_s`; with `last` all of
        both.
        """
        self._write_streams(self.streams, now, last=last)
        for rank in self.ranks:
            self._write_pauses(rank)
            rank.flush()
        world_size = self.ranks[0].hello.world_size if self.ranks else 1
        if last or now - self.progress_at >= pace_s(world_size):
            self.progress_at = now
            for rank in self.ranks:
                self._write_progress(rank, now)
        self.journal.settle()
        self._notice_full()

    def _write_streams(
        self, streams: Iterable[RankStream], now: float, *, last: bool
    ) -> None:
        for stream in streams:
            event = stream.event(now, last=last)
            while event is not None:
                self.journal.add(event)
                event = stream.event(now, last=last)

    def _write_progress(self, rank: RankProcess, now: float) -> None:
        rank.read_numbers(now)
        progress = rank.progress()
        if progress is not None:
            self.journal.add(progress)
        for picture in rank.pictures:
            self.journal.add(picture)
        rank.pictures = []

    def _write_pauses(self, rank: RankProcess) -> None:
        """Journal that the rank waits for input or continues, starts or ends a cell, after all
        earlier output.
        """
        if rank.pauses:
            for stream in rank.streams:
                stream.drain_all()
            self._write_streams(rank.streams, self.clock(), last=True)
            self._write_progress(rank, self.clock())
        for pause in rank.pauses:
            if isinstance(pause, protocol.CellEnded):
                logged = tuple(stream.text.log.end for stream in rank.streams)
                pause = replace(pause, logged=logged)  # noqa: PLW2901
            self.journal.add(pause)
        rank.pauses = []

    @property
    def has_paused(self) -> bool:
        """Whether a rank waits for the user's input."""
        return any(rank.is_paused and not rank.is_over for rank in self.ranks)

    def type(self, line: protocol.RankInput) -> None:
        """Pass a line of input to the rank that waits for it."""
        for rank in self.ranks:
            if rank.hello.rank == line.rank and not rank.is_over:
                rank.type(line)

    @property
    def is_at_cell(self) -> bool:
        """Whether a rank runs a cell."""
        return any(rank.is_at_cell and not rank.is_over for rank in self.ranks)

    def hand_on(self, request: protocol.HandedOn) -> None:
        """Pass a request of the notebook to ranks that stay."""
        if isinstance(request, protocol.RunCell):
            self.last_cell = max(self.last_cell, request.cell)
        for rank in self.ranks:
            if rank.hello.rank in request.ranks and not rank.is_over:
                rank.hand_on(request)

    def end_input(self) -> None:
        """Close the standard input of all ranks, and their requests.

        Otherwise a debugger would keep a rank from ending, and a rank that stays would wait for its
        next cell.
        """
        for rank in self.ranks:
            rank.end_input()

    def _notice_full(self) -> None:
        """Journal one notice when the disk is full, and one when it has room again."""
        errors = [self.journal.error]
        errors += [stream.error for stream in self.streams]
        errors += [rank.error for rank in self.ranks]
        error = next((error for error in errors if error), "")
        if error and not self.noticed_full:
            self.noticed_full = True
            text = f"can't write to {self.folder} ({error}): the run continues, but its later output is not kept"
            self.journal.notice(text)
        if not error and self.noticed_full and not self.noticed_room:
            self.noticed_room = True
            text = (
                f"{self.folder} can be written to again; each log notes what it lacks"
            )
            self.journal.notice(text)

    # ---- ends

    @property
    def have_all_returned(self) -> bool:
        """Whether any ranks exist, and the latest of each local rank has succeeded."""
        if not self.codes or len(self.codes) < self._local_world_size:
            return False  # a rank may connect after another one has returned
        return all(code == 0 for code in self.codes.values())

    def notice_ends(self) -> None:
        """Journal the ends of ranks whose processes have ended since the last call."""
        for rank in self.ranks:
            self._notice_end(rank)

    def _notice_end(self, rank: RankProcess) -> None:
        if rank.is_over:
            return
        while rank.ended is None and rank.receive():
            pass
        end = rank.find_end(self.memory)
        if end is not None:
            self._end_rank(rank, end)

    def read_reports(self) -> None:
        """Handle all reports that torchrun has sent, and the end of its connection."""
        while self._torchrun is not None:
            try:
                packet = self._torchrun.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._unwatch(self._torchrun)
                self._torchrun.close()
                self._torchrun = None
                return
            _, message = protocol.decode(packet)
            if isinstance(message, protocol.RankExits | protocol.EngineEnded):
                self._end_by_report(message.exits)
            if isinstance(message, protocol.EngineEnded):
                self.engine_exits = message.exits

    def _end_by_report(self, exits: Iterable[protocol.Exit]) -> None:
        """Journal the ends of ranks whose exit codes are in a report of torchrun, which reaps
        them.
        """
        self.notice_ends()  # how a rank says that it ended comes first
        codes = {(exit_.rank, exit_.pid): exit_.code for exit_ in exits}
        for rank in self.ranks:
            code = codes.get((rank.hello.rank, rank.hello.pid))
            if code is not None and not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, self.memory))

    def end_unreported(self, engine_code: int) -> None:
        """Journal the ends of ranks that torchrun's report lacks.

        They succeeded if torchrun did. Otherwise torchrun ended them by SIGTERM, before it exited
        itself.
        """
        code = 0 if engine_code == 0 else -signal.SIGTERM
        for rank in self.ranks:
            if not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, self.memory))

    def _end_rank(self, rank: RankProcess, end: protocol.Ended) -> None:
        rank.is_over = True
        rank.over_at = self.clock()
        # Its last output and progress precede its end, so that a reader need not wait for more.
        for stream in rank.streams:
            stream.drain_all()
        self._write_streams(rank.streams, self.clock(), last=True)
        self._write_progress(rank, rank.over_at)
        self._write_pauses(rank)
        self.journal.add(end)
        self.codes[rank.hello.local_rank] = end.code
        if self.failed_at is None and end.code != 0:
            self.failed_at = self.clock()
        is_latest = (rank.hello.round, rank.hello.restart) == self._started
        has_failed = end.code != 0 and end.outcome != "replaced"
        if self.waits_since is None and is_latest and has_failed:
            self.waits_since = self.clock()
        self._unwatch(rank.pidfd)

    def kill_older(self, before: float) -> None:
        """Kill the ranks that connected before that time.

        Later ones already run without the lost node.
        """
        for rank in self.ranks:
            if rank.began < before and not rank.is_over and rank.process is not None:
                rank.is_replaced = True
                processes.send(rank.process, signal.SIGKILL)

    def notice_lingering(self, now: float) -> None:
        """Journal one notice about a rank that has returned while its process still runs: the run
        seems to hang.
        """
        if self.noticed_lingering:
            return
        for rank in self.ranks:
            if now - rank.over_at > _LINGERING_S and rank.is_running:
                self.noticed_lingering = True
                number = rank.hello.rank
                text = f"rank {number} has finished, but its process has not ended: a thread or an atexit function still runs"
                self.journal.notice(text)
                return

    def forget_gone(self, now: float) -> None:
        """Release the descriptors of ranks that are gone: a job with many restarts would use them
        up.
        """
        for rank in [rank for rank in self.ranks if rank.is_gone]:
            self._write_streams(rank.streams, now, last=True)
            self._write_progress(rank, now)
            self.ranks.remove(rank)
            self.streams = [
                stream for stream in self.streams if stream not in rank.streams
            ]
            self._unwatch(rank.conn)
            for stream in rank.streams:
                self._unwatch(stream.fd)
            rank.close()

    def _unwatch(self, source: socket.socket | int) -> None:
        # Not registered any more, or -1 for no descriptor.
        with suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def finish(self, now: float) -> None:
        """Journal everything that is still in pipes and sockets."""
        for stream in self.streams:
            stream.drain_all()
        self.notice_ends()
        self.write(now, last=True)

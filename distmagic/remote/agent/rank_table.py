"""All ranks of a node, and torchrun beside them: hears what they say, writes it down, and tells how each ended.

Nothing in here blocks; the agent's selector says when to look.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess, first_packet
from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import memory, processes, socket_peer
from distmagic.remote.wire import protocol

_PROGRESS_S, _PROGRESS_S_A_RANK = 0.1, 0.0005
_LINGERING_S = 10.0


def pace_s(world_size: int) -> float:
    """Return how often a rank's progress is told. Reports in between travel together, 20 of them at most.

    So a notebook that follows more than 200 ranks has 2,000 lines a second to read; nobody sees more of a table.
    """
    return max(_PROGRESS_S, _PROGRESS_S_A_RANK * world_size)


class RankTable:
    """The ranks that have said hello, restarted ones included, until they are gone."""

    def __init__(
        self, folder: Path, journal: Journal, selector: selectors.BaseSelector, clock: Callable[[], float]
    ) -> None:
        self.folder, self.journal, self.selector, self.clock = folder, journal, selector, clock
        self.ranks: list[RankProcess] = []
        self.streams: list[RankStream] = []
        self.newcomers: list[socket.socket] = []
        self.engine_exits: tuple[protocol.Exit, ...] = ()  # what torchrun says of ranks that failed
        self.memory = memory.Watch()
        self.failed_at: float | None = None  # when the first rank failed, of those that torchrun didn't start again
        self.progress_at = 0.0
        self.told_lingering = self.told_full = self.told_room = False

    # ---- who comes

    def listen(self, path: str) -> None:
        """Let ranks and torchrun say hello at this unix socket."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        conn, _ = listener.accept()
        if not socket_peer.is_ours(conn):
            conn.close()
            return
        self.newcomers.append(conn)
        self.selector.register(conn, selectors.EVENT_READ, lambda: self._greet(conn))

    def _greet(self, conn: socket.socket) -> None:
        """Take a newcomer's first packet: a rank's hello with its pipes, its end, or torchrun's report."""
        message, fds = first_packet(conn)
        self.selector.unregister(conn)
        self.newcomers.remove(conn)
        if isinstance(message, protocol.Worker):
            if len(fds) != 2:
                raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: no room for the streams of a rank")
            self._add_rank(RankProcess(conn, message, fds, self.folder, self.clock()))
            return
        if isinstance(message, protocol.EngineEnded):
            self.engine_exits = message.exits
        if isinstance(message, protocol.Ended):
            self._hear_end(message)
        for fd in fds:
            os.close(fd)
        conn.close()

    def _hear_end(self, word: protocol.Ended) -> None:
        """Take the end of a rank whose own connection was closed by its own code."""
        for rank in self.ranks:
            if (rank.hello.rank, rank.hello.restart) == (word.rank, word.restart) and not rank.is_over:
                rank.ended = word

    def _add_rank(self, rank: RankProcess) -> None:
        for older in [one for one in self.ranks if one.hello.local_rank == rank.hello.local_rank]:
            self._notice_end(older)
            if not older.is_over:  # torchrun has ended it to start this one, and its exit code is gone with it
                self._end_rank(older, older.end_as_replaced())
        self.ranks.append(rank)
        self.journal.add(rank.hello)
        rank.conn.setblocking(False)
        self.selector.register(rank.conn, selectors.EVENT_READ, lambda: self._hear(rank))
        if rank.pidfd >= 0:
            self.selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._notice_end(rank))
        for stream in rank.streams:
            self.add_stream(stream)

    def add_stream(self, stream: RankStream) -> None:
        """Read a stream from now on."""
        self.streams.append(stream)
        self.selector.register(stream.fd, selectors.EVENT_READ, lambda: self._read(stream))

    # ---- what they say

    def _read(self, stream: RankStream) -> None:
        stream.drain()
        if not stream.is_open:
            self._unwatch(stream.fd)

    def _hear(self, rank: RankProcess) -> None:
        for _ in range(256):  # then others have their turn
            if not rank.receive():
                break
        else:
            return
        if rank.ended is not None or not rank.is_open:
            self._unwatch(rank.conn)
            self._notice_end(rank)

    def write(self, now: float, *, last: bool = False) -> None:
        """Write to the journal what came since the last call; progress at most ten times a second, see `pace_s`."""
        self._write_streams(self.streams, now, last=last)
        if now - self.progress_at >= pace_s(self.ranks[0].hello.world_size if self.ranks else 1) or last:
            self.progress_at = now
            for rank in self.ranks:
                if (progress := rank.progress()) is not None:
                    self.journal.add(progress)
        self.journal.settle()
        self._tell_full()

    def _write_streams(self, streams: Iterable[RankStream], now: float, *, last: bool) -> None:
        for stream in streams:
            while (event := stream.event(now, last=last)) is not None:
                self.journal.add(event)

    def _tell_full(self) -> None:
        """Say once that the disk takes nothing, and once that it does again."""
        errors = (self.journal.error, *(one.error for one in self.streams), *(one.error for one in self.ranks))
        error = next(filter(None, errors), "")
        if error and not self.told_full:
            self.told_full = True
            text = (
                f"can't write to {self.folder} ({error}): the run goes on, but what it prints from here on is not kept"
            )
            self.journal.add(protocol.Notice(text=text))
        if self.told_full and not error and not self.told_room:
            self.told_room = True
            self.journal.add(
                protocol.Notice(text=f"{self.folder} can be written to again; each log says what it lacks")
            )

    def _write_rank(self, rank: RankProcess, now: float) -> None:
        self._write_streams(rank.streams, now, last=True)
        if (progress := rank.progress()) is not None:
            self.journal.add(progress)

    # ---- how they end

    def notice_ends(self) -> None:
        """Tell the ends of ranks whose processes are over."""
        for rank in self.ranks:
            self._notice_end(rank)

    def _notice_end(self, rank: RankProcess) -> None:
        if rank.is_over:
            return
        while rank.ended is None and rank.receive():
            pass
        word = rank.last_word(self.memory)
        if word is not None:
            self._end_rank(rank, word)

    def end_as_torchrun_tells(self) -> None:
        """Tell the ends that only torchrun, the ranks' parent, has seen."""
        codes = {(exit_.rank, exit_.pid): exit_.code for exit_ in self.engine_exits}
        for rank in self.ranks:
            code = codes.get((rank.hello.rank, rank.hello.pid))
            if code is not None and not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, self.memory))

    def end_untold(self, engine_code: int) -> None:
        """End the ranks of which torchrun said nothing: they did well, or it ended them when it was ended itself."""
        code = 0 if engine_code == 0 else -signal.SIGTERM
        for rank in self.ranks:
            if not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, self.memory))

    def _end_rank(self, rank: RankProcess, word: protocol.Ended) -> None:
        rank.is_over, rank.over_at = True, self.clock()
        for stream in rank.streams:
            stream.drain_all()
        self._write_rank(rank, self.clock())
        self.journal.add(word)
        if self.failed_at is None and word.code != 0:
            self.failed_at = self.clock()
        self._unwatch(rank.pidfd)

    def end_older(self, before: float) -> None:
        """Kill the ranks that were there before that time; younger ones are of a world without the lost node."""
        for rank in self.ranks:
            if rank.began < before and not rank.is_over and rank.process is not None:
                rank.is_replaced = True
                processes.send(rank.process, signal.SIGKILL)

    def notice_lingering(self, now: float) -> None:
        """Say once that a rank has returned and its process goes on: without this the run just seems to hang."""
        late = [rank for rank in self.ranks if now - rank.over_at > _LINGERING_S and rank.is_running]
        if late and not self.told_lingering:
            self.told_lingering = True
            text = f"rank {late[0].hello.rank} has finished, but its process goes on: a thread or an atexit function still runs"
            self.journal.add(protocol.Notice(text=text))

    def forget_gone(self, now: float) -> None:
        """Let go of ranks that are over, with all that held their streams: restarts must not use up descriptors."""
        for rank in [rank for rank in self.ranks if rank.is_gone]:
            self._write_rank(rank, now)
            self.ranks.remove(rank)
            self.streams = [stream for stream in self.streams if stream not in rank.streams]
            self._unwatch(rank.conn)
            for stream in rank.streams:
                self._unwatch(stream.fd)
            rank.close()

    def _unwatch(self, source: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not watched (any more), or -1 for no descriptor
            self.selector.unregister(source)

    def finish(self, now: float) -> None:
        """Take and write the last of everything."""
        for stream in self.streams:
            stream.drain_all()
        self.notice_ends()
        self.write(now, last=True)

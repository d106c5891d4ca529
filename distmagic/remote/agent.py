"""The agent: one per node of a job, in its own session. Starts torchrun, gathers what ranks say, ends everything.

One thread and one loop; nothing in it blocks. Its standard input says what to start (a `Start` line); its argument is
the number of the listening socket of its readers, made by `contact`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from distmagic.remote import engine, exits, places, processes, protocol
from distmagic.remote.ending import Ending
from distmagic.remote.endpoint import Dialer
from distmagic.remote.journal import FILE, Journal
from distmagic.remote.ranks import Rank, first_packet
from distmagic.remote.readers import Reader
from distmagic.remote.streams import Stream

_TICK_S = 0.05
_PROGRESS_S = 0.1
_TOUCH_S = 30.0
_LINGERING_S = 10.0
_LEFTOVER_GRACE_S = 1.0  # for what ranks left running when torchrun is over


class Agent:
    """All of one node's job. `run` returns when nothing of it is left but this process."""

    def __init__(self, start: protocol.Start, listener: socket.socket, clock: Callable[[], float]) -> None:
        self.start, self.clock = start, clock
        self.folder = places.job_dir(start.job, start.node_rank)
        self.run_dir = places.run_dir(start.job, start.node_rank)
        self.journal = Journal(self.folder)
        self.selector = selectors.DefaultSelector()
        self.ending = Ending()
        self.readers: list[Reader] = []
        self.ranks: list[Rank] = []
        self.streams: list[Stream] = []
        self.newcomers: list[socket.socket] = []
        self.engine_pid = 0
        self.engine_code: int | None = None
        self.engine_exits: tuple[protocol.Exit, ...] = ()
        self.reason = "done"
        self.is_final = False
        self.dialer: Dialer | None = None
        self.out_of_memory_before = exits.count_out_of_memory()
        self.lease_until = clock() + start.lease_s
        self.progress_at = 0.0
        self.touch_at = clock()
        self.told_lingering = self.told_full = False
        self._listen(listener, self._accept_reader)
        self._listen_to_ranks()

    # ---- beginning

    def _listen(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda: accept(listener))

    def _listen_to_ranks(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.run_dir / "ranks"))
        listener.listen(128)
        self._listen(listener, self._accept_rank)

    def begin(self) -> None:
        """Start torchrun and tell it."""
        self.journal.add(
            protocol.Hello(
                protocol=protocol.PROTOCOL, job=self.start.job, node_rank=self.start.node_rank,
                hostname=socket.gethostname(), pid=os.getpid(),
            )
        )  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-u", sys.path[0], "engine", *self.start.torchrun, sys.path[0], "worker"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.start.cwd,
            env=engine.environment(self.start, dict(os.environ), self.folder, self.run_dir), start_new_session=True,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        for pipe, name in ((child.stdout, "stdout"), (child.stderr, "stderr")):
            self._add_stream(Stream(os.dup(pipe.fileno()), self.folder, -1, name, self.clock()))
            pipe.close()
        self.engine_pid = child.pid
        child.returncode = 0  # `reap` collects it; Popen must not try
        self.journal.add(protocol.Engine(pid=child.pid))
        if self.start.endpoint:
            address, port = self.start.endpoint.split()
            self.dialer = Dialer(address, int(port), lead=self.start.lead, now=self.clock())

    # ---- the loop

    def run(self) -> None:
        """Go on until the job is over and every reader has been told, or nobody holds the lease."""
        while not self._may_go():
            for key, _ in self.selector.select(_TICK_S):
                key.data()
            self._tick(self.clock())

    def _may_go(self) -> bool:
        told = all(reader.has_all(self.journal) for reader in self.readers)
        return self.is_final and (told or self.clock() > self.lease_until)

    def _tick(self, now: float) -> None:
        self._reap(now)
        if self.dialer is not None and (found := self.dialer.poll(now)) is not None:
            self.journal.add(found)
        self._write_events(now)
        self._forget_gone_ranks(now)
        self._notice_lingering(now)
        if now >= self.touch_at:
            self.touch_at = now + _TOUCH_S
            places.touch((self.folder / FILE, *map(places.blob, (self.start.call, self.start.code)), sys.path[0]))
        if now > self.lease_until and not self.ending.has_begun:
            self.stop(now, 2.0, "lease")
        self.ending.step(now)
        if self.ending.is_done and not self.is_final and (self.engine_code is not None or self.ending.survivors):
            self._finish(now)
        for reader in self.readers:
            reader.send(self.journal)
        for reader in [reader for reader in self.readers if not reader.is_open]:
            self._drop_reader(reader)

    def _reap(self, now: float) -> None:
        status = processes.reap().get(self.engine_pid)
        for rank in self.ranks:
            self._notice_end(rank)
        if status is not None:
            self.engine_code = exits.code_of(status)
            self._end_ranks_as_torchrun_tells()
            self._write_events(now, last=True)
            self.journal.add(protocol.Engineended(code=self.engine_code, exits=self.engine_exits))
            self._end_ranks_untold()
            self.ending.begin(now, _LEFTOVER_GRACE_S)

    # ---- ranks

    def _accept_rank(self, listener: socket.socket) -> None:
        conn, _ = listener.accept()
        self.newcomers.append(conn)
        self.selector.register(conn, selectors.EVENT_READ, lambda: self._greet(conn))

    def _greet(self, conn: socket.socket) -> None:
        """Take a newcomer's first packet: a rank's hello with its pipes, its end, or the engine's report."""
        message, fds = first_packet(conn)
        self.selector.unregister(conn)
        self.newcomers.remove(conn)
        if isinstance(message, protocol.Worker):
            if len(fds) != 2:
                raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: no room for the streams of a rank")
            self._add_rank(Rank(conn, message, fds, self.folder, self.clock()))
            return
        if isinstance(message, protocol.Engineended):
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

    def _add_rank(self, rank: Rank) -> None:
        self.ranks.append(rank)
        self.journal.add(rank.hello)
        rank.conn.setblocking(False)
        self.selector.register(rank.conn, selectors.EVENT_READ, lambda: self._hear(rank))
        if rank.pidfd >= 0:
            self.selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._notice_end(rank))
        for stream in rank.streams:
            self._add_stream(stream)

    def _add_stream(self, stream: Stream) -> None:
        self.streams.append(stream)
        self.selector.register(stream.fd, selectors.EVENT_READ, lambda: self._read(stream))

    def _read(self, stream: Stream) -> None:
        stream.drain()
        if not stream.is_open:
            self._unwatch(stream.fd)

    def _hear(self, rank: Rank) -> None:
        for _ in range(256):  # then others have their turn
            if not rank.receive():
                break
        else:
            return
        if rank.ended is not None or not rank.is_open:
            self._unwatch(rank.conn)
            self._notice_end(rank)

    def _notice_end(self, rank: Rank) -> None:
        if rank.is_over:
            return
        while rank.ended is None and rank.receive():
            pass
        word = rank.last_word(out_of_memory=exits.count_out_of_memory() > self.out_of_memory_before)
        if word is not None:
            self._end_rank(rank, word)

    def _end_ranks_as_torchrun_tells(self) -> None:
        codes = {(exit_.rank, exit_.pid): exit_.code for exit_ in self.engine_exits}
        for rank in self.ranks:
            code = codes.get((rank.hello.rank, rank.hello.pid))
            if code is not None and not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, out_of_memory=False))

    def _end_ranks_untold(self) -> None:
        """End the ranks of which torchrun said nothing: they did well, or it ended them when it was ended itself."""
        code = 0 if self.engine_code == 0 else -signal.SIGTERM
        for rank in self.ranks:
            if not rank.is_over and not rank.is_running:
                self._end_rank(rank, rank.end_by_code(code, out_of_memory=False))

    def _notice_lingering(self, now: float) -> None:
        """Say once that a rank has returned and its process goes on: without this the run just seems to hang."""
        late = [rank for rank in self.ranks if now - rank.over_at > _LINGERING_S and rank.is_running]
        if late and not self.told_lingering and not self.ending.has_begun:
            self.told_lingering = True
            text = f"rank {late[0].hello.rank} has finished, but its process goes on: a thread or an atexit function still runs"
            self.journal.add(protocol.Notice(level="info", text=text))

    def _forget_gone_ranks(self, now: float) -> None:
        """Let go of ranks that are over, with all that held their streams: restarts must not use up descriptors."""
        for rank in [rank for rank in self.ranks if rank.is_gone]:
            self._write_rank(rank, now, last=True)
            self.ranks.remove(rank)
            self.streams = [stream for stream in self.streams if stream not in rank.streams]
            self._unwatch(rank.conn)
            for stream in rank.streams:
                self._unwatch(stream.fd)
            rank.close()

    def _unwatch(self, source: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not watched (any more), or -1 for no descriptor
            self.selector.unregister(source)

    def _end_rank(self, rank: Rank, word: protocol.Ended) -> None:
        rank.is_over, rank.over_at = True, self.clock()
        for stream in rank.streams:
            stream.drain_all()
        self._write_rank(rank, self.clock(), last=True)
        self.journal.add(word)
        self._unwatch(rank.pidfd)

    def _write_rank(self, rank: Rank, now: float, *, last: bool = False) -> None:
        for stream in rank.streams:
            if (event := stream.event(now, last=last)) is not None:
                self.journal.add(event)
        if (progress := rank.progress()) is not None:
            self.journal.add(progress)

    def _write_events(self, now: float, *, last: bool = False) -> None:
        for stream in self.streams:
            if (event := stream.event(now, last=last)) is not None:
                self.journal.add(event)
        if now - self.progress_at >= _PROGRESS_S or last:
            self.progress_at = now
            for rank in self.ranks:
                if (progress := rank.progress()) is not None:
                    self.journal.add(progress)
        full = any(s.lost_bytes for s in self.streams) or any(rank.is_disk_full for rank in self.ranks)
        if full and not self.told_full:
            self.told_full = True
            self.journal.add(protocol.Notice(level="warning", text="the disk is full: output from here on is lost"))

    # ---- readers

    def _accept_reader(self, listener: socket.socket) -> None:
        conn, _ = listener.accept()
        reader = Reader(conn)
        self.readers.append(reader)
        self.selector.register(conn, selectors.EVENT_READ, lambda: self._obey(reader))

    def _obey(self, reader: Reader) -> None:
        now = self.clock()
        for request in reader.receive():
            self.lease_until = now + self.start.lease_s
            if isinstance(request, protocol.Stop):
                self.stop(now, request.grace_s, request.reason)
        if not reader.is_open:
            self._drop_reader(reader)

    def _drop_reader(self, reader: Reader) -> None:
        if reader in self.readers:
            self.readers.remove(reader)
            self.selector.unregister(reader.conn)
            reader.close()

    # ---- the end

    def stop(self, now: float, grace_s: float, reason: str) -> None:
        """End everything: SIGTERM, and SIGKILL after `grace_s`."""
        if not self.is_final:
            self.reason = self.reason if self.ending.has_begun else reason
            self.ending.begin(now, grace_s)

    def _finish(self, now: float) -> None:
        """Say the last word: every process of the job is gone, but for survivors that are named."""
        for stream in self.streams:
            stream.drain_all()
        for rank in self.ranks:
            self._notice_end(rank)
        self._write_events(now, last=True)
        self.journal.add(protocol.Final(reason=self.reason, survivors=self.ending.survivors))
        self.is_final = True
        shutil.rmtree(self.run_dir, ignore_errors=True)


def main(argv: list[str]) -> None:
    """Read a `Start` line from stdin and be its agent."""
    start = protocol.decode(sys.stdin.buffer.readline())[1]
    assert isinstance(start, protocol.Start)
    os.environ.pop("DISTMAGIC_WORKER", None)
    processes.become_subreaper()
    listener = socket.socket(fileno=int(argv[0]))
    agent = Agent(start, listener, time.monotonic)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop(time.monotonic(), 2.0, "the agent was asked to end"))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    signal.set_wakeup_fd(_wakeup(agent.selector), warn_on_full_buffer=False)
    try:
        agent.begin()
        agent.run()
    finally:
        shutil.rmtree(agent.run_dir, ignore_errors=True)
    os._exit(0)


def _wakeup(selector: selectors.BaseSelector) -> int:
    """Return the writing end of a pipe whose other end wakes the loop at a signal."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    selector.register(reading, selectors.EVENT_READ, lambda: os.read(reading, 4096))
    return writing

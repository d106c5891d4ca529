"""Collects the stack traces of all ranks of a node, and journals them.

Nothing in this module blocks. NCCL may take seconds to report the processes that it misses, so a
thread asks it, on the node of rank 0: it reports the same to all.

A rank that has a thread for such requests is asked by a file (rank/calls.py). Any other rank, and
one whose thread does not answer, is asked by a signal, unless the request forbids it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.checkup import nccl_ras
from distmagic.remote.rank import calls, sources, stacks
from distmagic.remote.rank.stacks import Sources
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import processes, threads
from distmagic.remote.system.memory import text_of
from distmagic.remote.wire import protocol

_ASLEEP_S = 1.0  # time limit for a process that is stopped, or blocked in the kernel
_PATIENCE_S = 4.0  # time limit for any other: the machine may be very busy
_READ_BYTES = 1 << 20
_STATES = {
    "T": "its process is stopped (kill -CONT continues it)",
    "t": "its process is held by a debugger",
    "D": "its process waits inside the kernel",
    "Z": "its process has ended",
}


@dataclass
class _Asked:
    """A rank that was asked: by the signal, or by its file of calls.

    `text` is the last content of its file of stacks.
    """

    rank: RankProcess
    by_signal: bool
    text: str = ""


@dataclass(eq=False)
class StackDumper:
    """Handles one request at a time: `request` queues it, `step` continues with it.

    The code is the payload with the user's sources, the bundle the file from which distmagic itself
    runs. The modules are the folder of the user's own modules, "" on the notebook machine.
    """

    _run_dir: Path
    _code: Path
    _bundle: str
    _journal: Journal
    _modules: str = ""
    _sources: Sources | None = None
    # Requests by ID, and whether they are quiet.
    _queue: dict[str, bool] = field(default_factory=dict)
    _waiting: list[_Asked] = field(default_factory=list)
    # Processes that were checked after their end.
    _over: set[int] = field(default_factory=set)
    _asked_last: set[int] = field(default_factory=set)  # processes, by `ask_last`
    _nccl: list[str] = field(default_factory=list)  # answers of NCCL for the journal
    # ID of the current request, "" for none; all its events have it.
    _request_id: str = ""
    _quietly: bool = False
    _began: float = 0.0
    _count: int = 0

    def request(self, request_id: str, *, quietly: bool = False) -> None:
        """Queue a request, unless it is already queued or in progress."""
        if request_id != self._request_id:
            self._queue.setdefault(request_id, quietly)

    def step(self, now: float, ranks: Sequence[RankProcess]) -> None:
        """Start the next request, or journal the answers to the current one; also the stacks that
        ended ranks left.
        """
        for rank in ranks:
            pid = rank.hello.pid
            if rank.is_over and pid not in self._over:
                self._over.add(pid)
                reply = calls.reply_of(self._run_dir, pid)
                has_left = reply is not None and reply[0].request_id == protocol.LEFT
                if reply is not None and (has_left or pid in self._asked_last):
                    left = _Asked(rank=rank, by_signal=False, text=reply[1])
                    self._answer(left, reply[0].calls, protocol.LEFT)
        while self._nccl:
            lines = self._nccl.pop().split("\n")
            if found := "; ".join(line.strip() for line in lines if line.strip()):
                self._journal.add(protocol.Notice(text=f"NCCL reports: {found}."))
        if not self._request_id and self._queue:
            self._begin(
                now, [rank for rank in ranks if not rank.is_over and rank.is_running]
            )
        elif self._request_id:
            asked, self._waiting = self._waiting, []
            for one in asked:
                if not self._handle(one, now):
                    self._waiting.append(one)
            self._end_if_all()

    def ask_last(self, ranks: Sequence[RankProcess]) -> None:
        """Ask the ranks for their calls before they are ended: they may wait for one that has
        failed.

        The calls are journaled when a rank is over, as those that it leaves by itself.
        """
        for rank in ranks:
            pid = rank.hello.pid
            has_left = rank.is_over or calls.reply_of(self._run_dir, pid) is not None
            if not has_left and calls.ask(self._run_dir, pid):
                self._asked_last.add(pid)

    def has_answers(self, ranks: Sequence[RankProcess]) -> bool:
        """Whether each of these ranks that `ask_last` has asked has answered or ended."""
        return all(
            rank.is_over or calls.reply_of(self._run_dir, rank.hello.pid) is not None
            for rank in ranks
            if rank.hello.pid in self._asked_last
        )

    def _begin(self, now: float, ranks: Sequence[RankProcess]) -> None:
        self._request_id = next(iter(self._queue))
        self._quietly = self._queue.pop(self._request_id)
        self._began = now
        self._count = len(ranks)
        if not self._quietly and any(rank.hello.rank == 0 for rank in ranks):
            pids = [rank.hello.pid for rank in ranks]
            with suppress(RuntimeError):  # the system allows no further thread
                threads.begin("ras", lambda: self._nccl.append(nccl_ras.errors(pids)))
        for rank in ranks:
            if calls.ask(self._run_dir, rank.hello.pid):
                self._waiting.append(_Asked(rank=rank, by_signal=False))
            elif not self._quietly:
                self._ask_by_signal(rank)
        self._end_if_all()

    def _ask_by_signal(self, rank: RankProcess) -> None:
        if rank.process is None or not stacks.is_ready(self._run_dir, rank.hello.pid):
            silence = "it is still starting, or its program handles the signal that asks for stacks"
            self._journal_rank(rank, silence=silence)
            return
        with suppress(OSError):
            os.truncate(stacks.file_of(self._run_dir, rank.hello.pid), 0)
        processes.send(rank.process, stacks.SIGNAL)
        self._waiting.append(_Asked(rank=rank, by_signal=True))

    def _handle(self, one: _Asked, now: float) -> bool:
        """Journal a rank's stacks once they are complete, or can't be expected; return whether that
        is so.
        """
        if not one.by_signal:
            reply = calls.reply_of(self._run_dir, one.rank.hello.pid)
            if reply is not None:
                found, one.text = reply
                self._answer(one, found.calls)
                return True
            if now - self._began < _ASLEEP_S:
                return False
            if not self._quietly:
                self._ask_by_signal(one.rank)
            return True
        before = one.text
        one.text = self._read(one.rank)
        pid = one.rank.hello.pid
        if stacks.is_whole(one.text, self._bundle) and stacks.is_ready(
            self._run_dir, pid
        ):
            self._answer(one)
            return True
        if one.text != before or now - self._began < _ASLEEP_S:
            return False  # still writing, or just signalled
        state, where = _state(one.rank)
        if state not in _STATES and now - self._began < _PATIENCE_S:
            return False
        if one.text:
            # Incomplete, or in an unknown format: better than nothing.
            self._answer(one)
        else:
            silence = _STATES.get(state, f"it gave no answer within {_PATIENCE_S:g} s")
            self._journal_rank(one.rank, silence=silence + where)
        return True

    def _read(self, rank: RankProcess) -> str:
        try:
            with stacks.file_of(self._run_dir, rank.hello.pid).open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                file.seek(max(0, size_bytes - _READ_BYTES))
                return file.read(_READ_BYTES).decode("ascii", "replace")
        except OSError:
            return ""

    def _answer(
        self,
        one: _Asked,
        made: tuple[protocol.GroupRecord, ...] = (),
        request_id: str = "",
    ) -> None:
        if self._sources is None:
            self._sources = _sources(self._code, self._bundle, self._modules)
        threads = stacks.threads_of(one.text, self._sources)
        silence = "" if threads else "its answer can't be read"
        shown = []  # with the user's names of files, and without their lines
        for group in made:
            calls = []
            for call in group.calls:
                frames = [stacks.renamed(each, self._sources) for each in call.frames]
                plain = tuple(replace(frame, text="") for frame in frames)
                calls.append(replace(call, frames=plain))
            shown.append(replace(group, calls=tuple(calls)))
        self._journal_rank(one.rank, threads, silence, tuple(shown), request_id)

    def _journal_rank(
        self,
        rank: RankProcess,
        threads: tuple[protocol.Thread, ...] = (),
        silence: str = "",
        made: tuple[protocol.GroupRecord, ...] = (),
        request_id: str = "",
    ) -> None:
        hello = rank.hello
        self._journal.add(
            protocol.Stacks(
                request_id=request_id or self._request_id,
                rank=hello.rank,
                local_rank=hello.local_rank,
                threads=threads,
                silence=silence,
                calls=made,
            )
        )

    def _end_if_all(self) -> None:
        if not self._waiting:
            self._journal.add(
                protocol.StacksDone(request_id=self._request_id, ranks=self._count)
            )
            self._request_id = ""


def _state(rank: RankProcess) -> tuple[str, str]:
    """Return a process's state as in ps(1), and for "D" the kernel function that it waits in, if
    known.
    """
    now = processes.read(rank.hello.pid)
    if now is None:
        return "Z", ""
    if now.state != "D":
        return now.state, ""
    function = text_of(Path(f"/proc/{now.pid}/wchan")).strip()
    if function in ("", "0"):  # 0: this user may not read it
        return now.state, ""
    return now.state, f" ({function})"


def _sources(code: Path, bundle: str, modules: str) -> Sources:
    """Return the file names and texts of the user's code, from the payload; none if it is no longer
    readable.
    """
    try:
        found = sources.read(code)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        found = {"labels": {}, "texts": {}}
    return Sources(
        labels=found["labels"],
        texts=found["texts"],
        modules=modules,
        own=f"{bundle}/",
    )

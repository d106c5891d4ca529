"""Asks all ranks of a node where they are, and writes their answers to the journal. Nothing in here blocks."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.rank import stacks
from distmagic.remote.rank.stacks import Sources
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol

_ASLEEP_S = 1.0  # for a rank whose process is stopped, or waits in the kernel
_PATIENCE_S = 4.0  # for any other: the machine may be very busy
_READ_BYTES = 1 << 20
_STATES = {
    "T": "its process is stopped (kill -CONT would let it go on)",
    "t": "its process is held by a debugger",
    "D": "its process waits inside the kernel",
    "Z": "its process has ended",
}


@dataclass(slots=True)
class _Asked:
    """A rank that has been sent the signal, and what its file held when it was looked at last."""

    rank: RankProcess
    text: str = ""


class StackDumper:
    """The calls of one agent, one at a time. `ask` is a request's, `step` goes on with it."""

    def __init__(self, run_dir: Path, code: Path, bundle: str, journal: Journal) -> None:
        self._run_dir, self._code, self._bundle, self._journal = run_dir, code, bundle, journal
        self._sources: Sources | None = None
        self._queue: list[str] = []
        self._waiting: list[_Asked] = []
        self._request_id = ""
        self._began = 0.0
        self._count = 0

    def ask(self, request_id: str) -> None:
        """Call the roll as soon as the calls before are through; a request that comes twice is answered once."""
        if request_id != self._request_id and request_id not in self._queue:
            self._queue.append(request_id)

    def step(self, now: float, ranks: Sequence[RankProcess]) -> None:
        """Begin the next call, or take the answers that have come."""
        if not self._request_id and self._queue:
            self._begin(now, [rank for rank in ranks if not rank.is_over and rank.is_running])
        elif self._request_id:
            self._waiting = [one for one in self._waiting if not self._take(one, now)]
            self._end_if_all()

    def _begin(self, now: float, ranks: Sequence[RankProcess]) -> None:
        self._request_id, self._began, self._count = self._queue.pop(0), now, len(ranks)
        for rank in ranks:
            why = self._send(rank)
            if why:
                self._tell(rank, silence=why)
            else:
                self._waiting.append(_Asked(rank=rank))
        self._end_if_all()

    def _send(self, rank: RankProcess) -> str:
        """Send a rank the signal; return why it can't answer, "" if it can."""
        if rank.process is None or not stacks.is_ready(self._run_dir, rank.hello.pid):
            return "it is still starting, or has taken over the signal that it is asked with"
        with contextlib.suppress(OSError):
            os.truncate(stacks.file_of(self._run_dir, rank.hello.pid), 0)
        processes.send(rank.process, stacks.SIGNAL)
        return ""

    def _take(self, one: _Asked, now: float) -> bool:
        """Tell where a rank is if its answer is whole, or won't come; return whether it was told."""
        before, one.text = one.text, self._read(one.rank)
        if stacks.is_whole(one.text, self._bundle):
            self._answer(one)
            return True
        if one.text != before or now - self._began < _ASLEEP_S:
            return False
        state, where = _state(one.rank)
        if state not in _STATES and now - self._began < _PATIENCE_S:
            return False
        if one.text:
            self._answer(one)  # not as one of our ranks looks, but better than nothing
        else:
            self._tell(one.rank, silence=_STATES.get(state, f"it gave no answer within {_PATIENCE_S:g} s") + where)
        return True

    def _read(self, rank: RankProcess) -> str:
        try:
            with stacks.file_of(self._run_dir, rank.hello.pid).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
                return file.read(_READ_BYTES).decode("ascii", "replace")
        except OSError:
            return ""

    def _answer(self, one: _Asked) -> None:
        if self._sources is None:
            self._sources = _sources(self._code, self._bundle)
        threads = stacks.threads_of(one.text, self._sources)
        self._tell(one.rank, threads, "" if threads else "its answer can't be read")

    def _tell(self, rank: RankProcess, threads: tuple[protocol.Thread, ...] = (), silence: str = "") -> None:
        hello = rank.hello
        self._journal.add(
            protocol.Stacks(
                request_id=self._request_id,
                rank=hello.rank,
                local_rank=hello.local_rank,
                threads=threads,
                silence=silence,
            )
        )

    def _end_if_all(self) -> None:
        if not self._waiting:
            self._journal.add(protocol.StacksDone(request_id=self._request_id, ranks=self._count))
            self._request_id = ""


def _state(rank: RankProcess) -> tuple[str, str]:
    """Return a process's state as ps(1) shows it, and where in the kernel it waits if that is told."""
    now = processes.read(rank.hello.pid)
    if now is None:
        return "Z", ""
    try:
        place = Path(f"/proc/{now.pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        place = ""
    return now.state, f" ({place})" if now.state == "D" and place not in ("", "0") else ""


def _sources(code: Path, bundle: str) -> Sources:
    """Return what the payload says of file names; nothing, if it can't be read any more."""
    try:
        with zipfile.ZipFile(code) as archive:
            told = json.loads(archive.read("sources.json"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        told = {"labels": {}, "texts": {}}
    return Sources(labels=told["labels"], texts=told["texts"], modules=f"{code}/modules/", own=f"{bundle}/")

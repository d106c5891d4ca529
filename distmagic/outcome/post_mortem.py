"""Opens pdb where a rank of a finished run has failed: on the notebook machine, in copies of the
rank's frames.

The frames come with the end of the run (remote/training/frames.py). The processes have ended: what
is assigned in the debugger changes nothing on the hosts.
"""

from __future__ import annotations

import builtins
import linecache
import pdb  # noqa: T100
from collections.abc import Mapping
from types import FrameType, TracebackType

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.training.frames import Frames, KeptFrame
from distmagic.remote.values import parcel
from distmagic.remote.values.left_out import LeftOut
from distmagic.remote.wire.clipping import ranges
from distmagic.state.model import RunState

_KEPT, _MOST_RANKS = 5, 32  # runs, and ranks of each


@frozen
class FailedRun:
    """The parcels of frames of the ranks that raised an exception; `first` is the first of them."""

    job: str
    first: int
    frames: Mapping[int, bytes]


class FailedRuns:
    """The last failed runs of a kernel."""

    def __init__(self) -> None:
        self._runs: dict[str, FailedRun] = {}

    def add(self, state: RunState, small_results: Mapping[int, bytes]) -> int | None:
        """Remember a finished run if ranks left frames; return the rank that `debug` chooses by
        itself.
        """
        found = {}
        for rank, worker in sorted(state.workers.items()):
            has_raised = worker.ended is not None and worker.ended.outcome == "raised"
            if has_raised and rank in small_results:
                found[rank] = small_results[rank]
        if not found:
            return None
        first = state.first_failure
        # Another kernel may have followed the run: which failure came first is lost.
        first = first if first in found else min(found)
        others = [rank for rank in found if rank != first]
        found = {rank: found[rank] for rank in (first, *others[: _MOST_RANKS - 1])}
        self._runs.pop(state.job, None)
        self._runs[state.job] = FailedRun(job=state.job, first=first, frames=found)
        if len(self._runs) > _KEPT:
            del self._runs[next(iter(self._runs))]
        return first

    def debug(self, job: str, rank: int | None) -> None:
        """Open pdb in a run, "" for the last one, where this rank has failed, or the first one.

        Raises `UsageError`.
        """
        names = [name for name in self._runs if name.startswith(job)]
        if not names:
            what = f"failed run {job}" if job else "failed run"
            raise UsageError(
                f"This notebook has no {what} with frames to look at.",
                f"Those that have: {', '.join(self._runs) or 'none'}. %distributed attach ID gets a job of another kernel.",
            )
        run = self._runs[names[-1]]
        chosen = run.first if rank is None else rank
        if chosen not in run.frames:
            raise UsageError(
                f"Rank {chosen} of run {run.job} left no frames: it raised no exception, or its values took too long.",
                f"Ranks that have: {', '.join(ranges(sorted(run.frames)))}.",
            )
        try:
            frames = parcel.load_bytes(run.frames[chosen], "the file of its frames")
        except parcel.ParcelError as error:
            raise UsageError(
                f"Rank {chosen} of run {run.job}: {error.message}"
            ) from error
        if not isinstance(frames, Frames):
            raise UsageError(
                f"Rank {chosen} of run {run.job}: the file of its frames is damaged."
            )
        pdb.post_mortem(traceback_of(frames))


def traceback_of(kept: Frames) -> TracebackType | None:
    """Return a traceback of frames that have the kept names, values and places.

    A value that can't be rebuilt in this process becomes a `LeftOut`.
    """
    values = [_loaded(value) for value in kept.values]
    sources: dict[str, list[str]] = {}
    calls = None
    for frame in reversed(kept.frames):
        file = f"<{frame.file}>"  # a debugger shows such a name as it is
        lines = sources.setdefault(file, [])
        own = frame.source.splitlines(keepends=True)
        first = frame.first_line - 1
        lines += ["\n"] * (first + len(own) - len(lines))
        lines[first : first + len(own)] = own
        rebuilt = _rebuilt(frame, file, values)
        calls = TracebackType(calls, rebuilt, rebuilt.f_lasti, frame.line)
    for file, lines in sources.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return calls


def _loaded(value: bytes | str) -> object:
    if isinstance(value, str):
        return LeftOut(value)
    try:
        return parcel.load_bytes(value, "a value")
    except parcel.ParcelError as error:
        return LeftOut(error.message)


def _rebuilt(frame: KeptFrame, file: str, values: list[object]) -> FrameType:
    """Return a frame with these names: that of a program which has failed at once."""
    own = {name: values[number] for name, number in frame.local_names.items()}
    theirs = {name: values[number] for name, number in frame.global_names.items()}
    # With the locals: a comprehension that is typed in the debugger finds them as globals.
    names = {"__name__": frame.name, "__builtins__": builtins, **theirs, **own}
    # pdb lists the lines around the one at which the frame stands.
    code = compile("\n" * (frame.line - frame.first_line) + "1 / 0", file, "exec")
    code = code.replace(co_name=frame.name, co_firstlineno=frame.first_line)
    calls = None
    try:
        exec(code, names, own)  # noqa: S102 - a division
    except ZeroDivisionError as error:
        calls = error.__traceback__
    assert calls is not None
    assert calls.tb_next is not None
    return calls.tb_next.tb_frame

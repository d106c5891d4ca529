"""How a rank ends: with its return value in a file, with an exception, its traceback and its frames
in a file, or by an exit.

Its exit code is that of any script: 0 after a return, 1 after an exception, the code of `sys.exit`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.rank import calls, sources
from distmagic.remote.system import threads
from distmagic.remote.training import frames, groups
from distmagic.remote.values import left_out, parcel
from distmagic.remote.values.reductions.source_form import SourceForm
from distmagic.remote.wire.clipping import clipped, text_of
from distmagic.remote.wire.events import Ended
from distmagic.remote.wire.parts import Failure
from distmagic.remote.wire.vocabulary import RankOutcome

_MAX_TRACEBACK_BYTES = 120_000  # as JSON: a packet of a unix socket holds about 200 KiB
_MAX_MESSAGE_BYTES = 30_000
_PATIENCE_S = 2.0  # how long the frames of an exception may delay its report
_DEEPEST = 1_000  # recursion limit, Python's own default


@frozen
class Rank:
    """The settings of this process, from torchrun's variables and from the agent."""

    rank: int
    restart: int
    folder: Path  # the node's directory of logs and results
    call: Path  # a file of the payload
    code: Path  # a file of the payload
    socket: str  # the agent's socket
    pid: int  # compared in forked children, which are not this rank
    paths: tuple[str, ...] = ()  # the user's own modules are imported from these
    work_dir: str = ""  # the working directory of the run, "" on the notebook machine
    can_type: bool = False  # a user may type input for this rank

    @property
    def result(self) -> Path:
        """The file for the return value, or for the frames of the exception."""
        return self.folder / f"rank{self.rank}.result"


def ended_after(
    rank: Rank,
    labels: dict[str, str],
    work: Callable[[], Ended],
    keep_frames: Callable[[BaseException], int | None] = lambda _: None,
) -> Ended:
    """Return the end that `work` returns, or the end for its exception.

    `keep_frames` returns the size in bytes of the exception's frames in a file.
    """
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - every end of a rank is reported
        _stop_handlers()
        if isinstance(error, SystemExit):
            return _exited(rank, error)
        if isinstance(error, KeyboardInterrupt):
            # Exits by the signal, like Python itself; its place is not a failure.
            meaning = "SIGINT: it was interrupted"
            return _ended(rank, "signalled", -signal.SIGINT, meaning=meaning)
        calls.leave(error)
        # The call can't be loaded: a traceback would only show distmagic's frames.
        is_ours = isinstance(error, parcel.ParcelError)
        text = str(error) if is_ours else shown_traceback(error, labels)
        _write_error(text)
        failure = Failure(
            type=type(error).__name__, message=clipped(text_of(error), _MAX_MESSAGE_BYTES),
            traceback=clipped(text, _MAX_TRACEBACK_BYTES),
        )  # fmt: skip
        result_bytes = None if is_ours else keep_frames(error)
        return _ended(rank, "raised", 1, failure=failure, result_bytes=result_bytes)


def _ended(rank: Rank, outcome: RankOutcome, code: int = 0, **more: object) -> Ended:
    return Ended(
        rank=rank.rank,
        restart=rank.restart,
        outcome=outcome,
        code=code,
        group_use=groups.use(),
        **more,  # type: ignore[arg-type]
    )


def _stop_handlers() -> None:
    """Remove DataLoader's handler, which raises when a worker dies: it must not interrupt the final
    steps.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _exited(rank: Rank, stop: SystemExit) -> Ended:
    """Return the end to report for `sys.exit`: no code or 0 is a return; a text goes to stderr and
    means code 1.
    """
    code = 0 if stop.code is None else stop.code
    if not isinstance(code, int):
        text = text_of(code)
        _write_error(text)
        return _ended(rank, "exited", 1, meaning=clipped(text, _MAX_MESSAGE_BYTES))
    if code == 0:
        return _ended(rank, "returned", result_bytes=0)
    return _ended(rank, "exited", code & 0xFF, meaning=f"sys.exit({code}) was called")


def keep(rank: Rank, value: object, form: SourceForm | None = None) -> Ended:
    """Write the return value to its file, with code in this form; return the end to report."""
    _stop_handlers()
    # A child that the function has forked, and that also returned from it.
    if os.getpid() != rank.pid:
        return _ended(rank, "returned")
    if value is None or left_out.is_program(value):
        return _ended(rank, "returned", result_bytes=0)
    # The function has returned: a value that can't be stored is no failure, and must not stop the
    # other ranks.
    try:
        try:
            size_bytes, missing = left_out.dump(value, rank.result, form)
        except OSError:  # a file server may report an error once
            size_bytes, missing = left_out.dump(value, rank.result, form)
    except parcel.Unpicklable as error:
        why = f"{error.message} {error.hint}"
    except MemoryError:
        why = "there is not enough memory to write it to a file"
    except OSError as error:
        try:
            size = f"{parcel.measure(value):,} bytes"
            free = f"{shutil.disk_usage(rank.folder).free:,} bytes"
        except Exception:  # noqa: BLE001 - pickling calls the user's own methods
            size, free = "more", "less"
        why = f"it takes {size}, and {rank.folder} has {free} free ({error.strerror or error})"
    else:
        meaning = f"this was left out of its result: {missing}" if missing else ""
        return _ended(
            rank,
            "returned",
            result_bytes=size_bytes,
            meaning=clipped(meaning, _MAX_MESSAGE_BYTES),
        )
    return _ended(rank, "returned", meaning=f"its result is lost: {why}")


def keep_frames(rank: Rank, labels: dict[str, str], error: BaseException) -> int | None:
    """Write the frames of the user's code to the rank's file; return its size in bytes, None if
    nothing was kept.
    """
    has_left_debugger = type(error).__name__ == "BdbQuit"
    if os.getpid() != rank.pid or has_left_debugger:
        return None
    sizes: list[int] = []

    def keep() -> None:
        # Code of the user's own pickles a value: it may raise anything, even an exit.
        with contextlib.suppress(BaseException):
            # A deep value must raise RecursionError before the thread's stack is full.
            sys.setrecursionlimit(min(sys.getrecursionlimit(), _DEEPEST))
            form = sources.form_of_results(rank.code)
            found = frames.of(user_frames(error.__traceback__), name_of, form)
            if found.frames:
                limit_bytes = frames.LARGEST_BYTES
                sizes.append(parcel.dump(found, rank.result, limit_bytes=limit_bytes))

    def name_of(file: str) -> str:
        return shown_file(rank, labels, file)

    before = sys.getrecursionlimit()
    # On a thread: code that does not return must not delay the report of the failure for long.
    with _without_stops(), contextlib.suppress(BaseException):
        thread = threads.begin("frames", keep)
        thread.join(_PATIENCE_S)
        if not thread.is_alive():
            sys.setrecursionlimit(before)
    return sizes[0] if sizes else None


@contextlib.contextmanager
def _without_stops() -> Iterator[None]:
    """Ignore the signals of torchrun, which ends this rank if another one has failed, too: its own
    failure is not reported yet.
    """
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda *_: None) or signal.SIG_DFL
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shown_file(rank: Rank, labels: dict[str, str], file: str) -> str:
    """Return the label of a cell's file, or a path, which is relative in the working directory."""
    label = labels.get(file, file)
    return label.removeprefix(f"{rank.work_dir}/") if rank.work_dir else label


def user_frames(calls: types.TracebackType | None) -> types.TracebackType | None:
    """Return the calls of a traceback without the first ones, which are distmagic's."""
    while calls and calls.tb_frame.f_code.co_filename.startswith(_own_folder()):
        calls = calls.tb_next
    return calls


def _own_folder() -> str:
    """Return the folder remote/."""
    # Not from `__file__`: the bundle's byte code has other file names.
    return os.path.dirname(os.path.dirname(_own_folder.__code__.co_filename))


def _write_error(text: str) -> None:
    """Write to stderr, or to descriptor 2 if the user's code has closed or replaced
    `sys.stderr`.
    """
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the user's own stream, or None, or closed
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def shown_traceback(error: BaseException, labels: dict[str, str]) -> str:
    """Return the traceback without distmagic's frames, and with cells under the notebook's
    labels.
    """
    summary = traceback.TracebackException.from_exception(error)
    _hide_frames(summary, _own_folder())
    text = "".join(summary.format()).rstrip()
    for name, label in labels.items():
        text = text.replace(f'File "{name}", line', f"{label}, line")
    return text


def _hide_frames(summary: traceback.TracebackException | None, own: str) -> None:
    while summary is not None:
        kept = [frame for frame in summary.stack if not frame.filename.startswith(own)]
        summary.stack[:] = kept
        _hide_frames(summary.__cause__, own)
        summary = summary.__context__


def clear_main(main: types.ModuleType) -> None:
    """Delete the values in `__main__`, with their reference cycles, before Python's own shutdown.

    A model under DistributedDataParallel is a cycle that holds its process group. If that lived
    until the shutdown, its threads could use the interpreter after its end, and abort a process
    that had done all its work.
    """
    kept = (types.ModuleType, types.FunctionType, type)  # a `__del__` may use them
    if threading.active_count() == 1:
        # Otherwise a daemon thread may still use any of them.
        for stream in ("stdout", "stderr"):
            # A class of `__main__` that replaces a stream loses what it uses. If it can't be
            # flushed, it stays, and Python's exit reports that.
            with contextlib.suppress(Exception):
                getattr(sys, stream).flush()
                setattr(sys, stream, getattr(sys, f"__{stream}__"))
        # Names only: a variable with a value would keep its cycle alive during the collection
        # below.
        names = [
            name for name, value in vars(main).items() if not isinstance(value, kept)
        ]
        for name in names:
            if not name.startswith("__"):
                del vars(main)[name]
    gc.collect()
    groups.let_go()

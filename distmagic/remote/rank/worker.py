"""The process of one rank, started by torchrun: connects its output to the agent, calls the user's function, reports
the end.

Its exit code is that of any script: 0 after a return, 1 after an exception, the code of `sys.exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distmagic.remote.rank import (
    bars,
    calls,
    import_paths,
    logged_numbers,
    report,
    rich_bars,
    script,
    show,
    sources,
    stacks,
    stay,
)
from distmagic.remote.system import asking, awake, processes, socket_peer
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.training import groups, import_hooks, loading, profiling, steps
from distmagic.remote.values import call, captured, left_out, parcel, settings
from distmagic.remote.values.source_form import SourceForm
from distmagic.remote.wire.clipping import clipped, text_of
from distmagic.remote.wire.codec import Message, encode
from distmagic.remote.wire.events import Ended, Paused, Resumed, Worker
from distmagic.remote.wire.parts import Failure
from distmagic.remote.wire.vocabulary import RankOutcome

_F_SETPIPE_SZ = 1031  # fcntl(2)
_PIPE_BYTES = 1 << 20
_MAX_TRACEBACK_BYTES = 120_000  # as JSON: a packet of a unix socket holds about 200 KiB
_MAX_MESSAGE_BYTES = 30_000
_MAX_WORD = 200  # characters of a place, and of a prompt
_PAUSE_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The settings of this process, from torchrun's variables and from the agent.

    `folder` is the node's directory of logs and results, `call` and `code` are files of the payload, `socket` is the
    agent's. `pid` is compared in forked children, which are not this rank. The user's own modules are imported from
    `paths`; `work_dir` is the working directory of the run, "" on the notebook machine. `can_type`: a user may type
    input for this rank.
    """

    rank: int
    restart: int
    folder: Path
    call: Path
    code: Path
    socket: str
    pid: int
    paths: tuple[str, ...] = ()
    work_dir: str = ""
    can_type: bool = False

    @property
    def result(self) -> Path:
        """The file for the return value."""
        return self.folder / f"rank{self.rank}.result"


def main(_: list[str]) -> None:
    """Run one rank, from the connection to the agent to the exit. Never returns."""
    # If torchrun has ended by now, its agent ends this process, or is gone, and can't be connected to.
    processes.die_with_parent(os.getppid())
    # Removed from the environment of the user's own processes.
    from_agent = json.loads(os.environ.pop("DISTMAGIC_WORKER"))
    rank = _read_rank(from_agent)
    run_dir = Path(rank.socket).parent
    stacks.answer(run_dir)
    awake.answer(run_dir)
    conn = _say_hello(rank, from_agent)
    report.begin(
        lambda packet: _send(conn, packet), rank=rank.rank, restart=rank.restart
    )
    bundle = sys.path.pop(0)
    ours = [bundle, *rank.paths]
    sys.path[:0] = ours
    sys.argv[:] = ["distmagic"]
    labels = _tell_pauses(rank, conn, sources.load(rank.code))
    held: list[object] = []
    work = partial(_work, rank, conn, ours, f"{bundle}/fallback", labels, held)
    ended = _ended_after(rank, labels, work)
    _finish(rank, conn, ended)


def _ended_after(
    rank: Rank, labels: dict[str, str], work: Callable[[], Ended]
) -> Ended:
    """Return the end that `work` returns, or the end for its exception."""
    try:
        return work()
    except SystemExit as stop:
        _stop_handlers()
        return _exited(rank, stop)
    except (
        KeyboardInterrupt
    ):  # exits by the signal, like Python itself; its place is not a failure
        _stop_handlers()
        return _ended(
            rank, "signalled", -signal.SIGINT, meaning="SIGINT: it was interrupted"
        )
    except BaseException as error:  # noqa: BLE001 - every end of a rank is reported
        _stop_handlers()
        calls.leave(error)
        # The call can't be loaded: a traceback would only show distmagic's frames.
        is_ours = isinstance(error, parcel.ParcelError)
        text = str(error) if is_ours else shown_traceback(error, labels)
        _write_error(text)
        failure = Failure(
            type=type(error).__name__, message=clipped(text_of(error), _MAX_MESSAGE_BYTES),
            traceback=clipped(text, _MAX_TRACEBACK_BYTES),
        )  # fmt: skip
        return _ended(rank, "raised", 1, failure=failure)


def _work(
    rank: Rank,
    conn: socket.socket,
    ours: list[str],
    fallback: str,
    labels: dict[str, str],
    held: list[object],
) -> Ended:
    """Run the payload on this rank. The return value is kept in `held` until the rank ends."""
    bars.install(fallback)
    rich_bars.install()
    logged_numbers.install()
    run_dir = Path(rank.socket).parent
    groups.install(partial(calls.answer, run_dir), calls.leave)
    steps.install(profiling.Profiling(run_dir, rank.folder, rank.rank).look)
    show.install()
    # A new `__main__`. Its file lets spawned children, such as DataLoader workers, load the payload's definitions.
    user_main = types.ModuleType("__main__")
    user_main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    user_main.__file__ = call.write_main(
        rank.folder / call.MAIN_FILE, rank.call, spare=run_dir
    )
    sys.modules["__main__"] = user_main
    # Registered before the user's own functions, so it is called after them.
    atexit.register(clear_main, user_main)
    # Before the payload is loaded, which may refer to `torch.load`.
    loads = loading.Loading()
    with gc_paused():
        thunk = call.load(rank.call, user_main)
    if not isinstance(thunk, call.Call):
        show.keep_figures()
    if isinstance(thunk, call.Script):
        script.run(thunk, user_main, ours, rank.work_dir)
        return _keep(rank, None)
    if own := os.environ.pop(settings.VARIABLE, ""):
        settings.begin_with(own, import_hooks.when_imported)
    if isinstance(thunk, call.Stay):
        _stay(rank, conn, user_main, labels)
        return _keep(rank, None)
    if isinstance(thunk, call.Whole):
        _place(thunk.filename, user_main)
    assert isinstance(thunk, call.Call | call.Whole)
    before = captured.marks(vars(user_main))
    loads.begin()
    value = call.perform(thunk, user_main)
    loaded, loading_s = loads.what, loads.total_s
    held.append(value)
    lost = captured.changed(vars(user_main), before, value)
    ended = _keep(rank, value, sources.form_of_results(rank.code))
    if lost and isinstance(thunk, call.Call) and not ended.meaning:
        meaning = f"changes of {lost} stay there: return what is needed here"
        ended = replace(ended, meaning=meaning)
    return replace(ended, loaded=clipped(loaded, 1000), loading_s=loading_s)


def _stay(
    rank: Rank, conn: socket.socket, main: types.ModuleType, labels: dict[str, str]
) -> None:
    """Run cells until the agent closes the connection."""

    def begin_reports() -> None:
        report.begin(partial(_send, conn), rank=rank.rank, restart=rank.restart)

    form = sources.form_of_results(rank.code)
    around = stay.Surroundings(
        rank=rank.rank, main=main, folder=rank.folder, blobs=rank.call.parent,
        paths=rank.paths if rank.work_dir else (), form=form, labels=labels, send=partial(_send_for_sure, conn),
        begin_reports=begin_reports, keep=partial(_keep, rank, form=form),
    )  # fmt: skip
    stay.CellLoop(around).run(conn, partial(_ended_after, rank, labels))


def _read_rank(from_agent: dict[str, Any]) -> Rank:
    return Rank(
        rank=int(os.environ["RANK"]), restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        folder=Path(from_agent["folder"]), call=Path(from_agent["call"]), code=Path(from_agent["code"]),
        socket=from_agent["socket"], pid=os.getpid(), paths=tuple(import_paths.of_rank(from_agent)),
        work_dir=(from_agent["paths"] or [""])[-1], can_type=bool(from_agent["can_type"]),
    )  # fmt: skip


def _say_hello(rank: Rank, from_agent: dict[str, Any]) -> socket.socket:
    """Connect to the agent and send it the other ends of new pipes, which become this process's stdout, stderr and
    stdin.

    If no user can type, stdin is at end of file.
    """
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    conn.connect(rank.socket)
    socket_peer.check(conn)
    out, err = os.pipe(), os.pipe()
    for _, writing in (out, err):
        # Above the user's limit for pipes, the default size is enough.
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
    of_torchrun = {
        name: int(os.environ[name.upper()])
        for name in ("local_rank", "world_size", "local_world_size")
    }
    hello = Worker(
        rank=rank.rank, restart=rank.restart, pid=rank.pid, **of_torchrun,
        round=int(from_agent.get("round", 0)),
    )  # fmt: skip
    typed = os.pipe() if rank.can_type else (os.open(os.devnull, os.O_RDONLY),)
    socket.send_fds(conn, [encode(hello)], [out[0], err[0], *typed[1:]])
    for source, target in ((typed[0], 0), (out[1], 1), (err[1], 2)):
        os.dup2(source, target)
    for fd in (*typed, *out, *err):
        os.close(fd)
    return conn


def _send(conn: socket.socket, packet: bytes) -> bool:
    """Send without blocking; return False if the agent has no room for it now."""
    try:
        conn.send(packet, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the agent is gone, and the kernel ends this process in a moment
    return True


def _send_for_sure(conn: socket.socket, message: Message) -> None:
    while not _send(conn, encode(message)):
        time.sleep(_PAUSE_S)


def _tell_pauses(
    rank: Rank, conn: socket.socket, labels: dict[str, str]
) -> dict[str, str]:
    """Report from now on when and where this rank waits for the user's input, if a user can type.

    Return the labels of cells by file name, which it uses.
    """
    if not rank.can_type:
        return labels

    def waits(prompt: int, file: str, line: int, asks: str) -> None:
        label = labels.get(file, file)
        if rank.work_dir:
            label = label.removeprefix(f"{rank.work_dir}/")
        paused = Paused(
            rank=rank.rank, restart=rank.restart, prompt=prompt, file=label[-_MAX_WORD:], line=line, asks=asks[-_MAX_WORD:],
        )  # fmt: skip
        _send_for_sure(conn, paused)

    def goes_on(prompt: int) -> None:
        resumed = Resumed(rank=rank.rank, restart=rank.restart, prompt=prompt)
        _send_for_sure(conn, resumed)

    asking.install(waits, goes_on)
    import_hooks.when_imported("pdb", _let_quit_raise)
    return labels


def _let_quit_raise(pdb: types.ModuleType) -> None:
    """Make `q` raise BdbQuit, as before Python 3.14: an exit with code 0 would leave the other ranks waiting.

    After `c` an interrupt raises KeyboardInterrupt, as it does without a debugger, and does not open it again.
    """

    def do_quit(original: Any, debugger: object, argument: str) -> object:
        vars(debugger)["mode"] = None
        return original(debugger, argument)

    def do_continue(original: Any, debugger: object, argument: str) -> object:
        vars(debugger)["nosigint"] = True
        return original(debugger, argument)

    for name in ("do_quit", "do_q", "do_exit"):
        import_hooks.wrap(pdb.Pdb, name, do_quit)
    for name in ("do_continue", "do_cont", "do_c"):
        import_hooks.wrap(pdb.Pdb, name, do_continue)


def _place(filename: str, main: types.ModuleType) -> None:
    """Set `__file__`, so that a whole cell finds files next to it like a script in that folder."""
    for_children = main.__file__
    main.__file__ = os.path.abspath(filename)

    def get_preparation_data(original: Any, name: str) -> dict[str, object]:
        data: dict[str, object] = original(name)
        if "init_main_from_path" in data:
            data["init_main_from_path"] = for_children
        return data

    import_hooks.when_imported(
        "multiprocessing.spawn",
        lambda spawn: import_hooks.wrap(
            spawn, "get_preparation_data", get_preparation_data
        ),
    )


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
    """Remove DataLoader's handler, which raises when a worker dies: it must not interrupt the final steps."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def clear_main(main: types.ModuleType) -> None:
    """Delete the values in `__main__`, with their reference cycles, before Python's own shutdown.

    A model under DistributedDataParallel is a cycle that holds its process group. If that lived until the shutdown, its
    threads could use the interpreter after its end, and abort a process that had done all its work.
    """
    kept = (types.ModuleType, types.FunctionType, type)  # a `__del__` may use them
    if threading.active_count() == 1:
        # Otherwise a daemon thread may still use any of them.
        for stream in ("stdout", "stderr"):
            # A class of `__main__` that replaces a stream loses what it uses. If it can't be flushed, it stays, and
            # Python's exit reports that.
            with contextlib.suppress(Exception):
                getattr(sys, stream).flush()
                setattr(sys, stream, getattr(sys, f"__{stream}__"))
        # Names only: a variable with a value would keep its cycle alive during the collection below.
        names = [
            name for name, value in vars(main).items() if not isinstance(value, kept)
        ]
        for name in names:
            if not name.startswith("__"):
                del vars(main)[name]
    gc.collect()
    groups.let_go()


def _keep(rank: Rank, value: object, form: SourceForm | None = None) -> Ended:
    """Write the return value to its file, with code in this form; return the end to report."""
    _stop_handlers()
    # A child that the function has forked, and that also returned from it.
    if os.getpid() != rank.pid:
        return _ended(rank, "returned")
    if value is None or left_out.is_program(value):
        return _ended(rank, "returned", result_bytes=0)
    # The function has returned: a value that can't be stored is no failure, and must not stop the other ranks.
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


def _exited(rank: Rank, stop: SystemExit) -> Ended:
    """Return the end to report for `sys.exit`: no code or 0 is a return; a text goes to stderr and means code 1."""
    if stop.code is None or (isinstance(stop.code, int) and stop.code == 0):
        return _ended(rank, "returned", result_bytes=0)
    if not isinstance(stop.code, int):
        text = text_of(stop.code)
        _write_error(text)
        return _ended(rank, "exited", 1, meaning=clipped(text, _MAX_MESSAGE_BYTES))
    return _ended(
        rank, "exited", stop.code & 0xFF, meaning=f"sys.exit({stop.code}) was called"
    )


def _write_error(text: str) -> None:
    """Write to stderr, or to descriptor 2 if the user's code has closed or replaced `sys.stderr`."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the user's own stream, or None, or closed
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def shown_traceback(error: BaseException, labels: dict[str, str]) -> str:
    """Return the traceback without distmagic's frames, and with cells under the notebook's labels."""
    # The folder remote/. Not from `__file__`: the bundle's byte code has other file names.
    own = os.path.dirname(os.path.dirname(shown_traceback.__code__.co_filename))
    summary = traceback.TracebackException.from_exception(error)
    _hide_frames(summary, own)
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


def _finish(rank: Rank, conn: socket.socket, ended: Ended) -> None:
    """Report the end, then exit as any Python program does: join threads, run atexit functions, flush."""
    if ended.failure is None:
        calls.leave()
    report.end()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S112 - the user's own stream, or None, or closed: Python's exit reports it
            continue
    if os.getpid() != rank.pid:
        # A child that the function has forked: it reports nothing for this rank.
        sys.exit(ended.code)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        # The stop that follows this end must not interrupt atexit functions that save data. With restarts torchrun may
        # wait for this process before it starts another one. Its child processes still end by these signals: unlike
        # SIG_IGN, a handler is not inherited by exec.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
            os.register_at_fork(
                after_in_child=partial(signal.signal, number, signal.SIG_DFL)
            )
    try:
        packet = encode(ended)
        try:
            with conn:
                conn.setblocking(True)
                conn.send(packet)
        except OSError:  # the user's code has closed all descriptors, as daemons do
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as again:
                again.connect(rank.socket)
                socket_peer.check(again)
                again.send(packet)
    except OSError:
        sys.exit(1)  # the agent is gone
    sys.exit(ended.code)

"""The process of one rank, started by torchrun: connects its output to the agent, calls the user's
function, reports the end.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distmagic.remote.rank import (
    bars,
    calls,
    ending,
    logged_numbers,
    outbox,
    report,
    rich_bars,
    script,
    show,
    sources,
    stacks,
    stay,
)
from distmagic.remote.rank.ending import Rank
from distmagic.remote.system import asking, awake, processes, socket_peer
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.training import groups, import_hooks, loading, profiling, steps
from distmagic.remote.values import call, captured, settings
from distmagic.remote.wire.clipping import clipped
from distmagic.remote.wire.codec import encode
from distmagic.remote.wire.events import Ended, Paused, Resumed, Worker

_F_SETPIPE_SZ = 1031  # fcntl(2)
_PIPE_BYTES = 1 << 20
_MAX_WORD = 200  # characters of a place, and of a prompt


def main(_: list[str]) -> None:
    """Run one rank, from the connection to the agent to the exit. Never returns."""
    # If torchrun has ended by now, its agent ends this process, or is gone, and can't be connected
    # to.
    processes.die_with_parent(os.getppid())
    # Removed from the environment of the user's own processes.
    from_agent = json.loads(os.environ.pop("DISTMAGIC_WORKER"))
    rank = Rank(
        rank=int(os.environ["RANK"]), restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        folder=Path(from_agent["folder"]), call=Path(from_agent["call"]), code=Path(from_agent["code"]),
        socket=from_agent["socket"], pid=os.getpid(), paths=tuple(sources.import_paths(from_agent)),
        work_dir=(from_agent["paths"] or [""])[-1], can_type=bool(from_agent["can_type"]),
    )  # fmt: skip
    run_dir = Path(rank.socket).parent
    stacks.answer(run_dir)
    awake.answer(run_dir)
    conn = _say_hello(rank, from_agent)
    report.begin(partial(outbox.send, conn), rank=rank.rank, restart=rank.restart)
    bundle = sys.path.pop(0)
    ours = [bundle, *rank.paths]
    sys.path[:0] = ours
    sys.argv[:] = ["distmagic"]
    labels = sources.load(rank.code)
    if rank.can_type:
        _tell_pauses(rank, conn, labels)
    held: list[object] = []
    work = partial(_work, rank, conn, ours, labels, held)
    keep_frames = partial(ending.keep_frames, rank, labels)
    ended = ending.ended_after(rank, labels, work, keep_frames)
    _finish(rank, conn, ended)


def _work(
    rank: Rank,
    conn: socket.socket,
    ours: list[str],
    labels: dict[str, str],
    held: list[object],
) -> Ended:
    """Run the payload on this rank. The return value is kept in `held` until the rank ends."""
    bars.install(f"{ours[0]}/fallback")
    rich_bars.install()
    logged_numbers.install()
    run_dir = Path(rank.socket).parent
    groups.install(partial(calls.answer, run_dir), calls.leave)
    steps.install(profiling.Profiling(run_dir, rank.folder, rank.rank).look)
    show.install()
    # A new `__main__`. Its file lets spawned children, such as DataLoader workers, load the
    # payload's definitions.
    user_main = types.ModuleType("__main__")
    user_main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    user_main.__file__ = call.write_main(
        rank.folder / call.MAIN_FILE, rank.call, spare=run_dir
    )
    sys.modules["__main__"] = user_main
    # Registered before the user's own functions, so it is called after them.
    atexit.register(ending.clear_main, user_main)
    # Before the payload is loaded, which may refer to `torch.load`.
    loads = loading.Loading()
    with gc_paused():
        thunk = call.load(rank.call, user_main)
    if not isinstance(thunk, call.Call):
        show.keep_figures()
    if isinstance(thunk, call.Script):
        script.run(thunk, user_main, ours, rank.work_dir)
        return ending.keep(rank, None)
    if own := os.environ.pop(settings.VARIABLE, ""):
        settings.begin_with(own, import_hooks.when_imported)
    if isinstance(thunk, call.Stay):
        stay.CellLoop(rank, conn, user_main, labels).run()
        return ending.keep(rank, None)
    if isinstance(thunk, call.Whole):
        _place(thunk.filename, user_main)
    assert isinstance(thunk, call.Call | call.Whole)
    before = captured.marks(vars(user_main))
    loads.begin()
    value = call.perform(thunk, user_main)
    loaded, loading_s = loads.what, loads.total_s
    held.append(value)
    lost = captured.changed(vars(user_main), before, value)
    ended = ending.keep(rank, value, sources.form_of_results(rank.code))
    if lost and isinstance(thunk, call.Call) and not ended.meaning:
        meaning = f"changes of {lost} stay on the rank: return what the notebook needs"
        ended = replace(ended, meaning=meaning)
    return replace(ended, loaded=clipped(loaded, 1000), loading_s=loading_s)


def _say_hello(rank: Rank, from_agent: dict[str, Any]) -> socket.socket:
    """Connect to the agent and send it the other ends of new pipes, which become this process's
    stdout, stderr and stdin.

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


def _tell_pauses(rank: Rank, conn: socket.socket, labels: dict[str, str]) -> None:
    """Report from now on when and where this rank waits for the user's input."""

    def waits(prompt: int, file: str, line: int, asks: str) -> None:
        label = ending.shown_file(rank, labels, file)
        paused = Paused(
            rank=rank.rank, restart=rank.restart, prompt=prompt, file=label[-_MAX_WORD:], line=line, asks=asks[-_MAX_WORD:],
        )  # fmt: skip
        outbox.send_for_sure(conn, paused)

    def goes_on(prompt: int) -> None:
        outbox.send_for_sure(
            conn, Resumed(rank=rank.rank, restart=rank.restart, prompt=prompt)
        )

    asking.install(waits, goes_on)
    import_hooks.when_imported("pdb", _let_quit_raise)


def _let_quit_raise(pdb: types.ModuleType) -> None:
    """Make `q` raise BdbQuit, as before Python 3.14: an exit with code 0 would leave the other
    ranks waiting.

    After `c` an interrupt raises KeyboardInterrupt, as it does without a debugger, and does not
    open it again.
    """

    def do_quit(original: Any, debugger: Any, argument: str) -> object:
        debugger.mode = None
        return original(debugger, argument)

    def do_continue(original: Any, debugger: Any, argument: str) -> object:
        debugger.nosigint = True
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


def _finish(rank: Rank, conn: socket.socket, ended: Ended) -> None:
    """Report the end, then exit as any Python program does: join threads, run atexit functions,
    flush.
    """
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
        # The stop that follows this end must not interrupt atexit functions that save data. With
        # restarts torchrun may wait for this process before it starts another one. Its child
        # processes still end by these signals: unlike SIG_IGN, a handler is not inherited by exec.
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

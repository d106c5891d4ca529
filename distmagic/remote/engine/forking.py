"""How a process made by fork becomes as fresh as one made by exec: its stack, signals, streams, variables, its end.

A forked child raises `BecomeChild`, which unwinds all that its parent was in the middle of, up to `run`; there it does its
own work as if nothing had been before. So no frame, no handler, no descriptor of the parent is left in it. What
stays the parent's: the seed of string hashes, modules that are loaded already (frozen to the garbage collector).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import NoReturn


class BecomeChild(BaseException):
    """Raised in a process that was forked just now; `act` is its work."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act


class _Inherited:
    """What imports left in the template: descriptors that libraries opened, variables that they set."""

    is_warm = False
    descriptors: frozenset[int] = frozenset()
    variables: dict[str, str] = {}  # noqa: RUF012 - set once, by the template


inherited = _Inherited()


def run(act: Callable[[], None]) -> None:
    """Do `act`. Wherever in it this process is forked by `fork`, the child comes here and does its own."""
    while True:
        try:
            act()
        except BecomeChild as turn:
            act = turn.act
        else:
            return
        gc.collect()  # what hung in circles closes its descriptors now, while their numbers are not in use again


def fork(act: Callable[[], None]) -> int:
    """Return the pid of a child, which unwinds to `run` and does `act` there. It has no signal handler of ours."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _forget_handlers()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid == 0:
        raise BecomeChild(act)
    return pid


def _forget_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def settle(env: dict[str, str], streams: tuple[int, int, int], *, cwd: str = "", keep: Iterable[int] = ()) -> None:
    """Make this process lead its own session, with these variables, standard streams and working directory.

    `streams` are numbers above 2; they and all others but `keep` are closed. Raises OSError for a bad `cwd`.
    """
    os.setsid()
    for target, source in enumerate(streams):
        os.dup2(source, target)
    close_descriptors({*keep, *inherited.descriptors})
    _renew_streams()
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)


def close_descriptors(keep: Iterable[int]) -> None:
    """Close all but the standard streams and `keep`."""
    kept = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def _renew_streams() -> None:
    """Make the standard streams anew, as `python -u` does: the old ones knew other files."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        reads = fd == 0
        raw = io.FileIO(fd, "rb" if reads else "wb", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            io.BufferedReader(raw) if reads else raw,
            encoding=old.encoding, errors=old.errors, newline="\n", write_through=True,
        )  # fmt: skip
        stream.mode = "r" if reads else "w"  # type: ignore[misc]  # as CPython does
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def reseed() -> None:
    """Draw new seeds from the system, as a fresh process does. CUDA draws its own at its first use."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def leave(act: Callable[[], None]) -> NoReturn:
    """Do `act` as a main program, and end this process as Python ends: threads, atexit, flush, exit code.

    Modules are not torn down one by one, which would cost each rank a copy of the template's memory; what the main
    program still holds is let go of, so that its open files are written.
    """
    code = 0
    try:
        act()
    except BecomeChild:
        raise  # a child, forked in the middle of it
    except SystemExit as stop:
        code = _code_of(stop)
    except BaseException:  # noqa: BLE001 - as at the top of any program
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    except BaseException:  # noqa: BLE001 - an interrupt while a thread is waited for
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()  # noqa: SLF001
    if threading.active_count() == 1:  # else a daemon thread may still work with them
        _let_go()
    os._exit(code if _are_flushed() else 120)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _let_go() -> None:
    for name, module in list(sys.modules.items()):
        if name not in _loaded and module is not None:
            for key in [key for key in vars(module) if not key.startswith("__")]:
                vars(module)[key] = None
    gc.collect()


_loaded: set[str] = set()


def remember(before: dict[str, str], descriptors: Iterable[int]) -> None:
    """Note in the template, once its modules are loaded, what they changed: variables since `before`, `descriptors`."""
    inherited.is_warm = True
    inherited.descriptors = frozenset(descriptors)
    inherited.variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _loaded.update(set(sys.modules) - {"__main__"})
    gc.collect()
    gc.freeze()


def _are_flushed() -> bool:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # noqa: BLE001 - the user's own stream, or nobody reads any more
            return False
    return True


def preloaded() -> set[str]:
    """Return the names of the packages that were loaded before this process was forked."""
    return {name.partition(".")[0] for name in _loaded}

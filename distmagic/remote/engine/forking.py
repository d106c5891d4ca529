"""Resets a forked process to the state of a new one: its stack, signals, streams, variables,
descriptors, and its end.

    run    --calls-->                     the template's function
    act    --calls-->  ...  --calls-->    fork(child's function)
    fork   --in the parent-->             returns the child's pid
    fork   --in the child-->              raises `BecomeChild`, which unwinds the parent's whole
                                          stack up to `run`
    run    --in the child, calls-->       child's function

So the child keeps no frame and no handler of its parent. `reset_process` then replaces descriptors,
streams and variables, and `exit_like_python` ends the process. Two things remain from the parent:
the hash seed, and its loaded modules, which are frozen to exclude them from garbage collection.

`with` and `finally` blocks between `run` and `fork` also run in the child. Those that remove files
must compare pids first.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import random
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NoReturn

# The functions `rank_zero_only` of Lightning and of its metrics, and the variable from which they
# read their rank.
_NOTES_RANK = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}


_SIGNALS = signal.valid_signals()


class BecomeChild(BaseException):
    """Raised in a child by `fork`, and caught by `run`, which then calls `act`.

    `except Exception` does not catch it.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act


class _Inherited:
    """Changes by imports in the template: descriptors that libraries opened, variables that they
    set.
    """

    is_warm = False  # whether this process comes from a template
    descriptors: frozenset[int] = frozenset()
    variables: dict[str, str] = {}  # noqa: RUF012 - set once, by the template
    before: dict[str, str] = {}  # noqa: RUF012 - all that it had before
    modules: frozenset[str] = frozenset()  # names of all loaded modules
    last_module: object = ""  # the one that was loaded last
    packages: frozenset[str] = frozenset()  # the top-level ones among them
    # Requested by the texts of jobs or by a setting.
    asked_for: frozenset[str] = frozenset()


inherited = _Inherited()


def run(act: Callable[[], None]) -> None:
    """Call `act`. A child forked by `fork` anywhere below returns to this function and calls its
    own function.
    """
    while True:
        try:
            act()
        except BecomeChild as become:
            act = become.act
        else:
            return
        # Files and sockets of the parent in reference cycles close their descriptors now. Later
        # they could close a descriptor that the child has opened.
        gc.collect()


def fork(act: Callable[[], None]) -> int:
    """Fork. Return the child's pid in the parent.

    The child raises `BecomeChild`, so that `run` calls `act`. The child has the default handling of
    every signal. Raises OSError if the system allows no more processes.
    """
    # No signal may reach the child while it has the parent's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler is not signal.default_int_handler:
                    default = (
                        signal.default_int_handler
                        if number == signal.SIGINT
                        else signal.SIG_DFL
                    )
                    signal.signal(number, default)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid == 0:
        raise BecomeChild(act)
    return pid


def reset_process(
    env: dict[str, str],
    out: int,
    err: int,
    *,
    cwd: str = "",
    keep: Iterable[int] = (),
) -> None:
    """Give this process its own session, and these variables, standard streams and working
    directory.

    Its standard input is empty. `out` and `err` are descriptors above 2. They are closed, as are
    all others except `keep` and those that libraries opened in the template. Raises OSError for a
    bad `cwd`.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(source, target)
    close_descriptors({*keep, *inherited.descriptors})
    # Make new `sys.stdin`, `stdout` and `stderr`, as `python -u` does: the old ones have buffered
    # data of the parent.
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        mode = "r" if fd == 0 else "w"
        raw = io.FileIO(fd, f"{mode}b", closefd=False)
        raw.name = f"<{name}>"
        binary = io.BufferedReader(raw) if fd == 0 else raw
        stream = io.TextIOWrapper(
            binary,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            write_through=True,
        )
        stream.mode = mode  # type: ignore[misc]  # as CPython does
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)


def close_descriptors(keep: Iterable[int]) -> None:
    """Close all descriptors except the standard streams and `keep`."""
    kept = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            # The descriptor of the listing itself is closed by now.
            with suppress(OSError):
                os.close(int(name))


def reseed() -> None:
    """Seed all random generators from the system, as in a new process.

    CUDA does that itself on first use.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def mend_rank(env: Mapping[str, str]) -> None:
    """Correct the rank that packages of the template have stored; in a new process they read it on
    import.
    """
    for name, variable in _NOTES_RANK.items():
        function = getattr(sys.modules.get(name), "rank_zero_only", None)
        if function is not None and hasattr(function, "rank"):
            function.rank = int(env.get(variable, "0"))


def exit_like_python(act: Callable[[], None]) -> NoReturn:
    """Call `act` as a main program, then end this process as Python does: threads, atexit, flush,
    exit code.

    One thing differs: what the template had loaded is not torn down, neither its modules nor their
    `weakref.finalize`, because that would cost each rank a copy of the template's memory. Modules
    loaded later are cleared, so that their open files are written.
    """
    code = 0
    try:
        act()
    except BecomeChild:
        raise  # this is a child that was forked inside `act`: `run` continues with it
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = (stop.code or 0) & 0xFF
        else:  # sys.exit("a message")
            sys.stderr.write(f"{stop.code}\n")
            code = 1
    except BaseException:  # noqa: BLE001 - as at the top of any program
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    except BaseException:  # noqa: BLE001 - an interrupt while a thread is waited for
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()  # noqa: SLF001
    are_flushed = _are_flushed()
    if threading.active_count() == 1:
        # Otherwise a daemon thread may still use the modules.
        # As in Python's exit, a stream of the program's own is gone before what it may use.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        _clear_modules()
    os._exit(code if are_flushed and _are_flushed() else 120)


def _clear_modules() -> None:
    # A `__del__` may use modules, functions, classes, and all of Python's own modules: these are
    # cleared last, with what only they hold.
    own = ["__main__", *reversed([*_later_modules()])]
    for kept in ((types.ModuleType, types.FunctionType, type), ()):
        for name in own:
            module = sys.modules.get(name)
            is_pythons = name.partition(".")[0] in sys.stdlib_module_names
            # Any object may be in sys.modules.
            if (kept and is_pythons) or not isinstance(module, types.ModuleType):
                continue
            # Unlike isinstance, this calls no code of a proxy.
            names = [
                key
                for key, value in vars(module).items()
                if not issubclass(type(value), kept)
            ]
            for key in names:
                if not key.startswith("__"):
                    vars(module)[key] = None
        gc.collect()


def _later_modules() -> Iterator[str]:
    """Yield the names of the modules that this process has loaded itself, the last one first.

    `sys.modules` has them at its end. To look at all of it would copy memory of the template:
    Python counts references in the objects themselves.
    """
    for name, module in reversed(sys.modules.items()):
        # Not by its name: the rank may have loaded it again, after others.
        if module is inherited.last_module:
            return
        if name not in inherited.modules:
            yield name


def remember(
    before: dict[str, str], descriptors: Iterable[int], asked_for: Iterable[str] = ()
) -> None:
    """Record in the template (the warm process) what its imports changed: variables, modules, and
    open files.

    `before` is the environment before the imports, `descriptors` are the files that they have
    opened. `asked_for` are the names that the template was asked to load in addition to torch: a
    module, or a name in a module.
    """
    inherited.is_warm = True
    inherited.asked_for = frozenset(asked_for)
    inherited.descriptors = frozenset(descriptors)
    inherited.before = dict(before)
    inherited.variables = {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }
    inherited.modules = frozenset(sys.modules) - {"__main__"}
    inherited.last_module = next(reversed(sys.modules.values()))
    inherited.packages = frozenset(name.partition(".")[0] for name in inherited.modules)
    for finalizer in getattr(weakref.finalize, "_registry", ()):
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def _are_flushed() -> bool:
    for stream in (sys.stdout, sys.stderr):
        try:
            # Python, too, accepts a stream without `closed`, such as a class that writes to two
            # files.
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # noqa: BLE001 - the user's own stream, or the reading end is closed
            return False
    return True

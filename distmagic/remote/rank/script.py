"""Runs a script, or a module like `python -m`, as a rank's `__main__`, in the same environment as
under torchrun.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from distmagic.remote.values.call import Script


def run(script: Script, main: ModuleType, ours: Sequence[str], folder: str) -> None:
    """Run a script in `main`, which is `sys.modules["__main__"]`.

    `ours` are the first entries of `sys.path`, which distmagic has added. The first of them is
    moved to the end, so that `import distmagic` works. On the notebook machine the others are the
    folders of local modules. Child processes import from them, too. `folder` is the working
    directory with the script's files, "" if the script runs from its own place. Raises the script's
    exceptions, and SystemExit.
    """
    bundle = ours[0]
    sys.path[: len(ours)] = []
    path = os.path.join(folder, script.path) if folder else script.origin
    roots = ours[1:]
    if folder:
        roots = [os.path.normpath(os.path.join(folder, root)) for root in script.roots]
    if roots:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [*roots, *([before] if before else [])]
        )
    # Otherwise the script was started in another directory: --cwd.
    is_there = script.shown and os.path.exists(script.shown)
    shown = script.shown if is_there else path
    first, started = os.path.dirname(os.path.realpath(path)), [shown]
    if script.is_module:
        first, started = os.getcwd(), ["-m", script.path]
    sys.path[:] = [first, *roots, *sys.path, bundle]
    sys.argv[:] = [started[0], *script.args]
    sys.orig_argv[:] = [sys.executable, "-u", *started, *script.args]
    # Only the names that Python itself sets stay in `__main__`.
    for name in vars(main).keys() - {"__name__", "__builtins__"}:
        del vars(main)[name]
    vars(main).update(__doc__=None, __package__=None, __spec__=None, __loader__=None)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    if script.is_module:
        runpy._run_module_as_main(script.path)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls
        return
    main.__file__ = os.path.join(os.getcwd(), shown)
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    with open(path, "rb") as file:
        text = file.read()
    exec(compile(text, main.__file__, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the user's program

"""Hints from this machine for a rank that failed for lack of a file, a module or a name that exists
on this machine.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from distmagic import sanitize
from distmagic.errors import Cancelled, RunError, WorkerFailed
from distmagic.payload import local_modules
from distmagic.payload.ignored import line_that_sends
from distmagic.remote.wire.protocol import Failure
from distmagic.state.model import RunState
from distmagic.state.verdict import INTERRUPTED_WHEN_OVER, verdict

_FILE = re.compile(r"No such file or directory: b?(['\"])(?P<path>.+?)\1")
# Errors of `eval`, of `getattr(__main__, ...)` and of unpickling; and of `globals()[...]`.
_NAME = re.compile(r"(?:name|attribute) '(\w+)'|^'(\w+)'$")
_MODULE = re.compile(r"(?:No module named|needs the module) '(?P<name>[\w.]+)'")


def error_of(state: RunState, *, was_interrupted: bool) -> RunError | None:
    """Return the error of a finished run, with hints from this machine; None if it succeeded.

    `was_interrupted`: an interrupt came when the run was over.
    """
    error = verdict(state)
    if error is None and was_interrupted:
        return Cancelled(INTERRUPTED_WHEN_OVER)
    if isinstance(error, WorkerFailed):
        try:
            hint = local_hint(state, Path.cwd())
        except (Exception, KeyboardInterrupt):  # noqa: BLE001
            return error  # the run's own error is raised, whatever fails here
        if hint:
            error.hint = f"{hint}\n{error.hint}"
    return error


def local_hint(state: RunState, folder: Path) -> str:
    """Return a hint for the first failure of a run, "" for none.

    `folder` is this process's working directory.
    """
    rank = state.first_failure
    worker = state.workers.get(rank) if rank is not None else None
    failure = worker.ended.failure if worker and worker.ended else None
    if not worker or not failure:
        return ""
    return sanitize.lines(
        _of_file(failure, worker.host, folder)
        or _of_module(failure, worker.host, folder)
        or _of_name(failure)
    )


def _of_file(failure: Failure, host: str, folder: Path) -> str:
    found = _FILE.search(failure.message)
    if found is None or failure.type != "FileNotFoundError":
        return ""
    # The name is too long, contains a null byte, or refers to an unknown user.
    try:
        here = (folder / Path(found["path"]).expanduser()).resolve()
        is_here = here.exists()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):
        return ""
    if not is_here:
        return ""
    where = f"{found['path']} is on this machine, at {here}, but not where the rank looked on {host}."
    if kept := line_that_sends(here, folder.resolve()):
        line, file = kept
        return (
            f"{where} It is not sent, because a .gitignore names it. To send it anyway, write the line {line} into {file} "
            f"(%distributed help files)."
        )
    return (
        f"{where} Send its folder: {_sync(here.parent, folder)}; or read it in the notebook and pass its content as an "
        "argument (%distributed help files)."
    )


def _sync(place: Path, folder: Path) -> str:
    """Return the flag that sends a folder of this machine."""
    is_below = place.is_relative_to(folder.resolve())
    return "--sync ." if is_below else f"--sync {shlex.quote(str(place))}"


def _of_module(failure: Failure, host: str, folder: Path) -> str:
    found = _MODULE.search(failure.message)
    if found is None:
        return ""
    top, _, rest = found["name"].partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ""
    origin = spec.origin if spec else None
    places = list(spec.submodule_search_locations or () if spec else ())
    lies_at = places[0] if places else origin
    if (
        not lies_at
        or lies_at in ("built-in", "frozen")
        or local_modules.is_installed(lies_at)
    ):
        # A module of an installed package, or of Python's standard library.
        if failure.type != "ModuleNotFoundError" or top in sys.stdlib_module_names:
            return ""
        sync = " %distributed env sync installs this kernel's packages." if spec else ""
        return (
            f"The Python on {host} has no module {found['name']}. Install its package on that host, or name a Python that has it: "
            f"--python PATH.{sync}"
        )
    compiled = _compiled_in(places, rest)
    if origin and origin.endswith(tuple(EXTENSION_SUFFIXES)):
        compiled = origin
    if compiled:
        return (
            f"{found['name']} is a compiled module of yours, {compiled}, made for this machine. Build it on {host}, and "
            "name its folder on that host: --env PYTHONPATH=/path/on/the/host."
        )
    return (
        f"{top} is a module of yours, {lies_at}. It travels if code imports it by its name: write `import {top}` in the "
        f"cell, in the script, or in a module that travels; or bring its folder: {_sync(Path(lies_at).parent, folder)}."
    )


def _of_name(failure: Failure) -> str:
    """Return a hint for a name of the notebook that a rank lacks because no code mentions it."""
    found = _NAME.search(failure.message)
    name = found and (found[1] or found[2])
    is_asked_for = {
        "NameError": True,
        "AttributeError": "'__main__'" in failure.message,
        "KeyError": "globals()" in failure.traceback,
    }
    if not is_asked_for.get(failure.type) or name not in vars(sys.modules["__main__"]):
        return ""
    return (
        f"{name} is defined in the notebook, but the ranks did not receive it. A run sends the names in its function's code, "
        "but not those in a text (eval, getattr, unpickling) or in a file.\n"
        "Write this name in the function, or pass its value as an argument."
    )


def _compiled_in(places: list[str], name: str) -> str:
    """Return the file of a compiled submodule in a package's folders, "" if there is none."""
    for place in places if name else ():
        for suffix in EXTENSION_SUFFIXES:
            path = Path(place, *name.split(".")[:-1], name.rpartition(".")[2] + suffix)
            if path.is_file():
                return str(path)
    return ""

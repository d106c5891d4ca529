"""A program of `remote/keeper/` as one argument of `python3 -c`, for hosts without a bundle.

Pure.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from distmagic.transports import Argv

_PACKAGE = "distmagic.remote.keeper"
_FOLDER = Path(__file__).parents[1] / "remote" / "keeper"
# The modules that a program imports from its package, each before those that import it.
_PARTS = {
    "keeper": ("processes", "allocation_lease", "listening"),
    "usher": (),
    "hold": ("processes",),
}
_LOADER = """\
import sys, types
def _load(name, text):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""


def command(python: str, role: str, request: Mapping[str, object]) -> Argv:
    """Return the argv that runs the module `role` ("usher", "keeper" or "hold") with this request.

    The role is also an argument, so that `ps` shows it. The last argument is the request.
    """
    words = ("-u", "-c", _one_line(role), f"distmagic-{role}", json.dumps(request))
    if python.startswith("~/"):
        # The home of the host that runs it. No shell expands `~`, where another program, such as
        # srun, starts it.
        return ("sh", "-c", 'exec "$HOME/$0" "$@"', python[2:], *words)
    return (python, *words)


@functools.cache
def _one_line(role: str) -> str:
    # The text of a program: it makes modules of its parts, as if they were imported, and runs
    # `role`.
    program = _LOADER if _PARTS[role] else ""
    for name in _PARTS[role]:
        program += f"_load({f'{_PACKAGE}.{name}'!r}, {_source(name)!r})\n"
    program += _source(role)
    packed = base64.b64encode(zlib.compress(program.encode(), 9)).decode()
    # The first words remove the working directory from the path, so that a json.py in the user's
    # home does not replace Python's own.
    return f"import sys;sys.path[:]=[p for p in sys.path if p];import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


def _source(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text()

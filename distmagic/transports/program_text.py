"""A program of `remote/keeper/` as one argument of `python3 -c`, for hosts without a bundle. Pure."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = "distmagic.remote.keeper"
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


def command(python: str, role: str, request: Mapping[str, object]) -> tuple[str, ...]:
    """Return the argv that runs the module `role` ("usher", "keeper" or "hold") with this request.

    The role is also an argument, so that `ps` shows it. The last argument is the request.
    """
    words = ("-u", "-c", _one_line(role), f"distmagic-{role}", json.dumps(request))
    if python.startswith("~/"):
        # The home of the host that runs it. No shell expands `~`, where another program, such as srun, starts it.
        return ("sh", "-c", 'exec "$HOME/$0" "$@"', python[2:], *words)
    return (python, *words)


@functools.cache
def _one_line(role: str) -> str:
    # The text of a program: it makes modules of its parts, as if they were imported, and runs `role`.
    if not _PARTS[role]:
        program = _source(f"{_PACKAGE}.{role}")
    else:
        text = [_LOADER]
        for name in _PARTS[role]:
            module = f"{_PACKAGE}.{name}"
            text.append(f"_load({module!r}, {_source(module)!r})\n")
        text.append(_source(f"{_PACKAGE}.{role}"))
        program = "".join(text)
    packed = base64.b64encode(zlib.compress(program.encode(), 9)).decode()
    # The first words remove the working directory from the path, so that a json.py in the user's home does not replace
    # Python's own.
    return f"import sys;sys.path[:]=[p for p in sys.path if p];import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()

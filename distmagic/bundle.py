"""The bundle: one zip with all that a host needs besides Python and torch.

    __main__.py            `python BUNDLE ROLE ...`: contact, agent, engine, worker or template
    distmagic/             the package's __init__ and the half that travels, remote/
    cloudpickle/           as installed here
    fallback/tqdm/         as installed here; for the end of `sys.path`, on hosts that have no tqdm

All of it is importable from inside the zip. Beside each file of distmagic stands its byte code: a Python of the same
version needs no compiler, which is a third of its start; any other Python ignores it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import marshal
import os
from pathlib import Path
from types import CodeType

from distmagic import blobs
from distmagic.errors import DistmagicError

_MAIN = b'''"""Starts one of the roles: python BUNDLE ROLE ARGUMENTS..."""

import importlib
import sys

ROLES = ("contact", "agent", "engine", "worker", "template")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ROLES:
        sys.exit("distmagic: the first argument is one of: " + ", ".join(ROLES))
    importlib.import_module("distmagic.remote." + sys.argv[1]).main(sys.argv[2:])
'''


def build() -> blobs.LocalBlob:
    """Return the bundle, which lies among this machine's blobs. The same bytes for the same installed files."""
    bundle = _built()
    try:
        os.utime(bundle.path)  # young again: nobody expires it while a kernel lives from it
    except FileNotFoundError:
        _built.cache_clear()
        bundle = _built()
    return bundle


@functools.cache
def _built() -> blobs.LocalBlob:
    here = Path(__file__).parent
    files = {"__main__.py": _MAIN, "distmagic/__init__.py": (here / "__init__.py").read_bytes()}
    files |= {f"distmagic/remote/{file.name}": file.read_bytes() for file in (here / "remote").glob("*.py")}
    files |= {f"{name}c": _compiled(here.parent / name, name) for name in files if name.startswith("distmagic/")}
    cloudpickle = _package("cloudpickle")
    if not cloudpickle:
        raise DistmagicError("cloudpickle is not installed here.", "Run: python -m pip install cloudpickle")
    files |= cloudpickle
    files |= {f"fallback/{name}": data for name, data in _package("tqdm").items()}
    return blobs.keep(blobs.zipped(files, compressed=True), blobs.folder())


def _compiled(path: Path, name: str) -> bytes:
    """Return a file's byte code as zipimport takes it: by the file's hash, which nobody has to check.

    Its frames are those of `name`, whatever place the file has here.
    """
    code = importlib.machinery.SourceFileLoader(name, str(path)).get_code(name)
    assert code is not None
    head = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little") + importlib.util.source_hash(path.read_bytes())
    return head + marshal.dumps(_renamed(code, name), 2)  # 2: the same bytes whoever else holds on to the constants


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = tuple(_renamed(const, name) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=name, co_consts=inner)


def _package(name: str) -> dict[str, bytes]:
    """Return the Python files of an installed package; none where it is not installed."""
    spec = importlib.util.find_spec(name)
    files: dict[str, bytes] = {}
    for place in (spec.submodule_search_locations if spec else None) or ():
        root = Path(place)
        files |= {f"{name}/{file.relative_to(root).as_posix()}": file.read_bytes() for file in root.rglob("*.py")}
    return files

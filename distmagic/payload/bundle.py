"""The bundle: one zip with everything that a host needs besides Python and torch.

    __main__.py      `python BUNDLE ROLE ...`: contact, agent, engine, worker, template or task
    distmagic/       the package's __init__, and remote/ without remote/keeper/
    cloudpickle/     as installed on the notebook machine
    fallback/tqdm/   likewise; for the end of `sys.path`, on hosts that have no tqdm

All of it is importable from inside the zip. It includes distmagic's byte code, which saves a Python
of the same version a third of its start time; other versions ignore it. Files that are not needed
at the start have no byte code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import marshal
import os
import sys
import threading
from pathlib import Path
from types import CodeType

from distmagic.errors import DistmagicError
from distmagic.payload import blobs
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.wire.protocol import Blob

_MAIN = b'''"""Starts one of the roles: python BUNDLE ROLE ARGUMENTS..."""

import importlib
import sys

ROLES = {
    "contact": "distmagic.remote.contact.contact",
    "agent": "distmagic.remote.agent.main",
    "engine": "distmagic.remote.engine.engine",
    "worker": "distmagic.remote.rank.worker",
    "template": "distmagic.remote.contact.template",
    "task": "distmagic.remote.contact.task",
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ROLES:
        sys.exit("distmagic: the first argument is one of: " + ", ".join(ROLES))
    importlib.import_module(ROLES[sys.argv[1]]).main(sys.argv[2:])
'''

BundleFiles = dict[str, Path]  # by their names in the bundle
_BUILDING = threading.Lock()
# Not needed at the start of a process.
_WITHOUT_BYTE_CODE = (
    "distmagic/remote/contact/boot.py",  # it was sent before, as text
    "distmagic/remote/contact/blob_server.py",
    "distmagic/remote/contact/environment_sync.py",
    "distmagic/remote/contact/mutual_tls.py",
    "distmagic/remote/contact/task.py",
    "distmagic/remote/engine/preloading.py",
    "distmagic/remote/rank/checkpoint.py",
    "distmagic/remote/rank/show.py",
    "distmagic/remote/records/work_sync.py",
    "distmagic/remote/system/hardware.py",
    "distmagic/remote/wire/log_lines.py",
)
# Bars of tqdm for chats and windows, whose packages a host without tqdm hardly has.
_NOT_OF_TQDM = ("bells.py", "discord.py", "slack.py", "telegram.py", "tk.py")


def build() -> blobs.LocalBlob:
    """Return the bundle, stored in this machine's folder of blobs.

    Equal installed files give equal bytes.
    """
    with _BUILDING:  # all hosts are connected to at once
        bundle = _built()
        try:
            os.utime(bundle.path)  # so that `expiry.expire` spares a bundle in use
        except FileNotFoundError:
            _built.cache_clear()
            bundle = _built()
    return bundle


@functools.cache
def _built() -> blobs.LocalBlob:
    files = _files()
    note = blobs.folder() / _fingerprint(files)
    return _noted(note) or _made(files, note)


def _files() -> BundleFiles:
    """Return {name in the bundle: file} of all unchanged files. Raises `DistmagicError`."""
    here = Path(__file__).parents[1]
    files = {"distmagic/__init__.py": here / "__init__.py"}
    for file in (here / "remote").rglob("*.py"):
        name = file.relative_to(here).as_posix()
        if file.parent.name != "keeper":  # it is sent as text, before the bundle
            files[f"distmagic/{name}"] = file
    cloudpickle = _package("cloudpickle")
    if not cloudpickle:
        raise DistmagicError(
            "cloudpickle is not installed on the notebook machine.",
            "Run: python -m pip install cloudpickle",
        )
    files.update(cloudpickle)
    for name, file in _package("tqdm").items():
        if file.name not in _NOT_OF_TQDM:
            files[f"fallback/{name}"] = file  # for a host that has no tqdm
    return files


def _fingerprint(files: BundleFiles) -> str:
    """Return a text that changes whenever the bundle does, without reading the files, which would
    take 0.1 s.
    """
    found = []
    for name, file in sorted(files.items()):
        status = file.stat()
        found.append((name, str(file), status.st_size, status.st_mtime_ns))
    text = repr((found, importlib.util.MAGIC_NUMBER, _MAIN))
    return hashlib.sha256(text.encode()).hexdigest()


def _noted(note: Path) -> blobs.LocalBlob | None:
    """Return the bundle that another kernel has made of the same files, if it exists and is
    complete.
    """
    try:
        found = note.with_name(note.read_text())
        data = found.read_bytes()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(data).hexdigest() != found.name:
        return None
    return blobs.LocalBlob(
        blob=Blob(sha256=found.name, size_bytes=len(data)), path=found
    )


def _made(files: BundleFiles, note: Path) -> blobs.LocalBlob:
    data = {"__main__.py": _MAIN}
    for name, path in files.items():
        data[name] = path.read_bytes()
        if name.startswith("distmagic/") and name not in _WITHOUT_BYTE_CODE:
            # A file's byte code in zipimport's format: identified by the file's hash, unchecked.
            # Its frames have the file name `name`. Hosts do not need docstrings.
            code = compile(data[name], name, "exec", dont_inherit=True, optimize=2)
            if sys.version_info >= (3, 11):
                code = _without_columns(code)
            flags = b"\1\0\0\0"  # by hash, unchecked: PEP 552
            head = (
                importlib.util.MAGIC_NUMBER
                + flags
                + importlib.util.source_hash(data[name])
            )
            # 2: the same bytes, independent of other references to the constants.
            data[f"{name}c"] = head + marshal.dumps(code, 2)
    made = blobs.keep(blobs.zipped(data), note.parent)
    with atomic_write(note) as file:
        file.write(made.blob.sha256.encode())
    return made


def _without_columns(code: CodeType) -> CodeType:
    """Return code without the column positions of its lines, which hosts do not need."""
    consts = []
    for const in code.co_consts:
        consts.append(_without_columns(const) if isinstance(const, CodeType) else const)
    # The table of a code's line numbers without columns (CPython's Objects/locations.md).
    table = bytearray()
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        for units in range((end - start) // 2, 0, -8):
            kind = 15 if number is None else 13
            table.append(0x80 | kind << 3 | min(units, 8) - 1)
            if number is None:
                continue
            step, line = number - line, number
            rest = -step << 1 | 1 if step < 0 else step << 1
            while rest >= 64:
                table.append(64 | rest & 63)
                rest >>= 6
            table.append(rest)
    return code.replace(co_consts=tuple(consts), co_linetable=bytes(table))


def _package(name: str) -> BundleFiles:
    """Return the Python files of an installed package; none if it is not installed."""
    spec = importlib.util.find_spec(name)
    files: BundleFiles = {}
    if spec is None:
        return files
    for place in spec.submodule_search_locations or ():
        root = Path(place)
        for file in root.rglob("*.py"):
            files[f"{name}/{file.relative_to(root).as_posix()}"] = file
    return files

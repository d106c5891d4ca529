"""Writes the files of an export.

It replaces files of an earlier export, and leaves all others in the folder unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.exports.job import File
from distmagic.remote.records.atomic_file import atomic_write

RECORD = ".distmagic-export.json"  # the files of the last export, by their SHA-256


def write(folder: Path, files: Sequence[File]) -> None:
    """Write `files` to `folder`, and remove files of the last export that this one lacks.

    Raises `UsageError`, before writing anything, if a file exists that no export wrote or that was
    changed since. It also raises it for a folder that can't be written.
    """
    try:
        before = _record(folder)
        written = {file.path: _sha256(file.data) for file in files}
        for name in sorted({*written, *before}):
            known = (before.get(name), written.get(name))
            _check_that_it_may_be_replaced(folder / name, known)
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as out:
                out.write(file.data)
            path.chmod(file.mode & 0o700 if file.is_private else file.mode)
        for name in set(before) - set(written):
            (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # there is more in it
                for parent in list(Path(name).parents)[:-1]:
                    (folder / parent).rmdir()
        with atomic_write(folder / RECORD) as out:
            out.write(json.dumps(written, indent=1).encode())
    except OSError as error:
        raise UsageError(
            f"--export: {error.filename or folder} can't be written: {error.strerror or error}.",
            "Name another folder.",
        ) from None


def _record(folder: Path) -> dict[str, str]:
    """Return the SHA-256s of the last export's files."""
    try:
        found = json.loads((folder / RECORD).read_bytes())
        return {
            path: digest
            for path, digest in found.items()
            if not Path(path).is_absolute() and ".." not in Path(path).parts
        }
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError):
        raise UsageError(
            f"--export: {folder / RECORD} is not a record of an export.",
            "Remove that file, or name another folder.",
        ) from None


def _check_that_it_may_be_replaced(
    there: Path, known: tuple[str | None, str | None]
) -> None:
    """Raise `UsageError` for a file that no export wrote, or that has changed: `known` are old and
    new SHA-256.
    """
    if not (there.exists() or there.is_symlink()):
        return
    found = _sha256(there.read_bytes()) if there.is_file() else ""
    if found not in known or there.is_symlink():
        what = (
            "was changed since it was exported"
            if known[0]
            else "was not written by an export"
        )
        raise UsageError(
            f"--export: {there} {what}, and would be replaced.",
            "Move it away, or name another folder.",
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

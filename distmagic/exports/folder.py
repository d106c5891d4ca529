"""Writes the files of an export. What an export wrote before is replaced; anything else in the folder stays as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.exports.job import File
from distmagic.remote.records.atomic_file import atomic_write

RECORD = ".distmagic-export.json"  # the files of the last export, by their SHA-256


def write(folder: Path, files: Sequence[File]) -> None:
    """Write `files` to `folder`, and remove what the last export wrote there and this one does not have.

    Raises `UsageError`, before anything is written, where a file is in the way that no export wrote or that was changed
    since; and for a folder that can't be written.
    """
    try:
        before = _record(folder)
        # Raise `UsageError` if a file is in the way, or to be removed, that is not what an export wrote.
        new = {file.path: _sha256(file.data) for file in files}
        for path in sorted({*new, *before}):
            there = folder / path
            if not there.exists() and not there.is_symlink():
                continue
            found = _sha256(there.read_bytes()) if there.is_file() else ""
            if found in (before.get(path), new.get(path)) and not there.is_symlink():
                continue
            what = (
                "was changed since it was exported"
                if path in before
                else "was not written by an export"
            )
            raise UsageError(
                f"--export: {there} {what}, and would be replaced.",
                "Move it away, or name another folder.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            _write_file(folder / file.path, file)
        for path in set(before) - {file.path for file in files}:
            _remove(folder, path)
        written = {file.path: _sha256(file.data) for file in files}
        with atomic_write(folder / RECORD) as out:
            out.write(json.dumps(written, indent=1).encode())
    except OSError as error:
        raise UsageError(
            f"--export: {error.filename or folder} can't be written: {error.strerror or error}.",
            "Name another folder.",
        ) from None


def _record(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"--export: {folder / RECORD} is not a record of an export.",
            "Remove that file, or name another folder.",
        )
    return {str(path): str(digest) for path, digest in found.items() if _is_inner(path)}


def _is_inner(path: str) -> bool:
    parts = Path(path).parts
    return bool(parts) and not Path(path).is_absolute() and ".." not in parts


def _write_file(path: Path, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        out.write(file.data)
    mode = 0o755 if file.is_executable else 0o644
    path.chmod(mode & 0o700 if file.is_private else mode)


def _remove(folder: Path, path: str) -> None:
    """Remove a file, and the folders that are empty without it."""
    (folder / path).unlink(missing_ok=True)
    for parent in (folder / path).parents:
        if parent == folder or any(parent.iterdir()):
            return
        parent.rmdir()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""Writes files that appear under their name complete, or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, *, is_buffered: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file to write and to read, readable by its owner only.

    It becomes `path` at the end of the block. If the block raises, the file is removed and `path`
    is unchanged. Until then the file has its own name, in the folder of `path`. Other processes,
    even on other hosts, may write the same path at the same time. Raises OSError.
    """
    # Only the start of a name, which may be as long as a name can be. That of a blob, its SHA-256,
    # is read by expiry.py.
    start = path.name.encode("ascii", "ignore")[:64].decode()
    aside = path.with_name(f".{start}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w+b", buffering=-1 if is_buffered else 0) as file:
            yield file
        os.replace(aside, path)
    finally:
        discard(aside)  # unless it has its final name now


def discard(path: Path) -> None:
    """Remove a file that is not needed any more. Errors of the disk or file server are ignored."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def resumed_write(part: Path, mode: int) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a file that is filled over several calls, with its earlier content, and its path.

    If another process or thread is filling it now, yield an empty file next to `part`. It is
    removed after the block unless it was renamed. Call `on_disk` before renaming a complete file.
    Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with _open(part, flags, mode) as file:
        if _is_ours(file, part):
            yield file, part
            return
    aside = part.with_name(f"{part.stem}-{secrets.token_hex(6)}{part.suffix}")
    try:
        with _open(aside, flags | os.O_EXCL, mode) as file:
            yield file, aside
    finally:
        discard(aside)


def on_disk(file: BinaryIO) -> None:
    """Flush a file to the disk or file server; some servers report errors of earlier writes only
    now. Raises OSError.
    """
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _open(path: Path, flags: int, mode: int) -> Iterator[BinaryIO]:
    """Open a file; if closing it fails, truncate it, so that the next call writes it again."""
    file = open(os.open(path, flags, mode), "r+b")  # noqa: SIM115 - its close may raise
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


def _is_ours(file: BinaryIO, path: Path) -> bool:
    """Lock an open file; return whether no other process has it, and it still has that name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    # Another one has it, or has just renamed it; or the file system has no locks.
    except OSError:
        return False

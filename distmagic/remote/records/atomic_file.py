"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, *, is_buffered: bool = True) -> Iterator[BinaryIO]:
    """Give a new file to write and to read, readable by its owner only, which becomes `path` when the block is over.

    Where the block raises, the file is removed and `path` stays as it was. The file has a name of its own until then, in
    the folder of `path`: other processes, also of other hosts, may write the same at the same time. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(
            aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "w+b", buffering=-1 if is_buffered else 0) as file:
            yield file
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):  # it has its name by now
            aside.unlink()


@contextmanager
def resumed_write(part: Path, mode: int) -> Iterator[tuple[BinaryIO, Path]]:
    """Give a file that is filled over several calls, with what came before, and where it is.

    Where another process or thread fills it just now, that is an empty file beside `part`, which goes after the block
    unless it was renamed there. What is whole has to be given to `on_disk` before. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with _open(part, flags, mode) as file:
        if _is_ours(file, part):
            yield file, part
            return
    aside = part.with_name(f"{part.stem}-{secrets.token_hex(6)}{part.suffix}")
    try:
        with _open(aside, flags | os.O_EXCL, mode) as file:
            yield file, aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def on_disk(file: BinaryIO) -> None:
    """Have the disk, or the server of a file system, take all of a file: some refuse it first here. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _open(path: Path, flags: int, mode: int) -> Iterator[BinaryIO]:
    """Open a file; of what could not be written when it is closed the next call writes all anew."""
    file = open(os.open(path, flags, mode), "r+b")  # noqa: SIM115 - its close may raise
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _is_ours(file: BinaryIO, path: Path) -> bool:
    """Lock an open file; return whether nobody else has it, and it still has that name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (
        OSError
    ):  # another one has it, or has just renamed it; or there are no locks here
        return False

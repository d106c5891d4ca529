"""Finds files below a folder by a pattern, and reads them without following links."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import posixpath
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from distmagic.remote.records.manifest import checked
from distmagic.remote.wire.protocol import FoundFile

MOST_FILES = 10_000
_LOOK_S = 10.0
_CHUNK = 1 << 20


def find(folder: str, pattern: str) -> list[FoundFile]:
    """Return the files below a folder whose path matches a pattern: `*` stays in one folder, `**`
    crosses folders.

    The path of a file means that file; the path of a folder means all files below it. No link is
    followed except `folder` itself. Raises ValueError for more than `MOST_FILES`, and for a folder
    with too many files to search.
    """
    named = pattern.removeprefix("./").rstrip("/")
    place = os.path.join(folder, named)
    if one := _found(place, named):
        return [one]  # a name may contain characters of patterns
    parts = named.split("/")
    if os.path.isdir(place) and not os.path.islink(place):
        parts.append("**")
    found = []
    until = time.monotonic() + _LOOK_S
    for inner, _, names in os.walk(folder):
        if time.monotonic() > until:
            raise ValueError(
                f"{folder} has more files than can be looked through in {_LOOK_S:g} s"
            )
        for name in names:
            place = os.path.join(inner, name)
            path = os.path.relpath(place, folder)
            if fits(path.split("/"), parts) and (one := _found(place, path)):
                found.append(one)
        if len(found) > MOST_FILES:
            raise ValueError(f"more than {MOST_FILES:,} files fit {pattern!r}")
    return sorted(found, key=lambda file: file.path)


def is_wanted(path: str, pattern: str) -> bool:
    """Whether `find` may return this path for a pattern, independent of the folder's content."""
    named = pattern.removeprefix("./").rstrip("/")
    if path == named:
        return True
    names, parts = path.split("/"), named.split("/")
    return fits(names, parts) or fits(names, [*parts, "**"])


def _found(place: str, path: str) -> FoundFile | None:
    """Return a regular file; None for anything else, and for one that was just removed."""
    try:
        status = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return FoundFile(
        path=path,
        size_bytes=status.st_size,
        changed_s=status.st_mtime,
        mode=status.st_mode & 0o777,
    )


def mode_of_copy(file: Path, name: str) -> int:
    """Return the permissions for a copy of a file: none for people who can't open one of the
    folders copied with it.

    `name` is the copy's path below the folder to which they are copied.
    """
    return file.stat().st_mode & mode_in_copy(file.parent, posixpath.dirname(name))


def mode_in_copy(folder: Path, name: str) -> int:
    """Return the permissions that files of a folder keep in its copy, as `mode_of_copy`; `name` is
    the folder's own copy.
    """
    mode = 0o777
    while folder.name and folder.name == posixpath.basename(name):
        above = folder.stat().st_mode
        if not above & 0o010:
            mode &= ~0o070
        if not above & 0o001:
            mode &= ~0o007
        folder, name = folder.parent, posixpath.dirname(name)
    return mode


def fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern."""
    if not pattern:
        return not path
    first, *rest = pattern
    if first == "**":
        return not rest or any(fits(path[start:], rest) for start in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], first) and fits(path[1:], rest)


def opened(folder: str, path: str) -> BinaryIO:
    """Open a file below a folder.

    Raises OSError, and ValueError for a path that leads outside, even by a link.
    """
    checked(path)
    real = os.path.realpath(folder)
    above = os.path.realpath(os.path.dirname(os.path.join(real, path)))
    if os.path.commonpath([real, above]) != real:
        raise ValueError(f"{path[:200]!r} leads out of {folder}")
    descriptor = os.open(
        os.path.join(above, os.path.basename(path)),
        os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK,
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path[:200]!r} is not a file")
    return open(descriptor, "rb")


def pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `begin` to `end`; fewer if it has become shorter."""
    file.seek(begin)
    while begin < end and (data := file.read(min(end - begin, _CHUNK))):
        begin += len(data)
        yield data


def digest(file: BinaryIO, begin: int, end: int) -> str:
    """Return the SHA-256 of the bytes of a file from `begin` to `end`."""
    found = hashlib.sha256()
    for data in pieces(file, begin, end):
        found.update(data)
    return found.hexdigest()


def digest_of(path: str | Path, size_bytes: int | None = None) -> str:
    """Return the SHA-256 of a file; "" if it is unreadable, no regular file, or has another size
    than `size_bytes`.
    """
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and size_bytes in (None, found.st_size):
            with open(path, "rb") as file:
                return digest(file, 0, found.st_size)
    return ""

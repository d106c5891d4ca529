"""Chooses the files of a folder to send: no keys or passwords, no ignored files, no links that lead
outside.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import seen_files
from distmagic.payload.ignored import rules_above
from distmagic.payload.sizes import allowance_gib, plural, size_text
from distmagic.remote.frozen import frozen
from distmagic.remote.records import places

MAX_FILES = 100_000
# At the top of a folder: the user's keys and passwords, and distmagic's own files, which are never
# sent.
_PRIVATE = {
    ".ssh",
    ".aws",
    ".gnupg",
    ".kube/config",
    ".docker/config.json",
    ".netrc",
    ".config/gcloud",
    ".distmagic",
}
_NAMED_AT_MOST = 3


@frozen
class LocalFile:
    """A file of this machine."""

    path: Path
    size_bytes: int
    is_executable: bool = False


@dataclass(kw_only=True)
class Contents:
    """Files, links and empty folders, by their path below a working directory."""

    files: dict[str, LocalFile] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # each with its target
    folders: list[str] = field(default_factory=list)
    # links that lead out of their folder
    left_out: list[str] = field(default_factory=list)
    # files excluded by a .gitignore, without those in wholly excluded folders
    ignored: list[str] = field(default_factory=list)
    # files that may hold the user's keys or passwords
    private: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        return sum(file.size_bytes for file in self.files.values())


def contents_of(folder: Path) -> Contents:
    """Return the files of a folder to send. Raises the errors of `add_folder`."""
    found = Contents()
    add_folder(found, folder)
    return found


def add_folder(contents: Contents, folder: Path, at: str = "") -> None:
    """Add the files of a folder to send at a path below the working directory, replacing existing
    files.

    Raises `PayloadError` if it is unreadable or has too many files.
    """
    try:
        _add(contents, Path(os.path.realpath(folder)), f"{at}/" if at else "")
    except OSError as error:
        raise PayloadError(
            f"{error.filename or folder} can't be read: {error.strerror or error}.",
            "Make it readable, or name it in .distmagicignore so that it is not sent.",
        ) from None


def _add(found: Contents, root: Path, prefix: str) -> None:
    kept_by_us = os.path.realpath(places.home())
    most = len(found.files) + MAX_FILES
    waiting = [("", rules_above(root))]
    while waiting:
        inner, rules = waiting.pop()
        here = root / inner
        rules = rules.below(here)
        with os.scandir(here) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
        if inner and any(entry.name == "pyvenv.cfg" for entry in there):
            continue  # a virtual environment, whose paths only exist on this machine
        if inner and not there:
            found.folders.append(prefix + inner)
        for entry in there:
            path = f"{inner}/{entry.name}" if inner else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if path in _PRIVATE or f"{root}/{path}" == kept_by_us:
                found.private.append(prefix + path)
            elif by := rules.ignored_by(f"{root}/{path}", is_folder=is_folder):
                if by.endswith("/.gitignore") and entry.is_file(follow_symlinks=False):
                    found.ignored.append(prefix + path)
            elif is_folder:
                waiting.append((path, rules))
            else:
                _add_entry(found, root, prefix + path, entry)
        if len(found.files) > most:
            raise PayloadError(
                f"{root} has more than {MAX_FILES:,} files to send.",
                "Name another folder with --sync DIR, or list what hosts don't need in a .distmagicignore of that folder.",
            )


def file_of(path: Path) -> LocalFile:
    """Return the entry of a file to send: path, size, mode. Raises OSError."""
    status = path.stat()
    seen_files.sent(path, status)
    return LocalFile(
        path=path,
        size_bytes=status.st_size,
        is_executable=bool(status.st_mode & stat.S_IXUSR),
    )


def content_of(path: Path) -> bytes:
    """Return the content of a file to send. Raises `PayloadError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PayloadError(
            f"{path} can't be read: {error.strerror or error}.", "Make it readable."
        ) from None


def _add_entry(found: Contents, root: Path, path: str, entry: os.DirEntry[str]) -> None:
    """Add a file; add a link that stays in the folder, as a relative one, and record one that leads
    outside.
    """
    here = Path(entry.path)
    if entry.is_file(follow_symlinks=False):
        found.files[path] = file_of(here)
    elif entry.is_symlink():  # otherwise a socket, a pipe, a device
        target = os.path.realpath(here)  # for links in a cycle: one of them
        if Path(target).is_relative_to(root):
            found.links[path] = os.path.relpath(target, here.parent)
        else:
            found.left_out.append(path)


def check_size(contents: Contents, limit_bytes: int, what: str) -> None:
    """Raise `PayloadTooLarge` if the files are larger than `limit_bytes`; `what` describes them."""
    size = contents.size_bytes
    if size <= limit_bytes:
        return
    largest = sorted(
        contents.files.items(), key=lambda item: item[1].size_bytes, reverse=True
    )[:_NAMED_AT_MOST]
    named = ", ".join(
        f"{path} ({size_text(file.size_bytes)})" for path, file in largest
    )
    count = len(contents.files)
    raise PayloadTooLarge(
        f"{what} would be sent to every host: {size_text(size)} in {plural(count, 'file')}, and at "
        f"most {size_text(limit_bytes)} are allowed. The largest: {named}.",
        "List what hosts don't need in .distmagicignore (written as .gitignore), name another folder with --sync DIR, "
        f"or allow it with --payload-limit {allowance_gib(size)}G.",
    )

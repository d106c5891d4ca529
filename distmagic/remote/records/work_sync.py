"""Brings the files of a run into its working directory: writes what has changed, removes what is listed no more.

Every file gets its name when it is whole. What ranks wrote stays, and no link that they made is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from distmagic.remote.records import manifest, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.records.manifest import ListedFile, Manifest

_CHUNK = 1 << 20
_FILE = "files.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What was brought last: the manifest's SHA-256, and by path what a file was and how it looked when it was written."""

    manifest: str = ""
    files: dict[str, list[Any]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


def last_brought(about: Path) -> Brought:
    """Return what was brought last, as `about`, the folder beside the working directory, says; nothing if it can't be read."""
    try:
        found = json.loads((about / _FILE).read_text())
        return Brought(
            manifest=found["manifest"], files=found["files"], links=found["links"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Brought()


class FileSync:
    """Brings a working directory to the state that a manifest lists. `about` is the folder beside it, for what is known."""

    def __init__(self, path: Path, about: Path) -> None:
        self._path, self._about = path, about
        self._incoming = about / "incoming"
        self._safe_folders: set[str] = {""}

    def empty(self) -> None:
        """Begin with an empty directory. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path, self._about / f"old-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            (self._about / _FILE).unlink()
        for old in self._about.glob("old-*"):
            shutil.rmtree(old, ignore_errors=True)

    def bring(self, sha256: str) -> None:
        """Bring the files that a manifest lists. Raises OSError, and ValueError for a blob that is no manifest."""
        wanted = manifest.decode(places.blob(sha256).read_bytes())
        before = last_brought(self._about)
        # Of one that was ended in the middle.
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir(mode=0o700)
        try:
            self._remove_unlisted(wanted, before)
            links = self._make_links(wanted)
            files = self._write_files(wanted, before)
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)
        kept_files = {
            path: row for path, row in before.files.items() if not wanted.owns(path)
        }
        kept_links = {
            path: target
            for path, target in before.links.items()
            if not wanted.owns(path)
        }
        after = {
            "manifest": sha256,
            "files": kept_files | files,
            "links": kept_links | links,
        }
        with atomic_write(self._about / _FILE) as file:
            file.write(json.dumps(after, separators=(",", ":")).encode())

    def _remove_unlisted(self, wanted: Manifest, before: Brought) -> None:
        """Remove what the last run of this name brought and this one does not; what ranks wrote stays."""
        listed = {file.path for file in wanted.files} | {
            path for path, _ in wanted.links
        }
        for path in (*before.files, *before.links):
            if (
                path in listed
                or not wanted.owns(path)
                or not self._is_below_own_folders(path)
            ):
                continue
            with contextlib.suppress(
                FileNotFoundError, IsADirectoryError, NotADirectoryError
            ):
                self._forget_compiled(path)
                (self._path / path).unlink()
            self._remove_empty_parents(path)

    def _remove_empty_parents(self, path: str) -> None:
        for parent in Path(path).parents:
            if parent.name:
                try:
                    (self._path / parent).rmdir()
                except OSError:
                    return  # there is something left in it

    def _is_below_own_folders(self, path: str) -> bool:
        """Whether no folder above this path has become a link, which would lead out of the directory."""
        above = [str(parent) for parent in Path(path).parents if parent.name]
        return not any((self._path / parent).is_symlink() for parent in above)

    def _make_folder(self, inner: str) -> None:
        """Make a folder below the directory. Raises OSError where a link or a file of the same name is in the way."""
        if inner in self._safe_folders:
            return
        self._make_folder(inner.rpartition("/")[0])
        path = self._path / inner
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise _in_the_way(path, "a folder")
        path.mkdir(mode=0o700, exist_ok=True)
        self._safe_folders.add(inner)

    def _make_links(self, wanted: Manifest) -> dict[str, str]:
        for inner in wanted.folders:
            self._make_folder(inner)
        for path, target in wanted.links:
            self._make_folder(path.rpartition("/")[0])
            here = self._path / path
            if here.is_symlink() and os.readlink(here) == target:
                continue
            if here.is_dir() and not here.is_symlink():
                raise _in_the_way(here, "a link")
            aside = self._incoming / secrets.token_hex(6)
            aside.symlink_to(target)
            os.replace(aside, here)
        return dict(wanted.links)

    def _write_files(self, wanted: Manifest, before: Brought) -> dict[str, list[Any]]:
        """Write the files that are not there yet as they are listed; return what is known of all of them now."""
        rows: dict[str, list[Any]] = {}
        lacking: dict[int, list[ListedFile]] = {}
        for file in wanted.files:
            source = [
                wanted.packs[file.pack],
                file.offset,
                file.size_bytes,
                file.is_executable,
            ]
            row = before.files.get(file.path)
            if (
                row is not None
                and row[:4] == source
                and row[4:] == self._look(file.path)
            ):
                rows[file.path] = row
            else:
                lacking.setdefault(file.pack, []).append(file)
        for pack, files in lacking.items():
            with places.blob(wanted.packs[pack]).open("rb") as source_file:
                for file in files:
                    source_file.seek(file.offset)
                    self._write(file, source_file)
                    source = [
                        wanted.packs[pack],
                        file.offset,
                        file.size_bytes,
                        file.is_executable,
                    ]
                    rows[file.path] = [*source, *self._look(file.path)]
        return rows

    def _look(self, path: str) -> list[int]:
        """Return what changes when somebody writes to a file; [] where it is gone."""
        try:
            found = os.lstat(self._path / path)
        except OSError:
            return []
        return [found.st_mtime_ns, found.st_size, found.st_mode, found.st_ino]

    def _write(self, file: ListedFile, source: BinaryIO) -> None:
        """Give a file its content, all at once. A file that has it already is left as it is."""
        self._make_folder(file.path.rpartition("/")[0])
        here = self._path / file.path
        if here.is_dir() and not here.is_symlink():
            raise _in_the_way(here, "a file")
        mode = 0o700 if file.is_executable else 0o600
        is_large = file.size_bytes >= manifest.LARGE_BYTES
        data = b"" if is_large else source.read(file.size_bytes)
        if not is_large and self._has(here, data, mode):
            return
        aside = self._incoming / secrets.token_hex(6)
        descriptor = os.open(
            aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode
        )
        with open(descriptor, "wb") as out:
            if is_large:
                shutil.copyfileobj(source, out, _CHUNK)  # all of the pack
            else:
                out.write(data)
        self._forget_compiled(file.path)
        os.replace(aside, here)

    def _has(self, here: Path, data: bytes, mode: int) -> bool:
        try:
            found = os.lstat(here)
            return (
                found.st_size == len(data)
                and found.st_mode == 0o100000 | mode
                and here.read_bytes() == data
            )
        except OSError:
            return False

    def _forget_compiled(self, path: str) -> None:
        """Remove the byte code of a module: Python would take it for that of the new text written in the same second."""
        inner, _, name = path.rpartition("/")
        if name.endswith(".py"):
            stem = name.removesuffix(".py")
            for compiled in (self._path / inner / "__pycache__").glob("*.pyc"):
                if compiled.name.startswith(f"{stem}."):
                    with contextlib.suppress(OSError):
                        compiled.unlink()


def _in_the_way(path: Path, what: str) -> OSError:
    return FileExistsError(
        f"{path} is in the way of {what} of that name; take it away there, or begin with an empty directory: --fresh"
    )

"""Updates a run's working directory: writes changed files, removes files that are no longer listed.

Every file is written atomically, and no link made by ranks is followed. A file or a link that a run
has written or changed is kept until the directory is emptied. Every other one is updated.

A large file that was touched counts as changed, because it is not read to compare. Files written
before an error count as sent. If the process was killed meanwhile, files that it wrote, and later
changes, count as a run's.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from distmagic.remote.frozen import frozen
from distmagic.remote.records import found_files, manifest, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.records.manifest import ListedFile, Manifest

_FILE = "files.json"
# Exists while files are written, and afterwards if the process was killed meanwhile.
_HALF = "half"
_ENDED_S = 3600.0  # a temporary file this old was left by a killed process


class BroughtFile(NamedTuple):
    """The record of a file that was sent."""

    source: list[Any]  # [pack, offset, size, is executable]
    digest: str  # of its content
    look: list[int]  # changes when the file is written


@frozen
class Brought:
    """The files that were last sent: the manifest's SHA-256, "" if they are incomplete; files and
    links by path.
    """

    manifest: str = ""
    files: dict[str, BroughtFile] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


def last_brought(about: Path) -> Brought:
    """Return the record of the files that were last sent, from `about`, the folder next to the
    working directory; empty if incomplete.

    Raises OSError if it is temporarily unreadable: otherwise changes by a run would be lost.
    """
    try:
        found = json.loads((about / _FILE).read_text())
        files = {path: BroughtFile(*row) for path, row in found["files"].items()}
        manifest = "" if (about / _HALF).exists() else found["manifest"]
        return Brought(manifest=manifest, files=files, links=found["links"])
    except (
        FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError,
    ):  # fmt: skip
        return Brought()


class FileSync:
    """Updates a working directory to the state in a manifest.

    `about` is the folder next to it, with data about it.
    """

    def __init__(self, path: Path, about: Path) -> None:
        self._path, self._about = path, about
        # Two hosts with one home may run this at once if each has its own locks.
        self._incoming = about / f"incoming-{secrets.token_hex(4)}"
        self._safe_folders: set[str] = {""}
        self._stay: list[str] = []
        # Digests of files before this update; a large one takes seconds to read.
        self._digests: dict[str, str] = {}

    def empty(self) -> None:
        """Start with an empty directory. Raises OSError."""
        with suppress(FileNotFoundError):
            os.replace(self._path, self._about / f"old-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            (self._about / _FILE).unlink()
        for old in self._about.glob("old-*"):
            shutil.rmtree(old, ignore_errors=True)

    def bring(self, sha256: str) -> list[str]:
        """Write the files that a manifest lists; return the paths of those kept as a run left them.

        Raises OSError, and ValueError for a blob that is no manifest.
        """
        wanted = manifest.decode(places.blob(sha256).read_bytes())
        before = last_brought(self._about)
        now = places.now_at(self._about)
        for other in places.matching(self._about, "incoming*"):
            with suppress(OSError):
                if now - other.stat().st_mtime > _ENDED_S:
                    shutil.rmtree(other)
        (self._about / _HALF).touch(mode=0o600)
        self._incoming.mkdir(mode=0o700)
        files: dict[str, BroughtFile] = {}
        links = dict(wanted.links)
        try:
            self._remove_unlisted(wanted, before)
            for inner in wanted.folders:
                self._make_folder(inner)
            for path, target in wanted.links:
                self._make_link(path, target, before)
            self._write_files(wanted, before, files)
        except BaseException:
            # Reserve space for the record first: on a full disk it would be cut.
            shutil.rmtree(self._incoming, ignore_errors=True)
            with suppress(OSError):
                came = Brought(files=before.files | files, links=before.links | links)
                self._remember(came)
            raise
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)
        for path, row in before.files.items():
            if not wanted.owns(path):
                files.setdefault(path, row)
        for path, target in before.links.items():
            if not wanted.owns(path):
                links.setdefault(path, target)
        self._remember(Brought(manifest=sha256, files=files, links=links))
        (self._about / _HALF).unlink(missing_ok=True)
        return self._stay

    def _remember(self, brought: Brought) -> None:
        with atomic_write(self._about / _FILE) as file:
            file.write(json.dumps(asdict(brought), separators=(",", ":")).encode())

    def _remove_unlisted(self, wanted: Manifest, before: Brought) -> None:
        """Remove files that the last run of this name sent and this one does not; files written by
        ranks are kept.
        """
        listed = {file.path for file in wanted.files} | {
            path for path, _ in wanted.links
        }
        for path in (*before.files, *before.links):
            # A parent folder that has become a link would lead outside of the directory.
            above = [
                self._path / parent for parent in Path(path).parents if parent.name
            ]
            is_outside = any(
                places.file_type(parent) == stat.S_IFLNK for parent in above
            )
            if path in listed or not wanted.owns(path) or is_outside:
                continue
            if self._is_as_brought(path, before):
                with suppress(FileNotFoundError):
                    self._forget_compiled(path)
                    (self._path / path).unlink()
            with suppress(OSError):  # one of them is not empty
                for parent in above:
                    parent.rmdir()

    def _is_as_brought(self, path: str, before: Brought) -> bool:
        """Whether a file or a link is unchanged since it was sent; one that was not sent counts as
        changed.
        """
        if path in before.links and self._target(path) == before.links[path]:
            return True
        row = before.files.get(path)
        return row is not None and self._has(path, row, row)

    def _target(self, path: str) -> str | None:
        try:
            return os.readlink(self._path / path)
        except OSError:
            return None

    def _make_link(self, path: str, target: str, before: Brought) -> None:
        self._make_folder(path.rpartition("/")[0])
        here = self._path / path
        if self._target(path) == target:
            return
        there = places.file_type(here)
        if there == stat.S_IFDIR:
            raise _in_the_way(here, "a link", "a folder")
        if there and not self._is_as_brought(path, before):
            self._stay.append(path)
            return
        aside = self._incoming / secrets.token_hex(6)
        aside.symlink_to(target)
        os.replace(aside, here)

    def _make_folder(self, inner: str) -> None:
        """Make a folder below the directory.

        Raises OSError if a link or a file of the same name is in the way.
        """
        if inner in self._safe_folders:
            return
        self._make_folder(inner.rpartition("/")[0])
        path = self._path / inner
        if places.file_type(path) not in (0, stat.S_IFDIR):
            raise _in_the_way(path, "a folder", "a file or link")
        path.mkdir(mode=0o700, exist_ok=True)
        self._safe_folders.add(inner)

    def _write_files(
        self, wanted: Manifest, before: Brought, rows: dict[str, BroughtFile]
    ) -> None:
        """Write the files that differ from their listed state, and add the record of each to
        `rows`.
        """
        lacking: dict[int, list[ListedFile]] = {}
        for file in wanted.files:
            row = before.files.get(file.path)
            if (
                row is not None
                and row.source == _source(wanted, file)
                and row.look == self._look(file.path)
            ):
                rows[file.path] = row
            else:
                lacking.setdefault(file.pack, []).append(file)
        for pack, files in lacking.items():
            with places.blob(wanted.packs[pack]).open("rb") as source:
                for file in files:
                    # A pack with one large file is just its content.
                    digest = wanted.packs[pack]
                    if file.size_bytes < manifest.LARGE_BYTES:
                        digest = found_files.digest(source, file.offset, file.end)
                    coming = BroughtFile(_source(wanted, file), digest, [])
                    rows[file.path] = self._write(file, source, coming, before)

    def _look(self, path: str) -> list[int]:
        """Return values that change when a file is written; [] if it does not exist.

        Raises OSError.
        """
        try:
            found = os.lstat(self._path / path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [found.st_mtime_ns, found.st_size, found.st_mode, found.st_ino]

    def _write(
        self, file: ListedFile, pack: BinaryIO, coming: BroughtFile, before: Brought
    ) -> BroughtFile:
        """Write a file of a pack atomically; return its row, which is `coming` with a look.

        A file that has this content already, or that a run has changed, is not written.
        """
        path = file.path
        self._make_folder(path.rpartition("/")[0])
        here = self._path / path
        there = places.file_type(here)
        if there == stat.S_IFDIR:
            raise _in_the_way(here, "a file", "a folder")
        mode = 0o700 if file.is_executable else 0o600
        known = before.files.get(path)
        if self._has(path, coming, known):
            with suppress(PermissionError):  # another user's: it is replaced
                if stat.S_IMODE(os.lstat(here).st_mode) != mode:
                    here.chmod(mode)
                return coming._replace(look=self._look(path))
        elif (
            there
            and not self._is_as_brought(path, before)
            and not self._has(path, coming, known)  # another host has just written it
        ):
            self._stay.append(path)
            return coming._replace(look=known.look if known is not None else [])
        aside = self._incoming / secrets.token_hex(6)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as out:
            out.writelines(found_files.pieces(pack, file.offset, file.end))
        self._forget_compiled(path)
        os.replace(aside, here)
        return coming._replace(look=self._look(path))

    def _has(self, path: str, content: BroughtFile, known: BroughtFile | None) -> bool:
        """Whether a file has the content of a row.

        It is only read if nothing else decides; `known` is its last row.
        """
        look = self._look(path)
        if not look:
            return False
        if known is not None and known.look == look:
            return known.digest == content.digest
        size_bytes = content.source[2]
        if look[1] != size_bytes:
            return False
        is_unchanged_here = known is not None and known.digest == content.digest
        if is_unchanged_here and size_bytes >= manifest.LARGE_BYTES:
            # A kept snapshot would be read at every run, which takes minutes.
            return False
        if path not in self._digests:
            self._digests[path] = found_files.digest_of(self._path / path)
        return self._digests[path] == content.digest

    def _forget_compiled(self, path: str) -> None:
        """Remove the byte code of a module: Python could take it for that of a new text from the
        same second.
        """
        inner, _, name = path.rpartition("/")
        if name.endswith(".py"):
            stem = name.removesuffix(".py")
            for compiled in (self._path / inner / "__pycache__").glob("*.pyc"):
                if compiled.name.startswith(f"{stem}."):
                    with suppress(OSError):
                        compiled.unlink()


def _source(wanted: Manifest, file: ListedFile) -> list[Any]:
    """Return what the row of a file records as its source: the pack, the place in it, and whether
    it is executable.
    """
    pack = wanted.packs[file.pack]
    return [pack, file.offset, file.size_bytes, file.is_executable]


def _in_the_way(path: Path, needed: str, found: str) -> OSError:
    return FileExistsError(
        f"the run needs {needed} at {path}, but {found} has that name.\n"
        "Move it away on this host, or start with an empty directory: --fresh"
    )

"""Turns the files of a run into blobs: packs of small files, large files unchanged, and the list of
all files.

Small files are packed in the order of their paths. Whether a pack ends after a file only depends on
that file's path. So one changed file changes one pack, and a new file one or two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distmagic.errors import PayloadError
from distmagic.payload import blobs
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.folder import Contents, LocalFile
from distmagic.remote.frozen import frozen
from distmagic.remote.records import found_files, manifest
from distmagic.remote.records.manifest import LARGE_BYTES, ListedFile, Manifest
from distmagic.remote.wire.protocol import Blob

_FULL_BYTES = 4 << 20  # limit of a pack
_ONE_IN = 64  # share of files that end a pack
_MOST_PACKS = 8_000  # all names must fit into one message


@frozen
class Tree:
    """The files for a run's working directory, as blobs; `inside` is the subfolder in which ranks
    start.
    """

    listed: LocalBlob
    packs: tuple[LocalBlob, ...]
    files: int
    size_bytes: int
    inside: str = ""

    @property
    def blobs(self) -> tuple[LocalBlob, ...]:
        """All blobs to send."""
        return self.listed, *self.packs


def packed(
    contents: Contents, owned: Sequence[str], folder: Path, inside: str = ""
) -> Tree:
    """Write packs and list to `folder`.

    `owned` as in `Manifest`. Raises `PayloadError` for an unreadable file.
    """
    packing = _Packing(folder)
    try:
        for path in sorted(contents.files):
            packing.add(path, contents.files[path])
        packing.end_pack()
    except OSError as error:
        raise PayloadError(
            f"{error.filename or folder} can't be read or written: {error.strerror or error}."
        ) from None
    if len(packing.names) > _MOST_PACKS:
        raise PayloadError(
            f"{len(packing.names):,} large files would be sent to every host; at most {_MOST_PACKS:,} can be.",
            "List what hosts don't need in .distmagicignore, or put many files into an archive.",
        )
    found = Manifest(
        packs=tuple(packing.names),
        files=tuple(packing.files),
        links=tuple(sorted(contents.links.items())),
        folders=tuple(sorted(contents.folders)),
        owned=tuple(owned),
    )
    return Tree(
        listed=blobs.keep(manifest.encode(found), folder),
        packs=tuple(packing.blobs.values()),
        files=len(found.files),
        size_bytes=contents.size_bytes,
        inside=inside,
    )


@dataclass
class _Packing:
    """Packs that are being written to `folder`: their SHA-256s in the order of the list, and each
    blob once.
    """

    folder: Path
    names: list[str] = field(default_factory=list)
    blobs: dict[str, LocalBlob] = field(default_factory=dict)
    files: list[ListedFile] = field(default_factory=list)
    _open: list[tuple[str, LocalFile, bytes]] = field(default_factory=list)
    _open_bytes: int = 0

    def add(self, path: str, file: LocalFile) -> None:
        if file.size_bytes >= LARGE_BYTES:
            with file.path.open("rb") as source:
                size = source.seek(0, os.SEEK_END)
                sha256 = found_files.digest(source, 0, size)
            blob = Blob(sha256=sha256, size_bytes=size)
            whole = LocalBlob(blob=blob, path=file.path, is_users=True)
            self._list(path, self._number_of(whole), 0, size, file)
            return
        data = file.path.read_bytes()
        self._open.append((path, file, data))
        self._open_bytes += len(data)
        name = path.encode("utf-8", "surrogateescape")
        ends_here = (
            int.from_bytes(hashlib.sha256(name).digest()[:4], "big") % _ONE_IN == 0
        )
        if ends_here or self._open_bytes >= _FULL_BYTES:
            self.end_pack()

    def end_pack(self) -> None:
        """Write the open pack, if it has any file."""
        if not self._open:
            return
        data = b"".join(part for _, _, part in self._open)
        number = self._number_of(blobs.keep(data, self.folder))
        offset = 0
        for path, file, part in self._open:
            self._list(path, number, offset, len(part), file)
            offset += len(part)
        self._open, self._open_bytes = [], 0

    def _number_of(self, pack: LocalBlob) -> int:
        """Record a pack, and return its number."""
        self.blobs.setdefault(pack.blob.sha256, pack)
        self.names.append(pack.blob.sha256)
        return len(self.names) - 1

    def _list(
        self, path: str, pack: int, offset: int, size: int, file: LocalFile
    ) -> None:
        self.files.append(
            ListedFile(
                path=path,
                pack=pack,
                offset=offset,
                size_bytes=size,
                is_executable=file.is_executable,
            )
        )

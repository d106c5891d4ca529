"""Turns the files of a run into blobs: packs of small files, large files unchanged, and the list of
all files.

Small files are packed in the order of their paths. Whether a pack ends after a file only depends on
that file's path. So one changed file changes one pack, and a new file one or two.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
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
    groups = _groups(contents.files)
    if len(groups) > _MOST_PACKS:
        raise PayloadError(
            f"{len(groups):,} large files would be sent to every host; at most {_MOST_PACKS:,} can be.",
            "List what hosts don't need in .distmagicignore, or put many files into an archive.",
        )
    names: list[str] = []
    packs: dict[str, LocalBlob] = {}  # equal ones only once
    listed = []
    try:
        for paths in groups:
            files = [contents.files[path] for path in paths]
            pack, sizes = _pack(files, folder)
            offset = 0
            for path, file, size in zip(paths, files, sizes, strict=True):
                listed.append(
                    ListedFile(
                        path=path,
                        pack=len(names),
                        offset=offset,
                        size_bytes=size,
                        is_executable=file.is_executable,
                    )
                )
                offset += size
            names.append(pack.blob.sha256)
            packs.setdefault(pack.blob.sha256, pack)
    except OSError as error:
        raise PayloadError(
            f"{error.filename or folder} can't be read or written: {error.strerror or error}."
        ) from None
    found = Manifest(
        packs=tuple(names),
        files=tuple(listed),
        links=tuple(sorted(contents.links.items())),
        folders=tuple(sorted(contents.folders)),
        owned=tuple(owned),
    )
    return Tree(
        listed=blobs.keep(manifest.encode(found), folder),
        packs=tuple(packs.values()),
        files=len(listed),
        size_bytes=contents.size_bytes,
        inside=inside,
    )


def _groups(files: Mapping[str, LocalFile]) -> list[list[str]]:
    """Return the paths of the files of each pack; a large file is a pack of its own."""
    groups = []
    waiting: list[str] = []
    waiting_bytes = 0
    for path in sorted(files):
        size = files[path].size_bytes
        if size >= LARGE_BYTES:
            groups.append([path])
            continue
        waiting.append(path)
        waiting_bytes += size
        name = path.encode("utf-8", "surrogateescape")
        if waiting_bytes >= _FULL_BYTES or zlib.crc32(name) % _ONE_IN == 0:
            groups.append(waiting)
            waiting, waiting_bytes = [], 0
    return [*groups, waiting] if waiting else groups


def _pack(files: Sequence[LocalFile], folder: Path) -> tuple[LocalBlob, list[int]]:
    """Return a pack of files, written to `folder`, and the size of each. Raises OSError."""
    path = files[0].path
    if files[0].size_bytes >= LARGE_BYTES:
        with path.open("rb") as source:
            size = source.seek(0, os.SEEK_END)
            sha256 = found_files.digest(source, 0, size)
        blob = Blob(sha256=sha256, size_bytes=size)
        return LocalBlob(blob=blob, path=path, is_users=True), [size]
    parts = [file.path.read_bytes() for file in files]
    return blobs.keep(b"".join(parts), folder), [len(part) for part in parts]

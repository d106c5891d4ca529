"""Copies files of this machine to all hosts: once from this machine, and then from host to host
(runner/delivery.py).
"""

# ruff: noqa: T201  # lines for people

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from distmagic import names, sanitize
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link, patience_s
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests.progress_line import ProgressLine
from distmagic.connection.requests.remote_files import (
    SourceFile,
    files_at,
    local_file,
)
from distmagic.errors import ProtocolError, UsageError
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.sizes import plural
from distmagic.remote.wire import file_names, protocol
from distmagic.remote.wire.protocol import Folder, PlacedFile
from distmagic.runner.delivery import Delivery
from distmagic.runner.prepare import routes_of

# A host stores a batch next to its blobs before the files get their names, perhaps on another disk.
_BATCH_BYTES = 256 << 20
# One message lists all files of a batch, each with its name and about 200 bytes more.
_LIST_BYTES = 500_000
_ENTRY_BYTES = 200
_TRIES = 3  # hosts that share a home take files of one batch from each other


def named_files(sources: Sequence[Path]) -> list[SourceFile]:
    """Return the files at these paths ordered by their names on hosts: below a folder with the
    source's own name.

    Folders with the same name are merged. Raises `UsageError` if two different files would get the
    same name, and the errors of `files_at`.
    """
    found: dict[str, SourceFile] = {}
    for source in sources:
        for file in files_at(source):
            other = found.setdefault(file.name, file)
            if not _has_same_content(other, file):
                raise UsageError(
                    f"{other.path} and {file.path} differ, and both would be {file.name} on the hosts.",
                    "Put them one after the other, each to a folder of its own.",
                )
    return [found[name] for name in sorted(found)]


def _has_same_content(one: SourceFile, other: SourceFile) -> bool:
    if one.path == other.path:
        return True
    return Path(one.path).read_bytes() == Path(other.path).read_bytes()


def batches(files: Iterable[SourceFile]) -> Iterator[list[SourceFile]]:
    """Yield the files in batches of limited size, each with at least one file, and with a list that
    fits into one message.
    """
    batch: list[SourceFile] = []
    size_bytes = list_bytes = 0
    for file in files:
        of_entry = len(file_names.quoted(file.name)) + _ENTRY_BYTES
        size_bytes += file.size_bytes
        list_bytes += of_entry
        if batch and (size_bytes > _BATCH_BYTES or list_bytes > _LIST_BYTES):
            yield batch
            batch, size_bytes, list_bytes = [], file.size_bytes, of_entry
        batch.append(file)
    if batch:
        yield batch


def put(first_links: FirstLinks, sources: Sequence[Path], to: str) -> tuple[int, int]:
    """Copy files, and folders with all their files, into a folder of every host; return their
    number and bytes.

    A file of the same size, last change and permissions on a host counts as the same; any other is
    sent unless the host has its content. Hosts record them for `clean`. Raises
    `UsageError` for a path that is neither file nor folder, `PreflightError` if a host can't write,
    and the errors of connecting.
    """
    files = named_files(sources)
    total_bytes = sum(file.size_bytes for file in files)
    with first_links.opened() as opened:
        links = list(opened.values())
        addresses = [route.address for route in routes_of(links)[0]]
        line = ProgressLine(f"to {plural(len(links), 'host')}", total_bytes)
        differing = _differing(links, files, to)
        line.begin_at(total_bytes - sum(file.size_bytes for file in differing))
        for batch in batches(differing):
            _put_batch(links, addresses, batch, to, line)
        line.end()
    return len(files), total_bytes


def _differing(
    links: Sequence[Link], files: Sequence[SourceFile], to: str
) -> list[SourceFile]:
    """Return the files that at least one host does not have like this."""
    lines = [
        f"{file.size_bytes} {file.changed_ns} {file.mode} {file_names.quoted(file.name)}"
        for file in files
    ]
    longest = max(map(len, lines)) + len('"",')
    count = max(1, _LIST_BYTES // longest)  # files in one message
    requests = {
        start: protocol.CompareFiles(
            folder=Folder(path=to),
            files=tuple(lines[start : start + count]),
            owner=names.owner(),
        )
        for start in range(0, len(lines), count)
    }

    def differing_on(link: Link) -> set[int]:
        found: set[int] = set()
        for start, request in requests.items():
            limit_s = patience_s(len(request.files), 0)
            answer = link.query(request, protocol.DifferingFiles, limit_s)
            found.update(start + index for index in answer.indexes)
        return found

    differing = frozenset().union(*in_parallel(differing_on, links))
    return [file for index, file in enumerate(files) if index in differing]


def _put_batch(
    links: Sequence[Link],
    addresses: Sequence[str],
    batch: Sequence[SourceFile],
    to: str,
    line: ProgressLine,
) -> None:
    local = [local_file(Path(file.path)) for file in batch]
    request = protocol.PlaceFiles(
        folder=Folder(path=to),
        files=placed_files(batch, local),
        origin=names.own_origin(),
        owner=names.owner(),
    )

    size_bytes = sum(one.blob.size_bytes for one in local)
    # The host reads all of it, and may copy it to another disk.
    limit_s = patience_s(len(local), size_bytes)

    def place(link: Link) -> frozenset[str]:
        return frozenset(link.query(request, protocol.MissingBlobs, limit_s).sha256)

    lacking = in_parallel(place, links)
    for _ in range(_TRIES):
        wanted = frozenset().union(*lacking)
        if not wanted:
            line.add(size_bytes)
            return
        there = [index for index, names in enumerate(lacking) if names]
        taking = [links[index] for index in there]
        Delivery(
            taking,
            [addresses[index] for index in there],
            [one for one in local if one.blob.sha256 in wanted],
            lambda *_: None,
            partial(_note, taking),
        ).run()
        lacking = in_parallel(place, links)
    silent = ", ".join(
        link.host.name for link, names in zip(links, lacking, strict=True) if names
    )
    raise ProtocolError(f"{silent}: files that had arrived were gone again.")


def placed_files(
    files: Sequence[SourceFile], local: Sequence[LocalBlob]
) -> tuple[PlacedFile, ...]:
    """Return what a host needs in order to make these files from their blobs, in the same order."""
    return tuple(
        PlacedFile(
            path=file_names.quoted(file.name),
            blob=one.blob,
            mode=file.mode,
            changed_ns=file.changed_ns,
        )
        for file, one in zip(files, local, strict=True)
    )


def _note(links: Sequence[Link], node: int, text: str) -> None:
    print(sanitize.line(f"{links[node].host.name}: {text}"), file=sys.stderr)

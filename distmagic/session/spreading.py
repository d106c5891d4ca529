"""Copies files of this machine to all hosts: once from this machine, and then from host to host
(runner/delivery.py).
"""

# ruff: noqa: T201  # lines for people

from __future__ import annotations

import posixpath
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from distmagic import names, sanitize
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link, patience_s
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests.progress_line import ProgressLine
from distmagic.connection.requests.remote_files import files_at, local_file
from distmagic.errors import ProtocolError, UsageError
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.sizes import plural
from distmagic.remote.records import found_files
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


def named_files(sources: Sequence[Path]) -> dict[str, Path]:
    """Return the files at these paths by their names on hosts: below a folder with the source's own
    name.

    Folders with the same name are merged. Raises `UsageError` if two different files would get the
    same name.
    """
    found: dict[str, Path] = {}
    for source in sources:
        for path, name in files_at(source):
            other = found.setdefault(name, path)
            if other != path and other.read_bytes() != path.read_bytes():
                raise UsageError(
                    f"{other} and {path} differ, and both would be {name} on the hosts.",
                    "Put them one after the other, each to a folder of its own.",
                )
    return found


def batches(
    files: Mapping[str, Path], size_of: Callable[[Path], int]
) -> Iterator[dict[str, Path]]:
    """Yield the files ordered by name, in batches of limited size, each with at least one file."""
    batch: dict[str, Path] = {}
    size_bytes = list_bytes = 0
    for name, path in sorted(files.items()):
        of_file, of_entry = size_of(path), len(file_names.quoted(name)) + _ENTRY_BYTES
        size_bytes += of_file
        list_bytes += of_entry
        if batch and (size_bytes > _BATCH_BYTES or list_bytes > _LIST_BYTES):
            yield batch
            batch, size_bytes, list_bytes = {}, of_file, of_entry
        batch[name] = path
    if batch:
        yield batch


def put(first_links: FirstLinks, sources: Sequence[Path], to: str) -> tuple[int, int]:
    """Copy files, and folders with all their files, into a folder of every host; return their
    number and bytes.

    Files that a host has already are not sent. Hosts record them for `clean`. Raises `UsageError`
    for a path that is neither file nor folder, `PreflightError` if a host can't write, and the
    errors of connecting.
    """
    files = named_files(sources)
    total_bytes = sum(path.stat().st_size for path in files.values())
    with first_links.opened() as opened:
        links = list(opened.values())
        addresses = [route.address for route in routes_of(links)[0]]
        line = ProgressLine(f"to {plural(len(links), 'host')}", total_bytes)
        for batch in batches(files, lambda path: path.stat().st_size):
            _put_batch(links, addresses, batch, to, line)
        line.end()
    return len(files), total_bytes


def _put_batch(
    links: Sequence[Link],
    addresses: Sequence[str],
    batch: Mapping[str, Path],
    to: str,
    line: ProgressLine,
) -> None:
    local = {name: local_file(path) for name, path in batch.items()}
    request = protocol.PlaceFiles(
        folder=Folder(path=to),
        files=placed_files(local),
        origin=names.own_origin(),
        owner=names.owner(),
    )

    size_bytes = sum(one.blob.size_bytes for one in local.values())
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
            [one for one in local.values() if one.blob.sha256 in wanted],
            lambda *_: None,
            partial(_note, taking),
        ).run()
        lacking = in_parallel(place, links)
    silent = ", ".join(
        link.host.name for link, names in zip(links, lacking, strict=True) if names
    )
    raise ProtocolError(f"{silent}: files that had arrived were gone again.")


def placed_files(local: Mapping[str, LocalBlob]) -> tuple[PlacedFile, ...]:
    """Return what a host needs in order to make files from blobs; `local` has the files by their
    names on the host.
    """
    modes: dict[tuple[Path, str], int] = {}  # by folder, and the folder's copy
    files = []
    for name, one in local.items():
        place = one.path.parent, posixpath.dirname(name)
        if place not in modes:
            modes[place] = found_files.mode_in_copy(*place)
        mode = one.path.stat().st_mode & modes[place]
        quoted = file_names.quoted(name)
        files.append(PlacedFile(path=quoted, blob=one.blob, mode=mode))
    return tuple(files)


def _note(links: Sequence[Link], node: int, text: str) -> None:
    print(sanitize.line(f"{links[node].host.name}: {text}"), file=sys.stderr)

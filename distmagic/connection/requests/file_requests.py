"""Requests to one host about files of the user: list them, read one, write one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from distmagic.connection.link import WALK_S, Link
from distmagic.errors import ConnectionLost, ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.records.found_files import is_wanted
from distmagic.remote.records.manifest import is_inside
from distmagic.remote.wire import file_names, protocol
from distmagic.remote.wire.bounds import MOST_FILES
from distmagic.remote.wire.protocol import Folder, FoundFile

T = TypeVar("T")

_SHOWN_CHARS = 200  # characters of a rejected path that are shown


def find_files(link: Link, folder: Folder, pattern: str) -> tuple[FoundFile, ...]:
    """Return the files below a folder that match a pattern, ordered by path.

    Raises `PreflightError` for too many files, and `ProtocolError` for a path outside of the folder
    or the pattern. So the host can't choose which files are written on this machine. A path is
    exactly as on the host, with any character except NUL, so display it with `repr` or `sanitize`.
    """
    found: list[FoundFile] = []
    with link.bounded(WALK_S):
        link.send(protocol.ListFiles(folder=folder, pattern=pattern))
        while some := link.answer(protocol.FoundFiles).files:
            found += [
                replace(file, path=file_names.unquoted(file.path))
                for file in some[: MOST_FILES - len(found)]
            ]
    for file in found:
        if not is_inside(file.path) or not is_wanted(file.path, pattern):
            raise ProtocolError(
                f"{link.host.name} named a file that was not asked for: {file.path[:_SHOWN_CHARS]!r}."
            )
    return tuple(found)


def read_file(
    link: Link,
    request: protocol.ReadFile,
    begin: Callable[[protocol.FileBegins], object],
    write: Callable[[bytes], object],
) -> bool:
    """Pass a file to `write`, after calling `begin` with its length and start.

    Return whether the file changed on the host during the transfer. Raises `PreflightError` if the
    host has no such file.
    """
    link.send(request)
    begins = link.answer(protocol.FileBegins)
    begin(begins)
    left = begins.size_bytes - begins.offset
    while True:
        answer: object = link.answer(protocol.Data, protocol.FileEnds)
        if isinstance(answer, protocol.FileEnds):
            return answer.has_changed or left > 0
        assert isinstance(answer, protocol.Data)
        left -= answer.size_bytes
        if left < 0 or answer.size_bytes < 1:
            link.close()
            raise ProtocolError(
                f"{link.host.name}: {request.path} is longer than was announced."
            )
        link.take(answer.size_bytes, write)


def write_file(
    link: Link,
    request: protocol.WriteFile,
    local: LocalBlob,
    begin: Callable[[int], object],
    add: Callable[[int], object],
) -> None:
    """Send a file. `begin` gets the number of bytes that the host already has, `add` the number of
    sent bytes.

    Raises `PreflightError` if the host refuses it, and `PayloadError` if the file has become
    shorter.
    """
    link.send(request)
    offset = link.answer(protocol.FileBegins).offset
    if offset > request.size_bytes:
        link.close()
        raise ProtocolError(
            f"{link.host.name} wants {request.path} from byte {offset:,} on, which is beyond its end."
        )
    begin(offset)
    for size in link.pour(local, offset):
        add(size)
    link.answer(protocol.FileEnds)


@dataclass
class Reopening:
    """A link that is opened on demand, and again if the connection breaks.

    A `with` block closes it at its end.
    """

    _open_link: Callable[[], Link]
    _link: Link | None = None

    def link(self) -> Link:
        """Return the link. Raises what opening one raises."""
        if self._link is None:
            self._link = self._open_link()
        return self._link

    def close(self) -> None:
        """Close the link: `link` then opens a new one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Reopening:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._link is not None:
            self._link.finish()  # its process ends by itself
        self.close()

    def call(self, transfer: Callable[[Link], T], done_bytes: Callable[[], int]) -> T:
        """Return the result of `transfer`; if the connection breaks, call it again over a new one.

        Raises `ConnectionLost` if a connection breaks before it has transferred any byte of a file.
        """
        most = -1
        while True:
            link = self.link()
            try:
                return transfer(link)
            except ConnectionLost:
                self.close()
                if done_bytes() <= most:
                    raise
                most = done_bytes()

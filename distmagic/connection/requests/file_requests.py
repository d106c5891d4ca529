"""What one host is asked about files of the user: which there are, the bytes of one, to take one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from distmagic.connection.link import BOOT_TIMEOUT_S, Link
from distmagic.errors import ConnectionLost, ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.records.found_files import is_wanted
from distmagic.remote.records.manifest import is_inside
from distmagic.remote.wire import file_names, protocol
from distmagic.remote.wire.bounds import MOST_FILES
from distmagic.remote.wire.protocol import Folder, FoundFile

T = TypeVar("T")

_SHOWN_CHARS = 200  # of a path that is refused


def find_files(link: Link, folder: Folder, pattern: str) -> tuple[FoundFile, ...]:
    """Return the files below a folder that fit a pattern, in the order of their paths.

    Raises `PreflightError` for too many, and `ProtocolError` for a path that leads out of the folder, or does not fit: the
    host must not choose what is written on this machine. A path is as the file is named there, else
    it could not be asked for: with any character but a NUL, so that `repr` or `sanitize` has to show it.
    """
    found: list[FoundFile] = []
    with link.bounded(BOOT_TIMEOUT_S):
        link.send(protocol.ListFiles(folder=folder, pattern=pattern))
        while some := link.answer(protocol.FoundFiles).files:
            for file in some[: MOST_FILES - len(found)]:
                found.append(replace(file, path=file_names.unquoted(file.path)))
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
    """Hand a file to `write`, after `begin` has got its length and where it begins.

    Return whether what was sent has been changed on the host meanwhile. Raises `PreflightError` if it isn't there.
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
    """Send a file. `begin` gets the bytes that the host has already, `add` those that were sent.

    Raises `PreflightError` if the host refuses it, and `PayloadError` if it has become shorter.
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


class Reopening:
    """A link that is opened when it is needed, and anew where the connection broke. It ends with the block of a `with`."""

    def __init__(self, open_link: Callable[[], Link]) -> None:
        self._open_link = open_link
        self._link: Link | None = None

    def link(self) -> Link:
        """Return the link. Raises what opening one raises."""
        if self._link is None:
            self._link = self._open_link()
        return self._link

    def close(self) -> None:
        """Hang up: the next `link` is a new one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Reopening:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._link is not None:
            self._link.finish()  # it ends by itself
        self.close()

    def call(self, transfer: Callable[[Link], T], done_bytes: Callable[[], int]) -> T:
        """Return what `transfer` returns; where the connection breaks, it goes on over a new one.

        Raises `ConnectionLost` when one breaks before any byte of a file has come or gone over it.
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

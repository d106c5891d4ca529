"""Receives blobs from the notebook or from another host.

Each is checked before it gets its name.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from distmagic.remote.records import found_files, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation
    from distmagic.remote.contact.blob_server import BlobServer, BlobSource, Growing

_TELL_S = 0.25  # pause between two messages about the progress


@dataclass
class BlobReceiver:
    """Receives blobs for one contact, and serves them to one other host meanwhile.

    `awaited` are the files of the payload of a job that is about to start on this host.
    """

    _notebook: Conversation
    awaited: tuple[Path, ...] = ()
    _server: BlobServer | None = None
    _files: Growing | None = None

    def check(
        self, request: protocol.CheckBlobs | protocol.OfferBlobs
    ) -> list[protocol.Blob]:
        """Answer which blobs are missing, and return them. Mark the others as recently used."""
        self.awaited += tuple(places.blob(blob.sha256) for blob in request.blobs)
        lacking = [blob for blob in request.blobs if not is_whole(blob)]
        places.touch(self.awaited)
        names = tuple(blob.sha256 for blob in lacking)
        self._notebook.say(protocol.MissingBlobs(sha256=names))
        return lacking

    def offer(self, request: protocol.OfferBlobs) -> None:
        """Answer which blobs are missing, and receive them from the notebook."""
        wanted = self.check(request)
        # All of them: the notebook sends one after the other.
        errors = [self._receive(blob) for blob in wanted]
        for error in errors:
            if error is not None:
                raise error
        places.touch(self.awaited)
        if wanted:
            self._notebook.say(protocol.MissingBlobs())

    def _receive(self, blob: protocol.Blob) -> OSError | None:
        """Receive a blob from the notebook; return why it can't be stored, if it can't."""
        try:
            with (
                read_out(self._notebook.pieces(blob.size_bytes)) as pieces,
                _arriving(blob) as arrival,
            ):
                for data in pieces:
                    arrival.write(data)
        except OSError as error:
            return error
        return None

    # ---- from host to host

    def serve(self, request: protocol.ServeBlobs) -> None:
        """Start to serve blobs to one other host, even while they still arrive on this host."""
        self.close()
        try:
            from distmagic.remote.contact import blob_server

            files = blob_server.Growing(len(request.blobs))
            if request.has_them:
                for number, blob in enumerate(request.blobs):
                    with places.blob(blob.sha256).open("rb") as file:
                        files.add(number, file.fileno(), blob.size_bytes)
            sizes = [blob.size_bytes for blob in request.blobs]
            self._server = blob_server.BlobServer(
                request.address, request.secret, files, sizes
            )
        except (ImportError, OSError) as error:
            self._notebook.say(protocol.Serving(port=0, why=str(error)))
            return
        self._files = files
        self._notebook.say(protocol.Serving(port=self._server.port))

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
        self._server = self._files = None

    def take(self, request: protocol.ReceiveBlobs) -> None:
        """Receive blobs from another host, and the rest from the notebook."""
        taking = _Taking(self._notebook, self._files, request)
        try:
            for number, blob in enumerate(request.blobs):
                taking.take(number, blob)
        except BaseException:
            self.close()
            raise
        finally:
            taking.close()
        self._notebook.say(protocol.MissingBlobs())


class _Taking:
    """Blobs on their way to this host: from `_source` if there is one, else from the notebook, and
    on to `_files`.
    """

    def __init__(
        self,
        notebook: Conversation,
        files: Growing | None,
        request: protocol.ReceiveBlobs,
    ) -> None:
        self._notebook = notebook
        self._files = files
        self._source: BlobSource | None = None
        self._why = ""  # why there is no source (any more)
        self._done_bytes = 0
        self._told_at = time.monotonic()
        if request.port:
            try:
                from distmagic.remote.contact import blob_server

                self._source = blob_server.BlobSource(
                    request.address, request.port, request.secret
                )
            except (ImportError, OSError) as error:
                self._why = _words(error)

    def close(self) -> None:
        """Close the connection."""
        if self._source is not None:
            self._source.close()
        self._source = None

    def take(self, number: int, blob: protocol.Blob) -> None:
        """Receive one blob. Raises OSError if it can't be stored."""
        with _arriving(blob) as arrival:
            if self._files is not None:
                self._files.add(number, arrival.file.fileno())
            self._take_from_host(number, arrival)
            came_from_host = arrival.size_bytes > 0
            if arrival.left_bytes:
                self._take_from_notebook(number, arrival)
            if came_from_host and not arrival.is_good:
                self._why = "what came from there was damaged"
                self.close()
                if self._files is not None:
                    # the next host has received the damaged bytes too, and notices it by the end of
                    # file
                    self._files.close()
                arrival.begin_again()
                self._take_from_notebook(number, arrival)
        self._done_bytes += blob.size_bytes

    def _take_from_host(self, number: int, arrival: _Arrival) -> None:
        if self._source is None:
            return
        pieces = self._source.pieces(arrival.left_bytes)
        while True:
            # Only errors of the source are caught: an error of this host's disk, in `_add`, ends it
            # all.
            try:
                data = next(pieces, None)
            except (OSError, EOFError) as error:
                self._why = _words(error)
                self.close()
                return
            if data is None:
                return
            self._add(number, arrival, data)

    def _take_from_notebook(self, number: int, arrival: _Arrival) -> None:
        self._notebook.say(
            protocol.NeedBlob(
                sha256=arrival.blob.sha256, offset=arrival.size_bytes, why=self._why
            )
        )
        with read_out(self._notebook.pieces(arrival.left_bytes)) as pieces:
            for data in pieces:
                self._add(number, arrival, data)

    def _add(self, number: int, arrival: _Arrival, data: bytes | memoryview) -> None:
        arrival.write(data)
        if self._files is not None:
            self._files.grow(number, arrival.size_bytes)
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            self._notebook.say(
                protocol.ReceivedBytes(size_bytes=self._done_bytes + arrival.size_bytes)
            )


class _Arrival:
    """A blob that is being received, and its file."""

    def __init__(self, blob: protocol.Blob, file: BinaryIO) -> None:
        self.blob = blob
        self.file = file
        self.begin_again()

    def begin_again(self) -> None:
        """Discard the received bytes."""
        self.file.seek(0)
        self.file.truncate()
        self.size_bytes = 0
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append to the file. Raises OSError if the disk is full."""
        self._digest.update(data)
        view = memoryview(data)
        self.size_bytes += len(view)
        while view:
            view = view[self.file.write(view) :]

    @property
    def left_bytes(self) -> int:
        """The number of bytes still to come."""
        return self.blob.size_bytes - self.size_bytes

    @property
    def is_good(self) -> bool:
        """Whether the received bytes have the announced SHA-256."""
        return self._digest.hexdigest() == self.blob.sha256


@contextmanager
def _arriving(blob: protocol.Blob) -> Iterator[_Arrival]:
    """Yield a file for a blob; it gets its name after the block.

    Raises OSError if the blob arrived damaged.
    """
    # Unbuffered: while it grows, the server reads it in order to send it to the next host.
    with atomic_write(places.blob(blob.sha256), is_buffered=False) as file:
        arrival = _Arrival(blob, file)
        yield arrival
        if not arrival.is_good:
            raise OSError("a file arrived damaged")


@contextmanager
def read_out(pieces: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
    """Read the pieces to their end even if the disk is full, because the next line of the protocol
    follows them.
    """
    try:
        yield pieces
    finally:
        for _ in pieces:
            continue


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_whole(blob: protocol.Blob) -> bool:
    """Whether a file is on this host with its full size; a power failure may leave it short or
    empty.
    """
    try:
        with places.blob(blob.sha256).open("rb") as file:
            about = os.fstat(file.fileno())
            if not places.is_private(about):
                return False  # another user could change it later
            return found_files.digest(file, 0, about.st_size) == blob.sha256
    except OSError:
        return False

"""Sends blobs from host to host: a host that has them, or is receiving them, serves them to one
other host.

Both ends get the same certificate and key over SSH, made for this delivery. They use TLS 1.3, and
each end continues only if the other has that certificate, before any byte of a blob is sent. Then
only the server sends:

    4 bytes, big-endian: how many bytes follow; 0: nothing new yet, but the server is alive

The blobs are sent in an order that both ends know. The receiver checks their SHA-256, and requests
them from the notebook if anything is wrong, so no transfer is retried.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress

from distmagic.remote.contact.mutual_tls import (
    HANDSHAKE_S,
    Handshakes,
    check_peer,
    context,
)
from distmagic.remote.system import threads
from distmagic.remote.system.facts import family_of
from distmagic.remote.wire.protocol import Secret

CONNECT_S = 2.0
ALONE_S = 30.0  # a server stops after this time without a connection
STALL_S = 5.0  # a server that sends nothing for so long counts as dead
_SLOW_S = 30.0  # time limit for a receiver to take data
_ALIVE_S = 1.0  # pause between two signs of life
_BACKLOG = 128
_TICK_S = 0.1
FRAME_BYTES = 1 << 18
_HEAD = struct.Struct(">I")


class Growing:
    """Files, in order, that one thread reads while another is still writing them."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._files: list[int | None] = [None] * count
        self._ready = [0] * count
        self._is_over = False

    def add(self, number: int, descriptor: int, ready_bytes: int = 0) -> None:
        """Add a file of which so many bytes are ready. The descriptor stays the caller's."""
        with self._changed:
            if not self._is_over and self._files[number] is None:
                self._files[number] = os.dup(descriptor)
                self._ready[number] = ready_bytes
                self._changed.notify_all()

    def grow(self, number: int, ready_bytes: int) -> None:
        """Record that so many bytes of a file are ready."""
        with self._changed:
            self._ready[number] = max(ready_bytes, self._ready[number])
            self._changed.notify_all()

    def read(self, number: int, offset: int, timeout_s: float) -> bytes:
        """Return some bytes from `offset` on, b"" if there are none within `timeout_s`.

        Raises EOFError if none will come.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._ready[number] > offset, timeout_s
            )
            file = self._files[number]
            ready = self._ready[number]
            if self._is_over:
                raise EOFError
            if file is None or ready <= offset:
                return b""
            data = os.pread(file, min(ready - offset, FRAME_BYTES), offset)
        if not data:
            raise EOFError  # the file has been truncated
        return data

    def close(self) -> None:
        """Close the files; a waiting `read` raises EOFError."""
        with self._changed:
            self._is_over = True
            for file in self._files:
                if file is not None:
                    os.close(file)
            self._files = [None] * len(self._files)
            self._changed.notify_all()


class BlobServer:
    """Serves growing files to the first peer that has the secret, on its own thread, until `close`.

    It listens only on `address`, and only until that peer has connected. `sizes` are the files'
    bytes.
    """

    def __init__(
        self, address: str, secret: Secret, files: Growing, sizes: Sequence[int]
    ) -> None:
        self._secret = secret
        self._files = files
        self._sizes = sizes
        self._context = context(secret, is_server=True)
        self._is_over = threading.Event()
        # The socket below TLS, for `close`: a TLS socket may be used by one thread only.
        self._raw: socket.socket | None = None
        self._listener = socket.create_server(
            (address, 0), family=family_of(address), backlog=_BACKLOG
        )
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threads.begin("spread", self._run)

    def close(self) -> None:
        """Stop at once; return when no port is open and no connection is left."""
        self._is_over.set()
        self._files.close()
        if self._raw is not None:
            with suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._listener:
                taker = self._meet()
            if taker is not None:
                with taker, self._raw or nullcontext():
                    taker.settimeout(_SLOW_S)
                    for number, size in enumerate(self._sizes):
                        offset = 0
                        while offset < size:
                            data = self._files.read(number, offset, _ALIVE_S)
                            taker.sendall(_HEAD.pack(len(data)) + data)
                            offset += len(data)
                    # The receiver closes when it has all: closing earlier could discard data on its
                    # way.
                    taker.recv(1)
        except (OSError, EOFError):
            # The receiver is gone, or there is no more data: it turns to the notebook.
            return
        finally:
            self._files.close()

    def _meet(self) -> ssl.SSLSocket | None:
        """Return the connection of the host that has the secret; None if it did not come."""
        handshakes = Handshakes(self._listener, self._context, self._secret)
        try:
            give_up = time.monotonic() + ALONE_S
            while not self._is_over.is_set() and time.monotonic() < give_up:
                found = handshakes.look(_TICK_S)
                if found is not None:
                    self._raw = socket.socket(fileno=os.dup(found.fileno()))
                    return found
            return None
        finally:
            handshakes.close()


class BlobSource:
    """The receiver's end of a connection to a `BlobServer`.

    It blocks for a few seconds without checking the notebook: a server whose notebook is gone
    closes, or falls silent.
    """

    def __init__(self, address: str, port: int, secret: Secret) -> None:
        """Connect. Raises OSError; SSLError for a server without the secret."""
        tls = context(secret, is_server=False)
        plain = socket.create_connection((address, port), timeout=CONNECT_S)
        with ExitStack() as undo:
            undo.enter_context(plain)
            plain.settimeout(HANDSHAKE_S)
            self._tls = undo.enter_context(tls.wrap_socket(plain))
            check_peer(self._tls, secret)
            undo.pop_all()
        self._tls.settimeout(STALL_S)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes; each piece is valid until the next is requested.

        Raises OSError, or EOFError, as soon as the server violates the protocol.
        """
        head = memoryview(bytearray(_HEAD.size))
        data = memoryview(bytearray(FRAME_BYTES))
        while size:
            self._fill(head)
            (length,) = _HEAD.unpack(head)
            if length > min(size, FRAME_BYTES):
                raise OSError("more came than was expected")
            self._fill(data[:length])
            size -= length
            if length:
                yield data[:length]

    def _fill(self, view: memoryview) -> None:
        while view:
            got = self._tls.recv_into(view)
            if not got:
                raise EOFError("it hung up")
            view = view[got:]

    def close(self) -> None:
        """Close the connection."""
        self._tls.close()

"""A TLS connection that is used in one direction: after its first message only one end sends.

One direction needs one thread at each end: Python's TLS sockets may not be read and written at the
same time.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any

LONGEST = 1 << 20  # bytes of a message, or of a piece of a stream
# A letter for the kind, and the number of bytes that follow.
_HEAD = struct.Struct(">cI")
_MESSAGE = b"m"
# A broken network is noticed by a sender from missing acknowledgements, and by a reader from
# keep-alives: after 2 s of silence, 3 probes without an answer.
_TCP_OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_USER_TIMEOUT", 6000),
    ("TCP_KEEPIDLE", 2),
    ("TCP_KEEPINTVL", 2),
    ("TCP_KEEPCNT", 3),
)


ChannelMessage = dict[str, Any]


class Channel:
    """One connection. `close`, from any thread, makes a blocked call of another thread return."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls
        # The socket below TLS, for `close`: a TLS socket may be used by one thread only.
        self._raw = socket.socket(fileno=os.dup(tls.fileno()))
        self._using = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        tls.setblocking(True)
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS:
            self._raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def tell(self, **words: Any) -> None:
        """Send a message. Raises OSError if the other end is gone, ValueError for one that it would
        reject.
        """
        data = json.dumps(words).encode()
        if len(data) > LONGEST:
            raise ValueError(f"a message of {len(data)} bytes is too long")
        self.send(_MESSAGE, data)

    def hear(self, timeout_s: float | None = None) -> ChannelMessage | None:
        """Return the next message; None at the end of the connection.

        Raises OSError, and ValueError for an invalid one.
        """
        kind, data = self.receive(timeout_s)
        if kind != _MESSAGE:
            return None
        found: ChannelMessage = json.loads(data)
        return found

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send bytes of one kind, a letter, in pieces. Raises OSError if the other end is gone."""
        with self._using:
            for start in range(0, len(data) or 1, LONGEST):
                piece = data[start : start + LONGEST]
                self._tls.sendall(_HEAD.pack(kind, len(piece)) + piece)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """Return (kind, bytes) of the next data, (b"", b"") at the end of the connection.

        Raises OSError.
        """
        with self._using:
            if self._is_closed:
                return b"", b""
            self._tls.settimeout(timeout_s)
            head = self._exactly(_HEAD.size)
            if len(head) < _HEAD.size:
                return b"", b""
            kind, size = _HEAD.unpack(head)
            if size > LONGEST:
                raise OSError("a piece is larger than any is sent")
            data = self._exactly(size)
            self._tls.settimeout(None)
        return (kind, data) if len(data) == size else (b"", b"")

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        with suppress(ssl.SSLEOFError):
            while len(data) < size and (more := self._tls.recv(size - len(data))):
                data += more
        return bytes(data)

    def close(self) -> None:
        """Close the connection. Data already sent still arrives. Safe to call twice."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            with suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)
            self._raw.close()
        with self._using:
            self._tls.close()

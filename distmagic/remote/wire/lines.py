"""Bytes from a pipe, cut into lines and blocks. No reading in here: both halves feed it what they read."""

from __future__ import annotations

from distmagic.remote.wire.protocol import MAX_LINE_BYTES, BadLine


class Lines:
    """A buffer: bytes go in, whole lines or exact numbers of bytes come out."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._data += data

    def line(self) -> bytes | None:
        """Return the next line without its newline, None if it isn't whole yet. Raises `BadLine` if too long."""
        end = self._data.find(b"\n", self._searched)
        if (len(self._data) if end < 0 else end) > MAX_LINE_BYTES:
            raise BadLine(f"a line of more than {MAX_LINE_BYTES} bytes")
        if end < 0:
            self._searched = len(self._data)
            return None
        line = self.take(end)
        del self._data[:1]
        return line

    def take(self, size: int) -> bytes:
        """Return the next bytes, at most `size`."""
        part = bytes(self._data[:size])
        del self._data[:size]
        self._searched = 0
        return part

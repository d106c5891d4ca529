"""Splits bytes from a pipe into lines and blocks.

It does not read: its callers pass it the bytes.
"""

from __future__ import annotations

from distmagic.remote.wire.protocol import MAX_LINE_BYTES, BadLine


class Lines:
    """A buffer: bytes are added, complete lines or exact numbers of bytes are taken out."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Append bytes."""
        self._data += data

    def line(self) -> bytes | None:
        """Return the next line without its newline, None if it is incomplete.

        Raises `BadLine` if it is too long.
        """
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

"""The user's ssh agent: lists its keys, and makes signatures with them. Does not use paramiko.

An agent may be gone, hang, or be another program: then `trouble` has the error, and it has no keys.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from distmagic.transports.ssh.public_keys import join_strings, take_strings

_LIST, _LISTED, _SIGN, _SIGNED = b"\x0b", b"\x0c", b"\x0d", b"\x0e"
_MOST_BYTES = 1 << 18  # of an answer, as OpenSSH has it


class KeyAgent:
    """A client of the ssh agent at the socket `path`; `path` is None without an agent.

    `is_signing`: the agent has received a request to sign and has not answered. `trouble` is the
    agent's error.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.is_signing = False
        self.trouble = ""
        self._stream: socket.socket | None = None

    def keys(self, timeout_s: float) -> tuple[tuple[bytes, str], ...]:
        """Return the public half and the comment of each of its keys, in its order.

        Raises OSError only if this process may open no more files.
        """
        if self.path is None:
            return ()
        self.close()
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream.settimeout(max(timeout_s, 0.01))
        self.trouble = ""
        try:
            self._stream.connect(self.path)
            answer = self._ask(_LIST, _LISTED)
            (count,) = struct.unpack(">I", answer[:4])
            strings = take_strings(answer[4:], 2 * count)
        except TimeoutError:
            self.trouble = f"no answer within {timeout_s:.3g} s"
        except OSError as error:
            self.trouble = error.strerror or str(error)
        except (ValueError, struct.error):
            self.trouble = "the agent did not list its keys"
        else:
            self._stream.settimeout(None)  # the user may have to confirm the signature
            return tuple(
                (blob, comment.decode(errors="replace"))
                for blob, comment in zip(strings[::2], strings[1::2], strict=True)
            )
        self.close()
        return ()

    def sign(self, blob: bytes, data: bytes, flags: int) -> bytes:
        """Return its signature, b"" if it refuses (it is locked, or the user declined) or is closed
        meanwhile.
        """
        request = _SIGN + join_strings(blob, data) + struct.pack(">I", flags)
        try:
            self.is_signing = True
            answer = self._ask(request, _SIGNED)
            self.is_signing = False
            return take_strings(answer, 1)[0]
        except ValueError:  # it has already answered
            self.is_signing = False
            return b""
        except OSError:
            return b""

    def _ask(self, request: bytes, expected: bytes) -> bytes:
        """Return its answer without the first byte.

        Raises `ValueError` for an unexpected answer, and OSError.
        """
        stream = self._stream
        if stream is None:
            raise ConnectionResetError
        stream.sendall(join_strings(request))
        with stream.makefile("rb") as answers:
            head = answers.read(4)
            size = int.from_bytes(head, "big")
            answer = answers.read(size) if size <= _MOST_BYTES else b""
        if not head:
            raise ConnectionResetError(0, "it hung up")
        if len(answer) < size or answer[:1] != expected:
            raise ValueError
        return answer[1:]

    def close(self) -> None:
        """Close the connection; a blocked call returns. Safe to call twice."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):
                # `close` alone would not wake a blocked reader.
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

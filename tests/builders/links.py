"""A host that is a script of bytes: what a link reads from it, and what was written to it."""

from __future__ import annotations

import json
import sys
import threading

from distmagic.errors import ConnectionLost
from distmagic.remote.contact import boot
from distmagic.remote.wire import protocol as p
from distmagic.request.hosts import Host
from tests.lab.waiting import HANG_S

HOST = Host(name="gpu-a")


class FakeProcess:
    """A process whose stdout is a script of pieces; `hang` blocks at its end until it is closed."""

    def __init__(
        self,
        *pieces: bytes,
        code: int | None = 0,
        stderr: str = "",
        hang: bool = False,
        deaf: bool = False,
    ) -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.code, self.said, self.hang, self.deaf = code, stderr, hang, deaf
        self.written = b""
        self.is_closed = threading.Event()
        self.has_stdin = True

    def write(self, data: bytes) -> None:
        if self.deaf:
            raise ConnectionLost("gpu-a: the other end is gone.")
        self.written += data

    def read(self, max_bytes: int = 65536) -> bytes:
        if not self.pieces:
            if self.hang:
                assert self.is_closed.wait(HANG_S)
            return b""
        piece = self.pieces.pop(0)
        if len(piece) > max_bytes:
            self.pieces.insert(0, piece[max_bytes:])
        return piece[:max_bytes]

    def stderr(self) -> str:
        return self.said

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self.code

    def close_stdin(self) -> None:
        self.has_stdin = False

    def close(self) -> None:
        self.is_closed.set()

    @property
    def requests(self) -> list[p.Message]:
        return [p.decode(line)[1] for line in self.written.splitlines()]


class FakeTransport:
    warnings = ()

    def __init__(self, process: FakeProcess) -> None:
        self.process = process
        self.argv: tuple[str, ...] = ()

    def start(self, argv: tuple[str, ...]) -> FakeProcess:
        self.argv = argv
        return self.process

    def close(self) -> None:
        return


def reply(**changes: object) -> bytes:
    said = {"python": list(sys.version_info[:3]), "home": "/home/me/.distmagic", "have": True, "error": "",
            "executable": "/usr/bin/python3", "system": "linux", **changes}  # fmt: skip
    return boot.MARK + json.dumps(said).encode() + b"\n"


def lines(*messages: p.Message, first: int = 0) -> bytes:
    return b"".join(
        p.encode(message, first + i if first else 0)
        for i, message in enumerate(messages)
    )

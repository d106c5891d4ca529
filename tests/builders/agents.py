"""An ssh agent whose answers a test writes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scripted_agent(path: Path, *answers: bytes) -> Iterator[str]:
    """An agent that gives each connection these answers, one a request, and then stays silent."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(5)
    kept = [listener]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = listener.accept()
                kept.append(stream)
                for answer in answers:
                    stream.recv(4096)
                    stream.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        for stream in kept:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        for stream in kept:
            stream.close()

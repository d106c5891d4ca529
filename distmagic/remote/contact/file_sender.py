"""Sends files that ranks left in a job's working directory; ranks may write to them meanwhile."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Protocol

from distmagic.remote.records import found_files
from distmagic.remote.wire import protocol

_FILES_A_MESSAGE = 500


class Notebook(Protocol):
    """The conversation with the notebook, as far as it is needed here."""

    def say(self, message: protocol.Message) -> None:
        """Send it a message."""

    def write(self, data: bytes) -> None:
        """Send it bytes that a message has announced."""


def send_list(notebook: Notebook, folder: Path, pattern: str) -> None:
    """Send which files below a folder fit a pattern. Raises ValueError for too many."""
    files = found_files.find(folder, pattern)
    for start in range(0, len(files), _FILES_A_MESSAGE):
        notebook.say(
            protocol.FoundFiles(files=tuple(files[start : start + _FILES_A_MESSAGE]))
        )
    notebook.say(protocol.FoundFiles())


def send_file(notebook: Notebook, folder: Path, request: protocol.ReadFile) -> None:
    """Send a file as long as it is now, without what the notebook has of it. Raises OSError and ValueError."""
    with found_files.opened(folder, request.path) as file:
        before = os.fstat(file.fileno())
        offset = 0
        if 0 < request.size_bytes <= before.st_size:
            is_same = found_files.digest(file, 0, request.size_bytes) == request.sha256
            offset = request.size_bytes if is_same else 0
        notebook.say(protocol.FileBegins(size_bytes=before.st_size, offset=offset))
        sent = hashlib.sha256()
        for data in found_files.pieces(file, offset, before.st_size):
            sent.update(data)
            notebook.say(protocol.Data(size_bytes=len(data)))
            notebook.write(data)
        has_changed = _has_changed(file, offset, before, sent.hexdigest())
        notebook.say(protocol.FileEnds(has_changed=has_changed))


def _has_changed(
    file: BinaryIO, offset: int, before: os.stat_result, sha256: str
) -> bool:
    """Whether what was sent, from `offset` on, is not in the file any more. What was added to its end does no harm."""
    after = os.fstat(file.fileno())
    if (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size):
        return False
    return found_files.digest(file, offset, before.st_size) != sha256

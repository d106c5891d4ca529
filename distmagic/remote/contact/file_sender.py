"""Sends the notebook files that are kept here: logs and results of jobs, and blobs."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, BinaryIO

from distmagic.remote.records import expiry, logs, places
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation

_CHUNK = 1 << 20


class FileSender:
    """What one contact sends of jobs and blobs."""

    def __init__(self, notebook: Conversation) -> None:
        self._notebook = notebook

    def send_job_file(self, request: protocol.GetFile) -> None:
        """Send a file of a job."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        with contextlib.ExitStack() as stack:
            parts = []
            # A name with / in it would lead elsewhere.
            if request.name == path.name and path.parent.is_dir():
                parts = logs.open_all(path, stack)
            if not parts:
                raise FileNotFoundError(
                    f"{request.name} of job {request.job} is not on this host (any more)"
                )
            total = sum(size for _, size in parts)
            skip = min(request.offset, total)
            if request.most_bytes is not None:
                skip = max(skip, total - request.most_bytes)
            self._notebook.say(
                protocol.Data(size_bytes=total - skip, skipped_bytes=skip)
            )
            for file, size in parts:
                begin = min(skip, size)
                self._send_part(file, begin, size)
                skip -= begin

    def note_taken(self, request: protocol.ResultTaken) -> None:
        """Note that a notebook has a result. What it was only sent may have been lost on the way."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        if request.name == path.name and path.suffix == ".result" and path.exists():
            expiry.mark_fetched(path)

    def _send_part(self, file: BinaryIO, at: int, end: int) -> None:
        file.seek(at)
        while at < end:
            data = file.read(min(end - at, _CHUNK))
            if not data:
                return
            at += len(data)
            self._notebook.write(data)

    def send_blob(self, request: protocol.GetBlob) -> None:
        """Send a blob, for a host that comes to a job later."""
        path = places.blob(request.sha256)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._notebook.say(protocol.Data(size_bytes=size))
            self._send_part(file, 0, size)

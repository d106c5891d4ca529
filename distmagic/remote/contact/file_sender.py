"""Sends the notebook files that are kept here: logs and results of jobs, and blobs."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from distmagic.remote.records import expiry, found_files, logs, places
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation


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
                for data in found_files.pieces(file, begin, size):
                    self._notebook.write(data)
                skip -= begin

    def note_taken(self, request: protocol.ResultTaken) -> None:
        """Note that a notebook has a result. What it was only sent may have been lost on the way."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        if request.name == path.name and path.suffix == ".result" and path.exists():
            expiry.mark_fetched(path)

    def send_blob(self, request: protocol.GetBlob) -> None:
        """Send a blob, for a host that comes to a job later."""
        path = places.blob(request.sha256)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._notebook.say(protocol.Data(size_bytes=size))
            for data in found_files.pieces(file, 0, size):
                self._notebook.write(data)

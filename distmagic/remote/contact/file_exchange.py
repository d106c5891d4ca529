"""Lists, sends and receives files of the user, to which ranks may write meanwhile; sends logs,
results and blobs.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import socket
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distmagic.remote.contact.blob_receiver import is_whole, read_out
from distmagic.remote.records import (
    brought_files,
    expiry,
    found_files,
    listing,
    logs,
    places,
)
from distmagic.remote.records.atomic_file import on_disk, resumed_write
from distmagic.remote.wire import file_names, protocol
from distmagic.remote.wire.protocol import FileBegins, FileEnds, Folder

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation

_FILES_A_MESSAGE = 50  # a line has a size limit, and names may be long


@dataclass(frozen=True)
class FileExchange:
    """The file requests of one contact. The umask is the user's."""

    _notebook: Conversation
    _umask: int

    def list(self, request: protocol.ListFiles) -> None:
        """Send the files below a folder that match a pattern.

        Raises OSError, and ValueError for too many.
        """
        found = [
            replace(file, path=file_names.quoted(file.path))
            for file in found_files.find(_place(request.folder), request.pattern)
        ]
        for start in range(0, len(found), _FILES_A_MESSAGE):
            some = tuple(found[start : start + _FILES_A_MESSAGE])
            self._notebook.say(protocol.FoundFiles(files=some))
        self._notebook.say(protocol.FoundFiles())

    def send(self, request: protocol.ReadFile) -> None:
        """Send a file with its current length, without the part that the notebook has.

        Raises OSError and ValueError.
        """
        path = file_names.unquoted(request.path)
        with found_files.opened(_place(request.folder), path) as file:
            before = os.fstat(file.fileno())
            offset = 0
            sent = hashlib.sha256()  # digest of all that the notebook then has
            if 0 < request.size_bytes <= before.st_size:
                for data in found_files.pieces(file, 0, request.size_bytes):
                    sent.update(data)
                if sent.hexdigest() == request.sha256:
                    offset = request.size_bytes
                else:
                    sent = hashlib.sha256()
            self._notebook.say(FileBegins(size_bytes=before.st_size, offset=offset))
            for data in found_files.pieces(file, offset, before.st_size):
                sent.update(data)
                self._notebook.say(protocol.Data(size_bytes=len(data)))
                self._notebook.write(data)
            # Not by its date, which a write to mapped memory changes earlier or later. Text
            # appended meanwhile does no harm.
            now = found_files.digest(file, 0, before.st_size)
            has_changed = now != sent.hexdigest()
            self._notebook.say(FileEnds(has_changed=has_changed))

    def receive(self, request: protocol.WriteFile) -> None:
        """Receive the missing part of a file, and give it its name when it is complete.

        Raises OSError, and ValueError for a file that changed while it was sent.
        """
        path = file_names.unquoted(request.path)
        target = os.path.join(_place(request.folder), path)
        if os.path.isdir(target):
            raise IsADirectoryError(f"{target} is a folder")
        have = request.size_bytes
        if found_files.digest_of(target, have) == request.sha256:
            self._notebook.say(FileBegins(size_bytes=have, offset=have))
            self._notebook.say(FileEnds())
            return
        above = os.path.dirname(target)
        os.makedirs(above, exist_ok=True)
        # Of this host alone: others that share the folder may not see its lock.
        key = f"{socket.gethostname()} {request.sha256}"
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        half = Path(above, f".distmagic-{name}.part")
        with resumed_write(half, 0o600) as (file, part):
            # Append the missing part. The notebook sends all of it, even if the disk is full.
            have = min(os.fstat(file.fileno()).st_size, request.size_bytes)
            if request.size_bytes - have > shutil.disk_usage(file.fileno()).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.truncate(have)
            file.seek(have)
            self._notebook.say(FileBegins(size_bytes=request.size_bytes, offset=have))
            with read_out(self._notebook.pieces(request.size_bytes - have)) as pieces:
                for data in pieces:
                    file.write(data)
                    file.flush()
            if found_files.digest(file, 0, request.size_bytes) != request.sha256:
                part.unlink()
                raise ValueError(f"{path[:200]!r} has changed while it was sent")
            on_disk(file)
            part.chmod(self._mode(request.mode))
            part.replace(target)
        self._notebook.say(FileEnds())

    def compare(self, request: protocol.CompareFiles) -> None:
        """Send which files differ by size, last change or permissions, without reading them.

        Raises OSError for an unknown home, and ValueError for a malformed request.
        """
        folder = _place(request.folder)
        differing = []
        roots = set()
        for index, line in enumerate(request.files):
            size_bytes, changed_ns, mode, quoted = line.split(" ")
            path = file_names.unquoted(quoted)
            wanted = int(size_bytes), self._mode(int(mode)), int(changed_ns)
            if brought_files.has_look(f"{folder}/{path}", *wanted):
                roots.add(path.partition("/")[0])
            else:
                differing.append(index)
        for root in roots:
            brought_files.share(os.path.join(folder, root), request.owner)
        self._notebook.say(protocol.DifferingFiles(indexes=tuple(differing)))

    def place(self, request: protocol.PlaceFiles) -> None:
        """Turn blobs into files, and send those that are missing. Raises OSError."""
        folder = _place(request.folder)
        lacking = []
        placed = []
        left = Counter(file.blob.sha256 for file in request.files)
        for file in request.files:
            sha256, path = file.blob.sha256, file_names.unquoted(file.path)
            target = os.path.join(folder, path)
            mode = self._mode(file.mode)
            left[sha256] -= 1
            if found_files.digest_of(target, file.blob.size_bytes) != sha256:
                if os.path.isdir(target):
                    raise IsADirectoryError(f"{target} is a folder")
                if not is_whole(file.blob):
                    lacking.append(sha256)
                    continue
                try:
                    brought_files.place(sha256, target, mode, keeps=left[sha256] > 0)
                except FileNotFoundError:
                    # A host with the same home has just taken it.
                    lacking.append(sha256)
                    continue
            if file.changed_ns is not None:
                brought_files.set_look(target, mode, file.changed_ns)
            placed.append(path)
        brought_files.note(folder, placed, request.origin, request.owner)
        self._notebook.say(protocol.MissingBlobs(sha256=tuple(lacking)))

    def _mode(self, wanted: int) -> int:
        """Return the permissions of a copy: its owner can always change it."""
        return (0o600 | wanted) & 0o777 & ~self._umask

    # ---- files of jobs, and blobs

    def send_job_file(self, request: protocol.GetFile) -> None:
        """Send a file of a job."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        with ExitStack() as stack:
            parts = []
            # A name with / in it would lead outside.
            if request.name == path.name and path.parent.is_dir():
                parts = logs.open_all(path, stack)
            if not parts:
                raise FileNotFoundError(
                    f"{request.name} of job {request.job} is not on this host (any more)"
                )
            if request.begin or request.end is not None:
                end = logs.end(path) if request.end is None else request.end
                part = logs.read(path, request.begin, max(0, end - request.begin))
                parts = [(io.BytesIO(part), len(part))]
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
        """Record that a notebook has received a result.

        A result that was only sent may have been lost on its way.
        """
        path = places.job_dir(request.job, request.node_rank) / request.name
        if request.name == path.name and path.suffix == ".result" and path.exists():
            expiry.mark_fetched(path)

    def send_blob(self, request: protocol.GetBlob) -> None:
        """Send a blob, for a host that joins a job later."""
        path = places.blob(request.sha256)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._notebook.say(protocol.Data(size_bytes=size))
            for data in found_files.pieces(file, 0, size):
                self._notebook.write(data)


def _place(folder: Folder) -> str:
    """Return the path of a folder.

    Raises OSError for a job without files on this host, and for an unknown home.
    """
    if folder.job:
        return listing.work_dir(folder.job, folder.node_rank)
    home, path = os.path.expanduser("~"), os.path.expanduser(folder.path)
    # Python leaves `~name` of an unknown user unchanged; a folder of that name invites `rm -rf ~`.
    if home.startswith("~") or path.startswith("~"):
        raise FileNotFoundError(f"{path}: this host has no such home directory")
    return os.path.join(home, path)

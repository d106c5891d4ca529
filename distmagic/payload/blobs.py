"""Content-addressed files on this machine, for sending to hosts."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from distmagic.errors import PayloadError
from distmagic.remote.frozen import frozen
from distmagic.remote.records import places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.system import threads
from distmagic.remote.wire.protocol import Blob

_TOUCH_S = 30.0  # pause between two touches of files in use


@frozen
class LocalBlob:
    """A content-addressed file on this machine.

    `is_users`: a file of the user, which is only read.
    """

    blob: Blob
    path: Path
    is_users: bool = False


def folder() -> Path:
    """Return this machine's folder of blobs, whose size `expiry.expire` limits.

    Raises `PayloadError`.
    """
    try:
        found = places.make_private(places.home() / "blobs")
        if not os.access(found, os.W_OK):
            raise PermissionError(f"{found} is not writable")
    except OSError as error:
        raise PayloadError(
            f"The payload can't be written on this machine: {error}.",
            "Set DISTMAGIC_HOME to a directory of yours that can be written.",
        ) from None
    return found


def keep(data: bytes, where: Path) -> LocalBlob:
    """Write `data` to a file in the folder `where`, named by its SHA-256. Raises OSError."""
    blob = Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    with atomic_write(where / blob.sha256) as file:
        file.write(data)
    return LocalBlob(blob=blob, path=where / blob.sha256)


@contextmanager
def in_use(files: Sequence[LocalBlob]) -> Iterator[None]:
    """Inside the block, touch files of this machine every 30 s, so that no cleanup removes them."""
    is_over = threading.Event()
    ours = [local.path for local in files if not local.is_users]

    def touch() -> None:
        while not is_over.wait(_TOUCH_S):
            places.touch(ours)

    threads.begin("touch", touch)
    try:
        yield
    finally:
        is_over.set()


def receive(
    local: LocalBlob, pull: Callable[[Callable[[bytes], object]], object]
) -> None:
    """Receive a file; `pull` writes its bytes. Raises OSError if it arrives damaged."""
    digest = hashlib.sha256()

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    with atomic_write(local.path) as file:
        pull(write)
        if digest.hexdigest() != local.blob.sha256:
            raise OSError("a file arrived damaged")


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a zip of `files`, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()

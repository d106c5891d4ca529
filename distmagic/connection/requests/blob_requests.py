"""Requests to a host about files of a payload: receive those that it lacks, or send one that it
has.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.connection.link import Link
from distmagic.errors import ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Blob


def deliver(
    link: Link,
    blobs: tuple[LocalBlob, ...],
    tell: Callable[[int, int], object] = lambda *_: None,
) -> int:
    """Send the host the files that it lacks; return the bytes sent.

    `tell` is called with (bytes so far, total).
    """
    link.send(protocol.OfferBlobs(blobs=tuple(local.blob for local in blobs)))
    wanted = link.answer(protocol.MissingBlobs).sha256
    sending = [local for local in blobs if local.blob.sha256 in wanted]
    total = sum(local.blob.size_bytes for local in sending)
    sent = 0
    tell(sent, total)
    for local in sending:
        for size in link.pour(local):
            sent += size
            tell(sent, total)
    if sending:
        link.answer(protocol.MissingBlobs)
    return total


def fetch_blob(link: Link, blob: Blob, write: Callable[[bytes], object]) -> None:
    """Fetch a blob from the host, and pass its bytes to `write`, piece by piece.

    Raises `PreflightError` if the host does not have the blob. Raises `ProtocolError`, and closes
    the link, if the blob has another size on the host.
    """
    link.send(protocol.GetBlob(sha256=blob.sha256))
    size = link.answer(protocol.Data).size_bytes
    if size != blob.size_bytes:
        link.close()
        raise ProtocolError(
            f"{link.host.name}: a file is {size:,} bytes long, and should be {blob.size_bytes:,}."
        )
    link.take(size, write)

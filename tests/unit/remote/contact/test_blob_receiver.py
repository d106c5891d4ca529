"""Which blobs a host lacks."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import pytest

from distmagic.remote.contact.blob_receiver import BlobReceiver
from distmagic.remote.records import places
from distmagic.remote.wire import protocol as p

DATA = [b"%d" % number for number in range(9)]
BLOBS = tuple(
    p.Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    for data in DATA
)


class Notebook:
    """Sends the blobs that are missing. After each, the host loses the blobs `lost`."""

    def __init__(self, *lost: p.Blob) -> None:
        self.lost = lost
        self.missing: list[tuple[str, ...]] = []
        self.left: list[bytes] = []

    def say(self, message: p.MissingBlobs) -> None:
        self.missing.append(message.sha256)
        self.left = [
            data
            for data, blob in zip(DATA, BLOBS, strict=True)
            if blob.sha256 in message.sha256
        ]

    def pieces(self, _: int) -> Any:
        yield self.left.pop(0)
        for blob in self.lost:
            places.blob(blob.sha256).unlink(missing_ok=True)


@pytest.fixture
def notebook(home) -> Notebook:
    """Return a notebook whose host has all blobs but two."""
    places.make_private(home / "blobs")
    for blob, data in list(zip(BLOBS, DATA, strict=True))[:-2]:
        path = places.blob(blob.sha256)
        path.write_bytes(data)
        path.chmod(0o600)
    return Notebook()


def receiver(notebook: Notebook) -> BlobReceiver:
    return BlobReceiver(cast(Any, notebook))


def test_each_blob_is_looked_at_once(notebook, monkeypatch):
    """Comparing each with each takes seconds for ten thousand files."""
    compared: list[object] = []
    monkeypatch.setattr(p.Blob, "__eq__", lambda *_: bool(compared.append(_)))
    lacking = receiver(notebook).check(p.CheckBlobs(blobs=BLOBS))
    assert [id(blob) for blob in lacking] == [id(blob) for blob in BLOBS[-2:]]
    assert compared == []


def test_a_blob_that_vanishes_while_others_come_is_no_error_of_these(notebook):
    notebook.lost = BLOBS[:1]
    receiver(notebook).offer(p.OfferBlobs(blobs=BLOBS))
    assert notebook.missing == [tuple(blob.sha256 for blob in BLOBS[-2:]), ()]
    assert places.blob(BLOBS[-1].sha256).read_bytes() == DATA[-1]

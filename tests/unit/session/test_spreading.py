"""Files of this machine that go to all hosts: their names there, and how many go at once; the hosts are real contacts here."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.errors import UsageError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import file_names, protocol
from distmagic.session import spreading
from distmagic.session.spreading import batches, named_files
from tests.builders.hosts import FakeHost, after, reach


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_folders_of_one_name_become_one(tmp_path):
    a = write(tmp_path / "gpu-a" / "ck", rank0="0", meta="m")
    b = write(tmp_path / "gpu-b" / "ck", rank1="1", meta="m")
    assert named_files([a, b]) == {
        "ck/meta": a / "meta",
        "ck/rank0": a / "rank0",
        "ck/rank1": b / "rank1",
    }


def test_two_files_that_differ_get_no_common_name(tmp_path, golden):
    a = write(tmp_path / "gpu-a" / "ck", log="of a")
    b = write(tmp_path / "gpu-b" / "ck", log="of b")
    with pytest.raises(UsageError) as raised:
        named_files([a, b])
    golden(str(raised.value).replace(str(tmp_path), "/here"))


def test_a_batch_is_full_by_its_bytes_or_by_its_list_and_never_empty(monkeypatch):
    sizes = {
        Path(name): size
        for name, size in zip("abcdef", (3, 9, 1, 1, 1, 1), strict=True)
    }
    monkeypatch.setattr(spreading, "_BATCH_BYTES", 8)
    monkeypatch.setattr(spreading, "_LIST_BYTES", 3 * (1 + spreading._ENTRY_BYTES))
    files = {str(path): path for path in sizes}
    found = ["".join(batch) for batch in batches(files, sizes.__getitem__)]
    assert found == ["a", "b", "cde", "f"]
    assert list(batches({}, sizes.__getitem__)) == []


def test_a_host_may_read_a_large_file_for_longer_than_it_may_be_silent(
    tmp_path, monkeypatch
):
    """It compares the SHA-256 of the whole file, with whatever is there already."""

    def of_19_gb(path: Path) -> LocalBlob:
        blob = protocol.Blob(sha256="a" * 64, size_bytes=19 << 30)
        return LocalBlob(blob=blob, path=path, is_users=True)

    host = FakeHost("gpu-a")
    host.answers[protocol.PlaceFiles] = after(120.0, protocol.MissingBlobs())
    monkeypatch.setattr(spreading, "local_file", of_19_gb)
    source = write(tmp_path, model="weights") / "model"
    assert spreading.put(reach(host), [source], "there") == (1, 7)
    assert len(host.requests_of(protocol.PlaceFiles)) == 1


def test_the_list_of_a_batch_fits_into_one_message():
    """Whatever the names are: the longest that a file system takes, each byte quoted."""
    files = {f"{number:05}{chr(0xE000) * 83}": Path() for number in range(4000)}
    blob = protocol.Blob(sha256="f" * 64, size_bytes=256 << 20)
    for batch in batches(files, lambda _: 1):
        request = protocol.PlaceFiles(
            folder=protocol.Folder(path="~"),
            files=tuple(
                protocol.PlacedFile(path=file_names.quoted(name), blob=blob, mode=0o600)
                for name in batch
            ),
        )
        assert len(protocol.encode(request)) < protocol.MAX_LINE_BYTES

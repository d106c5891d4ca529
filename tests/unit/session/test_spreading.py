"""Files of this machine that go to all hosts: their names there, and how many go at once; the hosts are real contacts here."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from distmagic.connection.requests.remote_files import SourceFile
from distmagic.errors import PayloadError, UsageError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.session import spreading
from distmagic.session.spreading import batches, named_files, placed_files
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
    assert [(file.name, file.path) for file in named_files([a, b])] == [
        ("ck/meta", str(a / "meta")),
        ("ck/rank0", str(a / "rank0")),
        ("ck/rank1", str(b / "rank1")),
    ]


def test_two_files_that_differ_get_no_common_name(tmp_path, golden):
    a = write(tmp_path / "gpu-a" / "ck", log="of a")
    b = write(tmp_path / "gpu-b" / "ck", log="of b")
    with pytest.raises(UsageError) as raised:
        named_files([a, b])
    golden(str(raised.value).replace(str(tmp_path), "/here"))


def test_a_batch_is_full_by_its_bytes_or_by_its_list_and_never_empty(monkeypatch):
    sizes = zip("abcdef", (3, 9, 1, 1, 1, 1), strict=True)
    monkeypatch.setattr(spreading, "_BATCH_BYTES", 8)
    monkeypatch.setattr(spreading, "_LIST_BYTES", 3 * (1 + spreading._ENTRY_BYTES))
    files = [SourceFile(name, name, size, 0, 0o644) for name, size in sizes]
    found = ["".join(file.name for file in batch) for batch in batches(files)]
    assert found == ["a", "b", "cde", "f"]
    assert list(batches([])) == []


def test_a_host_may_read_a_large_file_for_longer_than_it_may_be_silent(
    tmp_path, monkeypatch
):
    """It compares the SHA-256 of the whole file, with whatever is there already."""

    def of_19_gb(path: Path) -> LocalBlob:
        blob = protocol.Blob(sha256="a" * 64, size_bytes=19 << 30)
        return LocalBlob(blob=blob, path=path, is_users=True)

    host = FakeHost("gpu-a")
    differing = protocol.DifferingFiles(indexes=(0,))
    host.answers[protocol.CompareFiles] = lambda _: [differing]
    host.answers[protocol.PlaceFiles] = after(120.0, protocol.MissingBlobs())
    monkeypatch.setattr(spreading, "local_file", of_19_gb)
    source = write(tmp_path, model="weights") / "model"
    assert spreading.put(reach(host), [source], "there") == (1, 7)
    assert len(host.requests_of(protocol.PlaceFiles)) == 1


def test_only_files_that_differ_on_some_host_are_read(tmp_path, monkeypatch):
    """The other hosts are asked about them, too: they may have the content."""
    source = write(tmp_path / "data", a="1", b="2", c="3", d="4")
    longest = len(f"1 {time.time_ns()} 420 data/a") + 3
    monkeypatch.setattr(spreading, "_LIST_BYTES", 3 * longest)
    hosts = [FakeHost("gpu-a"), FakeHost("gpu-b")]
    differing = [iter([(1,), ()]), iter([(), (0,)])]
    for host, indexes in zip(hosts, differing, strict=True):
        host.answers[protocol.CompareFiles] = lambda _, indexes=indexes: [
            protocol.DifferingFiles(indexes=next(indexes))
        ]
        host.answers[protocol.PlaceFiles] = lambda _: [protocol.MissingBlobs()]
    assert spreading.put(reach(*hosts), [source], "there") == (4, 4)
    for host in hosts:
        placed = host.requests_of(protocol.PlaceFiles)
        paths = [file.path for request in placed for file in request.files]
        assert paths == ["data/b", "data/d"]


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch, capsys, golden):
    """As `lost+found` of a disk: the rest is sent."""
    source = write(tmp_path / "data", a="1", shut__b="2")
    scan = os.scandir

    def scandir(folder: str) -> object:
        if folder.endswith("shut"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [file.name for file in named_files([source])] == ["data/a"]
    golden(capsys.readouterr().err.replace(str(tmp_path), "/here"))
    with pytest.raises(PayloadError) as raised:
        named_files([source / "shut"])
    golden(str(raised.value).replace(str(tmp_path), "/here"))


def test_the_list_of_a_batch_fits_into_one_message():
    """Whatever the names are: the longest that a file system takes, each byte quoted."""
    names = [f"{number:05}{chr(0xE000) * 83}" for number in range(4000)]
    files = [SourceFile(name, name, 1, 1 << 62, 0o600) for name in names]
    blob = protocol.Blob(sha256="f" * 64, size_bytes=256 << 20)
    local = LocalBlob(blob=blob, path=Path())
    for batch in batches(files):
        request = protocol.PlaceFiles(
            folder=protocol.Folder(path="~"),
            files=placed_files(batch, [local] * len(batch)),
        )
        assert len(protocol.encode(request)) < protocol.MAX_LINE_BYTES

"""Files of the user go to a host and come from it, over a conversation with a real contact on this machine."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.connection.requests import host_requests
from distmagic.connection.requests.blob_requests import deliver
from distmagic.connection.requests.file_requests import find_files, read_file
from distmagic.connection.requests.remote_files import RemoteFolder, local_file
from distmagic.errors import ConnectionLost, PreflightError, UsageError
from distmagic.payload import blobs, bundle
from distmagic.remote.contact.file_exchange import FileExchange
from distmagic.remote.records import brought_files, listing, places
from distmagic.remote.wire import file_names
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.protocol import Folder
from distmagic.request.hosts import LOCALHOST
from distmagic.session import spreading
from distmagic.transports.local import LocalTransport
from tests.builders.messages import START


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home on this machine as a host."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "distmagic"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def opened() -> Link:
    return open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())


@pytest.fixture
def link(home: Path) -> Iterator[Link]:
    found = opened()
    yield found
    found.close()


def test_files_of_a_job_are_found_and_read(link, home, golden):
    work = home / "work"
    (work / "ck").mkdir(parents=True)
    (work / "ck" / "a.pt").write_bytes(b"0123456789")
    job_dir = places.job_dir("job-1", 0)
    job_dir.mkdir(parents=True)
    start = replace(START, job="job-1", node_rank=0, cwd=str(work))
    listing.remember(job_dir, start)
    folder = Folder(job="job-1")
    (found,) = find_files(link, folder, "**")
    assert (found.path, found.size_bytes) == ("ck/a.pt", 10)

    known = hashlib.sha256(b"0123").hexdigest()
    request = p.ReadFile(folder=folder, path="ck/a.pt", size_bytes=4, sha256=known)
    begun: list[p.FileBegins] = []
    data = bytearray()
    assert not read_file(link, request, begun.append, data.extend)
    assert begun == [p.FileBegins(size_bytes=10, offset=4)]
    assert bytes(data) == b"456789"

    for path, error in (
        ("../x", "/x'"),
        ("ck/b.pt", "No such file"),
    ):
        with pytest.raises(PreflightError, match=error):
            read_file(link, replace(request, path=path), begun.append, data.extend)
    with golden.raises(PreflightError):
        find_files(link, Folder(job="job-2"), "**")


NAMES = [
    b"plain.bin",
    b"no utf-8 \xff\xfe.bin",
    b"a new\nline",
    b"\x1b[31mred",
    b"100%41.bin",
    b"[x]*?.bin",
    "größe.bin".encode(),
]


def test_files_of_any_name_go_there_and_back(home, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    texts = {os.fsdecode(name): b"x" * 300_000 + name for name in NAMES}
    texts["plain.bin"] *= 10
    for name, text in texts.items():
        (source / name).write_bytes(text)
    folder = RemoteFolder(Folder(path="in"), opened)
    assert sorted(folder.send(source)) == sorted(f"source/{name}" for name in texts)
    there = home / "in" / "source"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == texts
    paths = folder.fetch("source", tmp_path / "back")
    back = tmp_path / "back" / "source"
    assert sorted(paths) == sorted(back / name for name in texts)
    assert {path.name: path.read_bytes() for path in back.iterdir()} == texts


# The permissions of files here, and of their copies where the umask is 022.
MODES = {
    "plain": (0o644, 0o644),
    "script": (0o755, 0o755),
    "key": (0o600, 0o600),
    "tool": (0o700, 0o700),
    "of_group": (0o640, 0o640),
    "for_writing": (0o666, 0o644),
    "read_only": (0o444, 0o644),
    "shut/plain": (0o644, 0o600),
    "group/plain": (0o644, 0o640),
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A folder with files of all these permissions; this machine's umask is 022."""
    umask = os.umask(0o022)
    folder = tmp_path / "source"
    for name, (mode, _) in MODES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)
        (folder / name).chmod(mode)
    (folder / "shut").chmod(0o700)
    (folder / "group").chmod(0o750)
    yield folder
    os.umask(umask)


def modes_of(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_mode & 0o777 for name in MODES}


def test_files_that_are_sent_keep_their_permissions(home, tmp_path, source):
    RemoteFolder(Folder(path=str(tmp_path / "to")), opened).send(source)
    wanted = {name: mode for name, (_, mode) in MODES.items()}
    assert modes_of(tmp_path / "to" / "source") == wanted


def test_files_that_are_fetched_keep_their_permissions(home, tmp_path, source):
    folder = RemoteFolder(Folder(path=str(source)), opened)
    to = tmp_path / "to"
    to.mkdir()
    (to / "tool").write_text("of the user")
    (to / "tool").chmod(0o640)
    folder.fetch("**", to)
    found = modes_of(to)
    assert found["key"] == 0o600
    assert found["tool"] == 0o640, "the one that was here"
    assert (found["of_group"], found["plain"], found["for_writing"]) == (0o640, 0o644, 0o644)  # fmt: skip


def test_files_for_all_hosts_keep_their_permissions(home, link, tmp_path, source):
    named = spreading.named_files([source])
    local = [local_file(Path(file.path)) for file in named]
    deliver(link, tuple(local))
    files = spreading.placed_files(named, local)
    assert place(link, p.PlaceFiles(folder=Folder(path="to"), files=files)) == set()
    wanted = {name: mode for name, (_, mode) in MODES.items()}
    assert modes_of(home / "to" / "source") == wanted


class Breaking:
    """Opens links; the first ones break after a number of bytes were sent over them."""

    def __init__(self, *breaks: int) -> None:
        self.breaks = list(breaks)
        self.sent = 0

    def open(self) -> Link:
        link = opened()
        if not self.breaks:
            return link
        left = self.breaks.pop(0)
        write = link._process.write

        def broken(data: bytes) -> None:
            nonlocal left
            if len(data) > 60_000:  # of a file, no message
                left -= len(data)
                self.sent += len(data)
            write(data)
            if left < 0:
                link.finish()
                raise ConnectionLost("localhost: the connection ended.")

        link._process.write = broken  # type: ignore[method-assign]
        return link


def test_a_file_that_is_sent_goes_on_where_it_stopped(home, tmp_path):
    data = os.urandom(5_000_000)
    (tmp_path / "big.bin").write_bytes(data)
    breaking = Breaking(1_000_000, 1_000_000)
    RemoteFolder(Folder(path="in"), breaking.open).send(tmp_path / "big.bin")
    assert (home / "in" / "big.bin").read_bytes() == data
    assert breaking.breaks == []
    assert breaking.sent < 3_000_000, "neither of the two began anew"
    assert [path.name for path in (home / "in").iterdir()] == ["big.bin"]


def half_of(folder: Path, sha256: str) -> Path:
    """Return what an earlier call has brought of a file, on this host."""
    key = f"{socket.gethostname()} {sha256}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return folder / f".distmagic-{name}.part"


def test_a_later_call_goes_on_too_and_one_that_finds_the_file_sends_nothing(
    home, tmp_path, capsys
):
    data = os.urandom(3_000_000)
    (tmp_path / "big.bin").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    (home / "in").mkdir()
    part = half_of(home / "in", sha256)
    part.write_bytes(data[:2_000_000])
    folder = RemoteFolder(Folder(path="in"), opened)
    folder.send(tmp_path / "big.bin")
    assert (home / "in" / "big.bin").read_bytes() == data
    assert not part.exists()
    written = (home / "in" / "big.bin").stat().st_mtime_ns
    capsys.readouterr()
    folder.send(tmp_path / "big.bin")
    assert (home / "in" / "big.bin").stat().st_mtime_ns == written
    assert "big.bin: 3 of 3 MB (0 MB/s)" in capsys.readouterr().err


def test_a_part_of_another_file_is_found_out(home, tmp_path, golden):
    data = os.urandom(100_000)
    (tmp_path / "big.bin").write_bytes(data)
    (home / "in").mkdir()
    sha256 = hashlib.sha256(data).hexdigest()
    part = half_of(home / "in", sha256)
    part.write_bytes(b"another")
    folder = RemoteFolder(Folder(path="in"), opened)
    with golden.raises(PreflightError):
        folder.send(tmp_path / "big.bin")
    folder.send(tmp_path / "big.bin")
    assert (home / "in" / "big.bin").read_bytes() == data


def test_a_home_that_the_host_does_not_have_is_refused(link, home, tmp_path, golden):
    (tmp_path / "a").write_text("a")
    folder = RemoteFolder(Folder(path="~no-such-user/x"), opened)
    with golden.raises(PreflightError):
        folder.send(tmp_path / "a")
    with golden.raises(PreflightError):
        folder.find("**")
    asked = p.PlaceFiles(folder=Folder(path="~no-such-user"), files=())
    with golden.raises(PreflightError):
        place(link, asked)
    assert not list(home.iterdir())
    # A folder may have such a name.
    RemoteFolder(Folder(path="./~no-such-user"), opened).send(tmp_path / "a")
    assert (home / "~no-such-user/a").read_text() == "a"


def test_where_nothing_can_be_written_the_host_says_why(home, tmp_path, golden):
    (tmp_path / "one").write_bytes(b"1")
    (home / "file").write_bytes(b"")
    (home / "one").mkdir()
    with golden.raises(PreflightError):
        RemoteFolder(Folder(path="~"), opened).send(tmp_path / "one")
    with pytest.raises(PreflightError, match="Not a directory"):
        RemoteFolder(Folder(path="file/in"), opened).send(tmp_path / "one")


def test_links_are_not_sent(home, tmp_path, golden):
    source = tmp_path / "source"
    source.mkdir()
    with golden.raises(UsageError):
        RemoteFolder(Folder(path="in"), opened).send(source)
    (source / "real").write_bytes(b"1")
    (source / "link").symlink_to("/etc/passwd")
    (source / "loop").symlink_to(source)
    sent = RemoteFolder(Folder(path="in"), opened).send(source)
    assert sent == ["source/real"]
    with golden.raises(UsageError):
        RemoteFolder(Folder(path="in"), opened).send(tmp_path / "nothing")


class Notebook:
    """Has the beginning of a file; `meanwhile` happens on the host after the first piece of the rest."""

    def __init__(self, had: bytes, meanwhile: Callable[[], object]) -> None:
        self.got = bytearray(had)
        self.said: list[p.Message] = []
        self._meanwhile: list[Callable[[], object]] = [meanwhile]

    def say(self, message: p.Message) -> None:
        self.said.append(message)

    def write(self, data: bytes) -> None:
        self.got += data
        while self._meanwhile:
            self._meanwhile.pop()()


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [((), False), ((0,), True), ((9,), False), ((0, 9), True), ((10,), False)],
)
def test_a_fetch_that_goes_on_is_of_one_version(home, changed, is_told):
    """Pages of a database are written in place, those that have come before as well; what is added does no harm."""
    size = 1 << 20
    path = home / "model.db"
    old = b"".join(bytes([number]) * size for number in range(10))
    path.write_bytes(old)
    os.utime(path, (1, 1))

    def meanwhile() -> None:
        with path.open("r+b") as file:
            for page in changed:
                file.seek(page * size)
                file.write(b"N" * size)

    notebook = Notebook(old[: 6 * size], meanwhile)
    known = hashlib.sha256(notebook.got).hexdigest()
    request = p.ReadFile(
        folder=Folder(path="."), path="model.db", size_bytes=6 * size, sha256=known
    )
    FileExchange(cast(Any, notebook), 0o022).send(request)
    one_version = (old, path.read_bytes()[: len(old)])
    assert bytes(notebook.got) in one_version or is_told
    assert notebook.said[-1] == p.FileEnds(has_changed=is_told)
    assert notebook.said[0] == p.FileBegins(size_bytes=len(old), offset=6 * size)


def test_a_fetch_of_mapped_memory_is_of_one_version(home):
    """A write to pages that are dirty already leaves the date as it is."""
    path = home / "memmap"
    path.write_bytes(bytes(8 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[0] = pages[7 << 20] = 1

        def meanwhile() -> None:
            pages[0] = pages[7 << 20] = 2

        notebook = Notebook(b"", meanwhile)
        request = p.ReadFile(folder=Folder(path="."), path="memmap")
        FileExchange(cast(Any, notebook), 0o022).send(request)
    versions = {notebook.got[0], notebook.got[7 << 20]}
    assert len(versions) == 1 or notebook.said[-1] == p.FileEnds(has_changed=True)


# ---- files that go to all hosts

BROUGHT = {
    "data/a.bin": b"a" * 5000,
    "data/deep/b": b"b",
    "data/same": b"b",
    "data/empty": b"",
}


def placed(
    files: dict[str, bytes], folder: str = "~", owner: str = "me"
) -> p.PlaceFiles:
    files_there = []
    for name, data in files.items():
        blob = p.Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        files_there.append(p.PlacedFile(path=file_names.quoted(name), blob=blob))
    return p.PlaceFiles(
        folder=p.Folder(path=folder), files=tuple(files_there), origin="nb", owner=owner
    )


@pytest.fixture
def sent(link: Link, tmp_path: Path) -> Link:
    """A host that has the blobs of `BROUGHT`."""
    deliver(link, tuple(blobs.keep(data, tmp_path) for data in BROUGHT.values()))
    return link


def place(link: Link, asked: p.PlaceFiles) -> set[str]:
    return set(link.query(asked, p.MissingBlobs).sha256)


def found_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder.parent)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_is_neither_there_nor_a_blob_is_lacking(link, home):
    (home / "data").mkdir()
    (home / "data" / "a.bin").write_bytes(BROUGHT["data/a.bin"])
    lacking = place(link, placed(BROUGHT))
    assert lacking == {hashlib.sha256(data).hexdigest() for data in (b"b", b"")}


def test_blobs_become_files_and_no_copy_stays(sent, home):
    assert place(sent, placed(BROUGHT)) == set()
    assert found_below(home / "data") == BROUGHT
    assert (home / "data" / "a.bin").stat().st_mode & 0o777 == 0o644
    names = [path.name for path in (places.home() / "blobs").iterdir()]
    for data in BROUGHT.values():
        assert hashlib.sha256(data).hexdigest() not in names
    # Again nothing is lacking, and nothing is written.
    before = (home / "data" / "a.bin").stat()
    assert place(sent, placed(BROUGHT)) == set()
    assert (home / "data" / "a.bin").stat().st_mtime_ns == before.st_mtime_ns


SOURCE = (5000, 1_700_000_000_123_456_789, 0o644)  # size, last change, permissions


@pytest.fixture
def copy(sent: Link, home: Path) -> Path:
    """A copy on the host that has the looks of its source."""
    (one,) = placed({"data/a.bin": BROUGHT["data/a.bin"]}).files
    asked = p.PlaceFiles(
        folder=Folder(path="~"),
        files=(replace(one, changed_ns=SOURCE[1]),),
        origin="nb",
        owner="me",
    )
    assert place(sent, asked) == set()
    return home / "data" / "a.bin"


def compare(link: Link, owner: str = "me") -> tuple[int, ...]:
    size_bytes, changed_ns, mode = SOURCE
    line = f"{size_bytes} {changed_ns} {mode} data/a.bin"
    asked = p.CompareFiles(folder=Folder(path="~"), files=(line,), owner=owner)
    return link.query(asked, p.DifferingFiles).indexes


def test_a_copy_looks_like_its_source(sent, copy):
    status = copy.stat()
    assert (status.st_size, status.st_mtime_ns, status.st_mode & 0o777) == SOURCE
    assert compare(sent) == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"b" * 5000),
        lambda path: path.write_bytes(b"a"),
        lambda path: path.chmod(0o600),
        lambda path: os.utime(path, ns=(SOURCE[1], SOURCE[1] - 1)),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.rename(path.with_name("b")), path.symlink_to("b")),
    ],
    ids=["content", "size", "permissions", "date", "gone", "folder", "link"],
)
def test_a_copy_that_looks_otherwise_differs(sent, copy, change):
    change(copy)
    assert compare(sent) == (0,)


def test_a_copy_with_the_same_content_gets_the_looks_of_its_source_again(sent, copy):
    copy.chmod(0o600)
    os.utime(copy, (1, 1))
    (one,) = placed({"data/a.bin": BROUGHT["data/a.bin"]}).files
    asked = p.PlaceFiles(folder=Folder(path="~"), files=(replace(one, changed_ns=SOURCE[1]),))  # fmt: skip
    assert place(sent, asked) == set()
    assert compare(sent) == ()


def test_who_puts_a_copy_that_is_there_already_becomes_an_owner(sent, copy):
    compare(sent, owner="you")
    (kept,) = brought_files.kept()
    assert kept.owners == ("me", "you")


@pytest.mark.parametrize("unit_ns", [100, 1000, 1_000_000_000])
def test_a_file_system_may_round_dates_down(sent, copy, unit_ns):
    os.utime(copy, ns=(0, SOURCE[1] // unit_ns * unit_ns))
    assert compare(sent) == ()


def test_a_copy_of_1970_keeps_its_date(sent, home):
    (one,) = placed({"data/a.bin": BROUGHT["data/a.bin"]}).files
    files = (replace(one, changed_ns=0),)
    assert place(sent, p.PlaceFiles(folder=Folder(path="~"), files=files)) == set()
    assert (home / "data" / "a.bin").stat().st_mtime_ns == 0


def test_hosts_with_one_home_list_what_one_of_them_has_copied(sent, copy, monkeypatch):
    """The next node finds the files as they should be, and copies none."""
    (before,) = brought_files.kept()
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    assert list(brought_files.kept()) == []
    brought_files.share(str(copy.parent), "you")
    (kept,) = brought_files.kept()
    assert (kept.name, kept.size_bytes) == (before.name, before.size_bytes)
    assert kept.owners == ("me", "you")


def test_a_file_that_was_not_copied_by_put_gets_no_record(link, home):
    (home / "data").mkdir()
    (home / "data" / "a.bin").write_bytes(BROUGHT["data/a.bin"])
    (home / "data" / "a.bin").chmod(SOURCE[2])
    os.utime(home / "data" / "a.bin", ns=SOURCE[1:2] * 2)
    assert compare(link) == ()
    assert list(brought_files.kept()) == []


@pytest.mark.parametrize("line", ["", "1 2 3", "a b c d", "1 2 3 4 5"])
def test_a_malformed_comparison_is_refused(link, line):
    asked = p.CompareFiles(folder=Folder(path="~"), files=(line,))
    with pytest.raises(PreflightError):
        link.query(asked, p.DifferingFiles)


@pytest.mark.parametrize("may_change", [True, False])
def test_a_file_in_a_setgid_folder_gets_its_group(tmp_path, monkeypatch, may_change):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "kept"))
    places.make_private(places.home() / "blobs")
    kept = blobs.keep(b"x", places.home() / "blobs")
    project = tmp_path / "project"
    project.mkdir()
    group = 12345 if os.geteuid() == 0 else os.getgroups()[-1]
    os.chown(project, -1, group)
    project.chmod(0o2775)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not may_change:
        monkeypatch.setattr(brought_files.os, "chown", refuse)
    target = project / "deep" / "file"
    brought_files.place(kept.blob.sha256, str(target), 0o640, keeps=False)
    status = target.stat()
    assert (status.st_gid, status.st_mode & 0o777) == (group, 0o640)
    assert kept.path.exists() == (not may_change)


def test_a_folder_of_another_disk_gets_a_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "kept"))
    places.make_private(places.home() / "blobs")
    kept = blobs.keep(b"x", places.home() / "blobs")

    def refuse(source: object, target: object) -> None:
        if Path(str(source)).parent.name == "blobs":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        Path(str(source)).rename(str(target))

    monkeypatch.setattr(brought_files.os, "replace", refuse)
    target = tmp_path / "disk" / "file"
    brought_files.place(kept.blob.sha256, str(target), 0o640, keeps=False)
    assert target.read_bytes() == b"x"
    assert target.stat().st_mode & 0o777 == 0o640
    assert kept.path.exists()


def test_a_long_name_is_no_trouble_for_a_file_that_stays_a_blob(sent, home):
    files = {"\u8bad" * 85: b"a" * 5, "x" * 255: b"a" * 5}
    deliver(sent, (blobs.keep(b"a" * 5, home),))
    assert place(sent, placed(files, "to")) == set()
    assert {path.name for path in (home / "to").iterdir()} == set(files)


def test_a_blob_that_a_host_of_the_same_home_has_taken_is_asked_for_again(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "kept"))
    places.make_private(places.home() / "blobs")
    blobs.keep(b"b", places.home() / "blobs")
    said: list[p.Message] = []

    class Notebook:
        say = staticmethod(said.append)

    def taken(sha256: str, *_: object, **__: object) -> None:
        places.blob(sha256).unlink()
        raise FileNotFoundError(sha256)

    monkeypatch.setattr(brought_files, "place", taken)
    asked = placed({"b": b"b"}, str(tmp_path / "to"))
    FileExchange(Notebook(), 0o022).place(asked)
    assert said == [p.MissingBlobs(sha256=(hashlib.sha256(b"b").hexdigest(),))]


def test_a_folder_in_the_way_is_refused(sent, home, golden):
    (home / "data" / "a.bin").mkdir(parents=True)
    with golden.raises(PreflightError):
        place(sent, placed(BROUGHT))


def test_what_was_brought_is_listed_and_removed_as_far_as_it_is_unchanged(sent, home):
    place(sent, placed(BROUGHT))
    place(sent, placed({"data/a.bin": BROUGHT["data/a.bin"]}, owner="you"))
    (found,) = host_requests.list_work_dirs(sent)
    size = sum(map(len, BROUGHT.values()))
    assert (found.name, found.size_bytes) == (str(home / "data"), size)
    assert (found.origin, found.owners, found.is_used) == ("nb", ("me", "you"), False)
    (home / "data" / "deep" / "b").write_bytes(b"of mine")
    (home / "data" / "new").write_bytes(b"of mine, too")
    assert host_requests.remove_work_dir(sent, found.name) == size - 1
    assert found_below(home / "data") == {
        "data/deep/b": b"of mine",
        "data/new": b"of mine, too",
    }
    assert host_requests.list_work_dirs(sent) == ()
    with pytest.raises(PreflightError):
        host_requests.remove_work_dir(sent, str(home))
    assert home.is_dir()


def test_a_folder_without_other_files_is_gone_with_them(sent, home):
    place(sent, placed(BROUGHT))
    host_requests.remove_work_dir(sent, str(home / "data"))
    assert not (home / "data").exists()
    assert list((places.home() / "brought").iterdir()) == []


def test_an_empty_folder_of_somebody_else_stays(sent, home):
    (home / "data" / "mine").mkdir(parents=True)
    place(sent, placed(BROUGHT))
    host_requests.remove_work_dir(sent, str(home / "data"))
    assert [path.name for path in (home / "data").iterdir()] == ["mine"]


def test_a_list_of_files_that_are_gone_is_dropped(sent, home):
    place(sent, placed({"data/deep/b": b"b"}))
    (home / "data" / "deep" / "b").unlink()
    assert host_requests.list_work_dirs(sent) == ()
    assert list((places.home() / "brought").iterdir()) == []


def test_a_list_that_a_full_disk_has_cut_has_its_other_files(home):
    (home / "data").mkdir()
    for name in ("data/a", "data/b", "data/c"):
        (home / name).write_bytes(b"x")
        brought_files.note(str(home), [name], "nb", "me")
        if name == "data/a":
            (about,) = (places.home() / "brought").iterdir()
            with (about / "files").open("a") as file:
                file.write("12 3")
    assert [one.size_bytes for one in brought_files.kept()] == [2]
    assert brought_files.remove(str(home / "data")) == 2
    assert [path.name for path in (home / "data").iterdir()] == ["b"]


def test_while_a_job_runs_what_was_brought_counts_as_used(home, monkeypatch, tmp_path):
    (home / "x").write_bytes(b"x")
    brought_files.note(str(home), ["x"], "nb", "me")
    monkeypatch.setattr(listing, "running", lambda: ["a job"])
    assert [one.is_used for one in brought_files.kept()] == [True]

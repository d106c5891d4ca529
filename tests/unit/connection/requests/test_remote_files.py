"""Files of a run come to this machine: whole, at their place, and never anywhere else."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.connection.requests.remote_files import RemoteFolder
from distmagic.errors import (
    ConnectionLost,
    NoResult,
    PreflightError,
    ProtocolError,
    UsageError,
)
from distmagic.remote.contact.file_exchange import FileExchange
from distmagic.remote.records import found_files, manifest
from distmagic.remote.records.atomic_file import resumed_write
from distmagic.remote.system.processes import up_s
from distmagic.remote.wire import file_names
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.protocol import Folder, FoundFile
from tests.builders.descriptors import closed_at_the_end
from tests.builders.file_server import FileServer, each_error
from tests.builders.harmless import is_harmless
from tests.builders.hosts import HANG_UP, FakeHost, reach
from tests.lab import wait_until


class Answers:
    """What a contact would say, gathered."""

    def __init__(self) -> None:
        self.said: list[p.Message | bytes] = []

    def say(self, message: p.Message) -> None:
        self.said.append(message)

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def pieces(self, size: int) -> Iterator[bytes]:
        raise AssertionError("nothing is sent to this host")


class RealFiles:
    """A fake host whose files are those of a real folder; `break_after` are bytes after which a link ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = FakeHost("gpu-a")
        self.host.answers[p.ListFiles] = self.list
        self.host.answers[p.ReadFile] = self.read
        self.break_after: list[int] = []

    def list(self, request: p.ListFiles) -> list[p.Message | bytes]:
        answers = Answers()
        FileExchange(answers, 0o22).list(request)
        return answers.said

    def read(self, request: p.ReadFile) -> list[p.Message | bytes]:
        answers = Answers()
        FileExchange(answers, 0o22).send(request)
        if not self.break_after:
            return answers.said
        announced = self.break_after.pop(0)
        kept = next(one for one in answers.said if isinstance(one, bytes))[:announced]
        process = self.host.processes[-1]
        process.put(answers.said[0], p.Data(size_bytes=len(kept)), kept)
        process.cut()
        return []


@contextmanager
def files_of(host: FakeHost, path: Path | str = "") -> Iterator[RemoteFolder]:
    reaching = reach(host)
    reaching.wait()[0].close()
    yield RemoteFolder(Folder(path=str(path)), lambda: reaching.opener.link(0))


@pytest.fixture
def there(tmp_path: Path) -> RealFiles:
    folder = tmp_path / "there"
    for name in ("ck/a.pt", "ck/b.pt", "log.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(5000))
    return RealFiles(folder)


def test_files_come_to_their_place_and_only_once(there, tmp_path):
    to = tmp_path / "here"
    with files_of(there.host, there.folder) as files:
        assert [file.path for file in files.find("**")] == [
            "ck/a.pt",
            "ck/b.pt",
            "log.txt",
        ]
        assert files.fetch("ck/*.pt", to) == [to / "ck/a.pt", to / "ck/b.pt"]
        assert (to / "ck/a.pt").read_bytes() == (there.folder / "ck/a.pt").read_bytes()
        assert sorted(path.name for path in to.rglob("*")) == ["a.pt", "b.pt", "ck"]
        asked = len(there.host.requests_of(p.ReadFile))
        files.fetch("ck/*.pt", to)
        assert len(there.host.requests_of(p.ReadFile)) == asked == 2
        (there.folder / "ck/a.pt").write_bytes(b"new")
        files.fetch("ck/*.pt", to)
    assert (to / "ck/a.pt").read_bytes() == b"new"


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_fetches_of_a_file_at_once_do_not_share_their_half(
    there, tmp_path, monkeypatch, has_locks
):
    """The second is broken off when the first is done: what the first returned is whole, and stays so.

    Without locks, it is on another machine that shares the folder, and that does not see its lock.
    """
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    to, whole = tmp_path / "here", (there.folder / "log.txt").read_bytes()
    received = RemoteFolder._receive

    def another_meanwhile(self, link, file, out, line):
        monkeypatch.setattr(RemoteFolder, "_receive", received)
        out.write(whole[:3000])
        out.flush()
        if not has_locks:
            monkeypatch.setattr(socket, "gethostname", lambda: "login2")
        with files_of(there.host, there.folder) as others:
            assert others.fetch("log.txt", to) == [to / "log.txt"]
        assert (to / "log.txt").read_bytes() == whole
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteFolder, "_receive", another_meanwhile)
    with files_of(there.host, there.folder) as files, pytest.raises(KeyboardInterrupt):
        files.fetch("log.txt", to)
    assert (to / "log.txt").read_bytes() == whole
    halves = [path for path in to.iterdir() if path.suffix == ".part"]
    assert [path.stat().st_size for path in halves] == [3000], "for the next call"


def test_a_half_that_has_just_got_its_name_is_not_written_to(tmp_path):
    part, target = tmp_path / "x.part", tmp_path / "x"
    with resumed_write(part, 0o600) as (first, _):
        with resumed_write(part, 0o600) as (second, aside):
            assert aside != part
            second.write(b"whole")
            second.flush()
            aside.replace(target)
        first.write(b"half")
    assert (target.read_bytes(), part.read_bytes()) == (b"whole", b"half")
    with resumed_write(part, 0o600) as (again, where):
        assert (again.read(), where) == (b"half", part)
        where.replace(target)
        with resumed_write(part, 0o600) as (new, anew):
            assert (new.read(), anew) == (b"", part)


@pytest.mark.parametrize("how", ["in place", "a new file", "an old date"])
def test_what_was_edited_here_since_the_run_began_stays_and_the_hosts_is_beside_it(
    there, tmp_path, capsys, how, golden
):
    to = tmp_path / "here"
    to.mkdir()
    for name in ("log.txt", "old.txt"):
        (to / name).write_text("as it was sent")
        (there.folder / name).write_text("as ranks left it")
    wait_until(lambda: has_ticked(to / "log.txt"), "a later time of the file system")
    began_up_s = up_s()
    wait_until(lambda: has_ticked(to / "tick"), "a later time of the file system")
    if how == "a new file":
        (to / "log.txt").unlink()
    (to / "log.txt").write_text("edited")
    if how == "an old date":
        os.utime(to / "log.txt", (1, 1))
    reaching = reach(there.host)
    reaching.wait()[0].close()
    files = RemoteFolder(
        Folder(path=str(there.folder)),
        lambda: reaching.opener.link(0),
        began_up_s,
    )
    beside = to / "log.txt.of-last-run"
    assert files.fetch("*.txt", to) == [beside, to / "old.txt"]
    assert (to / "log.txt").read_text() == "edited"
    assert beside.read_text() == (to / "old.txt").read_text() == "as ranks left it"
    lines = capsys.readouterr().err.splitlines()
    golden(*[line for line in lines if "was edited" in line])
    # What a fetch has written is replaced by the next one.
    for name in ("log.txt", "old.txt"):
        (there.folder / name).write_text("later")
    assert files.fetch("*.txt", to) == [beside, to / "old.txt"]
    assert beside.read_text() == (to / "old.txt").read_text() == "later"


def test_what_is_edited_here_while_its_copy_is_on_the_way_stays(
    there, tmp_path, monkeypatch
):
    to = tmp_path / "here"
    received = RemoteFolder._receive

    def edit_meanwhile(self, link, file, out, line):
        (to / "log.txt").write_text("edited")
        return received(self, link, file, out, line)

    with files_of(there.host, there.folder) as files:
        files.fetch("log.txt", to)
        (there.folder / "log.txt").write_text("later")
        monkeypatch.setattr(RemoteFolder, "_receive", edit_meanwhile)
        assert files.fetch("log.txt", to) == [to / "log.txt.of-last-run"]
    assert (to / "log.txt").read_text() == "edited"
    assert (to / "log.txt.of-last-run").read_text() == "later"


@pytest.mark.parametrize("name", ["x" * 255, "\u8bad" * 85], ids=["ASCII", "Chinese"])
def test_the_name_beside_an_edited_file_fits_into_a_folder(there, tmp_path, name):
    (there.folder / name).write_text("as ranks left it")
    (tmp_path / name).write_text("edited")
    reaching = reach(there.host)
    reaching.wait()[0].close()
    files = RemoteFolder(
        Folder(path=str(there.folder)), lambda: reaching.opener.link(0), 0.0
    )
    (beside,) = files.fetch(name, tmp_path)
    assert beside.read_text() == "as ranks left it"
    assert beside.name.endswith(".of-last-run")
    assert beside.name[:80] == name[:80]
    assert (tmp_path / name).read_text() == "edited"


def has_ticked(file: Path) -> bool:
    """Whether a file that is written now is dated later: by more than the clock of a file system lags behind."""
    now = file.with_name("tick" if file.name != "tick" else "tock")
    now.write_text("")
    return now.stat().st_ctime > file.stat().st_ctime + 0.05


def test_a_transfer_that_breaks_goes_on_where_it_stopped(there, tmp_path):
    there.break_after = [1000, 2000]
    with files_of(there.host, there.folder) as files:
        files.fetch("log.txt", tmp_path / "here")
    whole = (there.folder / "log.txt").read_bytes()
    assert (tmp_path / "here" / "log.txt").read_bytes() == whole
    asked = [(one.size_bytes, one.sha256) for one in there.host.requests_of(p.ReadFile)]
    assert asked == [
        (0, ""),
        (1000, hashlib.sha256(whole[:1000]).hexdigest()),
        (3000, hashlib.sha256(whole[:3000]).hexdigest()),
    ]


def test_a_later_call_goes_on_too_and_begins_anew_where_the_file_is_another(
    there, tmp_path
):
    there.host.answers[p.ReadFile], read = (
        lambda _: HANG_UP,
        there.host.answers[p.ReadFile],
    )
    to = tmp_path / "here"
    with files_of(there.host, there.folder) as files:
        with pytest.raises(ConnectionLost):
            files.fetch("log.txt", to)
        (part,) = to.iterdir()
        part.write_bytes(b"x" * 100)  # of a file that was another one then
        there.host.answers[p.ReadFile] = read
        files.fetch("log.txt", to)
    assert (to / "log.txt").read_bytes() == (there.folder / "log.txt").read_bytes()
    assert there.host.requests_of(p.ReadFile)[-1].size_bytes == 100
    assert [path.name for path in to.iterdir()] == ["log.txt"]


def test_a_file_that_a_rank_writes_is_fetched_again_until_it_is_whole(
    there, tmp_path, monkeypatch, golden
):
    log = there.folder / "log.txt"
    plain = found_files.pieces
    changes = [b"n" * 5000, b"", b""]

    def pieces(file, begin, end):
        yield from plain(file, begin, end)
        if changes and (change := changes.pop(0)):
            log.write_bytes(change)
            os.utime(log, ns=(1, len(changes)))

    monkeypatch.setattr(found_files, "pieces", pieces)
    with files_of(there.host, there.folder) as files:
        files.fetch("log.txt", tmp_path / "here")
        assert (tmp_path / "here" / "log.txt").read_bytes() == b"n" * 5000
        changes[:] = [bytes([number]) * 5000 for number in range(50)]
        log.write_bytes(b"again")
        with pytest.raises(NoResult) as never:
            files.fetch("log.txt", tmp_path / "here")
    golden(never.value)


def test_a_file_that_only_grows_is_taken_as_it_was(there, tmp_path, monkeypatch):
    log = there.folder / "log.txt"
    before = log.read_bytes()
    plain = found_files.pieces

    def pieces(file, begin, end):
        yield from plain(file, begin, end)
        with log.open("ab") as out:
            out.write(b"one more line")

    monkeypatch.setattr(found_files, "pieces", pieces)
    with files_of(there.host, there.folder) as files:
        files.fetch("log.txt", tmp_path / "here")
    assert (tmp_path / "here" / "log.txt").read_bytes() == before


@each_error
@pytest.mark.parametrize("stays", [False, True])
def test_a_file_comes_whole_or_not_at_all_whatever_both_file_servers_say(
    there, tmp_path, monkeypatch, stays, home_error
):
    """An error of any call, here or on the host, is told, and the next call brings what is missing."""
    real = dict(there.host.answers)

    def answer(kind):
        def refused(request):
            try:
                return real[kind](request)
            except OSError as error:
                return [p.Refused(what="read_file", error=str(error))]

        return refused

    there.host.answers.update({kind: answer(kind) for kind in real})
    server = FileServer(monkeypatch, tmp_path, home_error)
    to = tmp_path / "here"
    whole = (there.folder / "log.txt").read_bytes()
    at, calls = -1, 0
    with files_of(there.host, there.folder) as files:
        while at < calls:
            shutil.rmtree(to, ignore_errors=True)
            with closed_at_the_end():
                server.fail(at, stays=stays)
                came: list[Path] = []
                with contextlib.suppress(NoResult, PreflightError, UsageError):
                    came = files.fetch("log.txt", to)
                calls, failed = max(calls, len(server.calls)), server.failed
                server.fail(-1, stays=False)
            assert came or at >= 0
            assert [path.read_bytes() for path in came] in ([], [whole]), failed
            files.fetch("log.txt", to)
            assert (to / "log.txt").read_bytes() == whole, failed
            at += 1
    assert calls > 30


# ---- hostile hosts


def telling(*paths: str, size_bytes: int = 3) -> FakeHost:
    """Return a host that names these files, and sends them."""
    host = FakeHost("gpu-a")
    found = tuple(
        FoundFile(path=path, size_bytes=size_bytes, changed_s=float("inf"))
        for path in paths
    )
    host.answers[p.ListFiles] = lambda _: [p.FoundFiles(files=found), p.FoundFiles()]
    host.answers[p.ReadFile] = lambda _: [
        p.FileBegins(size_bytes=3),
        p.Data(size_bytes=3),
        b"abc",
        p.FileEnds(),
    ]
    return host


@pytest.mark.parametrize(
    ("path", "pattern"),
    [(path, "**") for path in ("/etc/passwd", "../x", "a/../../x", "", "a//b", "a/./b", "a/")]
    + [(path, "ck/*.pt") for path in (".git/config", "torch.py", "ck/a.txt", "x.pt/a.pt")],
)  # fmt: skip
def test_a_file_that_was_not_asked_for_is_refused(path, pattern, tmp_path, golden):
    with (
        files_of(telling(path)) as files,
        golden.raises(ProtocolError),
    ):
        files.fetch(pattern, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_a_link_on_this_machine_is_not_followed(tmp_path, golden):
    to = tmp_path / "here"
    (tmp_path / "outside").mkdir()
    to.mkdir()
    (to / "folder").symlink_to(tmp_path / "outside")
    (to / "file").symlink_to(tmp_path / "outside" / "target")
    with (
        files_of(telling("folder/x")) as files,
        golden.raises(NoResult),
    ):
        files.fetch("**", to)
    with files_of(telling("file")) as files:
        files.fetch("**", to)
    assert (to / "file").read_bytes() == b"abc"
    assert not (to / "file").is_symlink()
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_where_a_folder_is_is_refused(tmp_path, golden):
    (tmp_path / "x").mkdir()
    with (
        files_of(telling("x")) as files,
        golden.raises(NoResult),
    ):
        files.fetch("**", tmp_path)


def test_a_file_that_finds_no_room_is_refused_before_it_is_sent(tmp_path, golden):
    host = telling("x")
    host.answers[p.ReadFile] = lambda _: [p.FileBegins(size_bytes=1 << 60)]
    with files_of(host) as files, golden.raises(NoResult):
        files.fetch("**", tmp_path)


def test_more_bytes_than_were_announced_are_refused(tmp_path, golden):
    host = telling("x")
    host.answers[p.ReadFile] = lambda _: [
        p.FileBegins(size_bytes=2),
        p.Data(size_bytes=3),
        b"abc",
        p.FileEnds(),
    ]
    with files_of(host) as files, golden.raises(ProtocolError):
        files.fetch("**", tmp_path)


@pytest.mark.parametrize("offset", [1, 7])
def test_a_file_begins_where_it_was_asked_for_or_at_its_beginning(
    offset, tmp_path, golden
):
    host = telling("x")
    host.answers[p.ReadFile] = lambda _: [
        p.FileBegins(size_bytes=7, offset=offset),
        p.FileEnds(),
    ]
    with (
        files_of(host) as files,
        golden.raises(ProtocolError),
    ):
        files.fetch("**", tmp_path)


def test_a_pattern_that_fits_nothing_and_one_that_leads_out_are_told(
    there, tmp_path, golden
):
    with files_of(there.host, there.folder) as files:
        with golden.raises(UsageError):
            files.fetch("*.bin", tmp_path)
        for pattern in ("/etc/*", "../*", ""):
            with golden.raises(UsageError):
                files.fetch(pattern, tmp_path)


NASTY = b"\x1b]0;owned\x07\x1b[2J\r\n\t\x7f\x9b31m\xff\xe2\x80\xae\xe2\x80\xa8 ok"
NAMES = st.binary(min_size=1, max_size=200) | st.lists(
    st.sampled_from([bytes([byte]) for byte in NASTY]), min_size=1, max_size=200
).map(b"".join)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join).map(os.fsdecode)


@settings(max_examples=settings.default.max_examples // 2)
@given(PATHS, st.sampled_from(["whole", "torn", "too large"]))
def test_a_file_of_any_name_is_fetched_and_its_name_is_harmless_wherever_it_is_shown(
    path, how
):
    host = telling(file_names.quoted(path))
    whole = [p.FileBegins(size_bytes=3), p.Data(size_bytes=3), b"abc", p.FileEnds()]
    torn = [p.FileBegins(size_bytes=3, offset=2)]
    large = [p.FileBegins(size_bytes=1 << 60)]
    host.answers[p.ReadFile] = lambda _: {"whole": whole, "torn": torn}.get(how, large)
    told, shown = io.StringIO(), []
    with (
        tempfile.TemporaryDirectory() as to,
        files_of(host) as files,
        redirect_stderr(told),
    ):
        try:
            shown.append(repr(files.find("**")))
            (target,) = files.fetch("**", Path(to))
            came = (str(target), target.read_bytes())
        except (NoResult, ProtocolError) as error:
            came = None
            shown.append(error.message)
        is_fetched = how == "whole" and manifest.is_inside(path)
        assert came == ((f"{to}/{path}", b"abc") if is_fetched else None)
    for text in (*shown, told.getvalue().removeprefix("\r").removesuffix("\n")):
        assert is_harmless(text)

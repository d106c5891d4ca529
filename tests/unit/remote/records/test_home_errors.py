"""What comes to a home whose file server fails at any call: it is whole or not there, and comes the next time.

A run's files, an environment and a payload are brought once; what an earlier run has written outlives every error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from distmagic.payload.folder import contents_of
from distmagic.payload.tree import packed
from distmagic.remote.contact import environment_sync
from distmagic.remote.contact.blob_receiver import BlobReceiver
from distmagic.remote.contact.contact import Contact
from distmagic.remote.contact.environment_sync import EnvironmentSync
from distmagic.remote.contact.file_exchange import FileExchange
from distmagic.remote.records import brought_files, environments, places, work_dirs
from distmagic.remote.wire import protocol as p
from tests.builders.descriptors import closed_at_the_end
from tests.builders.file_server import FileServer, chosen, each_error

_DATA = b"a payload" * 1000
_SHA = sha256(_DATA).hexdigest()
# What brings it, and what says whether it is whole; the second is told whether it must be there.
Case = tuple[Callable[[], object], Callable[[bool], None]]


class Notebook:
    """A conversation in which all is sent that is asked for."""

    def __init__(self) -> None:
        self.said: list[p.Message] = []

    def say(self, message: p.Message) -> None:
        """Keep what a notebook would hear."""
        self.said.append(message)

    def pieces(self, size: int) -> Iterator[bytes]:
        """Send the last bytes of a payload in two pieces."""
        rest = _DATA[len(_DATA) - size :]
        yield rest[:1000]
        yield rest[1000:]


def files_of_a_run(home: Path, project: Path) -> Case:
    """The second run of a name: one file has changed here, and the first run has changed another one."""
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir()

    def sent() -> p.WorkDir:
        tree = packed(contents_of(project), ("",), home / "blobs")
        return p.WorkDir(
            name="train", origin="nb", manifest=tree.listed.blob.sha256, files=3
        )

    for name in ("a.py", "b.py", "data/c"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("1")
    path = work_dirs.prepare(sent(), "first", 0).path
    work_dirs.leave(path, "first", 0)
    (path / "b.py").write_text("its own")
    (path / "snapshot").write_text("two days")
    (project / "a.py").write_text("22")
    work = sent()
    jobs = iter(("second", "third"))

    def bring() -> None:
        work_dirs.prepare(work, next(jobs), 0)

    def check(must: bool) -> None:
        assert (path / "snapshot").read_text() == "two days"
        assert (path / "data" / "c").read_text() == "1"
        assert (path / "a.py").read_text() in (("22",) if must else ("1", "22"))
        assert (path / "b.py").read_text() == "its own"

    return bring, check


def an_environment(home: Path, _: Path) -> Case:
    """An environment whose installer succeeds each time."""
    notebook = Notebook()
    request = p.SyncEnvironment(name="kernel", requirements=("x==1",), owner="me")
    digest = environments.digest((request.requirements, request.lock))

    def bring() -> None:
        EnvironmentSync(cast(Contact, notebook)).sync(request)

    def check(must: bool) -> None:
        ready = environments.find(digest)
        name = environments.root() / "kernel"
        if must or name.exists():
            assert ready is not None
            assert environments.Environment(path=name.resolve()).is_ready()
        if must:
            assert isinstance(notebook.said[-1], p.EnvironmentReady)

    return bring, check


def a_payload(home: Path, _: Path) -> Case:
    """A blob that a notebook sends."""
    blob = p.Blob(sha256=_SHA, size_bytes=len(_DATA))

    def bring() -> None:
        receiver = BlobReceiver(cast(Contact, Notebook()))
        receiver.offer(p.OfferBlobs(blobs=(blob,)))

    def check(must: bool) -> None:
        if must or places.blob(_SHA).exists():
            assert places.blob(_SHA).read_bytes() == _DATA

    return bring, check


def a_file_of_the_user(home: Path, _: Path) -> Case:
    """A file that `put` sends in place of an older one."""
    target = home / "to" / "data.bin"
    target.parent.mkdir()
    target.write_bytes(b"old")
    request = p.WriteFile(
        folder=p.Folder(path=str(target.parent)), path=target.name, size_bytes=len(_DATA), sha256=_SHA,
    )  # fmt: skip

    def bring() -> None:
        FileExchange(cast(Contact, Notebook()), 0o022).receive(request)

    def check(must: bool) -> None:
        assert target.read_bytes() in ((_DATA,) if must else (b"old", _DATA))

    return bring, check


def a_file_for_all_hosts(home: Path, _: Path) -> Case:
    """A blob that becomes a file, which is listed and so can be removed again."""
    places.blob(_SHA).write_bytes(_DATA)
    target = home / "to" / "data.bin"
    target.parent.mkdir()
    placed = p.PlacedFile(
        path=target.name, blob=p.Blob(sha256=_SHA, size_bytes=len(_DATA))
    )
    request = p.PlaceFiles(
        folder=p.Folder(path=str(target.parent)), files=(placed,), origin="nb", owner="me",
    )  # fmt: skip

    def bring() -> None:
        FileExchange(cast(Contact, Notebook()), 0o022).place(request)

    def check(must: bool) -> None:
        if must or target.exists():
            assert target.read_bytes() == _DATA
        listed = [one.name for one in brought_files.kept()]
        assert listed == [str(target)] if must else len(listed) <= 1

    return bring, check


@pytest.mark.slow
@each_error
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        files_of_a_run,
        an_environment,
        a_payload,
        a_file_of_the_user,
        a_file_for_all_hosts,
    ],
)
def test_what_comes_is_whole_or_not_there_and_comes_the_next_time(
    home_in_memory, tmp_path, monkeypatch, case, stays, home_error
):
    monkeypatch.setattr(EnvironmentSync, "_must", lambda *_, **__: None)
    monkeypatch.setattr(environment_sync.shutil, "which", lambda *_, **__: "uv")
    if (
        stays
    ):  # the next time is later than the mark of a job that could not be removed counts
        monkeypatch.setattr(work_dirs, "_SETTLING_S", 0.0)
    server = FileServer(monkeypatch, home_in_memory, home_error)

    def fail(at: int) -> None:
        shutil.rmtree(home_in_memory, ignore_errors=True)
        places.make_private(home_in_memory / "blobs")
        bring, check = case(home_in_memory, tmp_path / "project")
        with closed_at_the_end():
            server.fail(at, stays=stays)
            with contextlib.suppress(OSError):
                bring()
            failed = server.failed
            server.fail(-1, stays=False)
            try:
                check(at < 0)
                bring()
                check(True)
            except BaseException as error:
                raise AssertionError(f"call {at} failed: {failed}") from error

    fail(-1)
    calls = server.calls_before
    assert len(calls) > 5, os.fspath(home_in_memory)
    for at in range(0, len(calls), 3) if stays else chosen(calls):
        fail(at)

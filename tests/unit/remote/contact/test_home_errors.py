"""A contact whose home is on a file server that fails at any call: it answers each request, and removes nothing in use."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from distmagic.remote.contact.contact import Contact
from distmagic.remote.records import environments, expiry, listing, places, work_dirs
from distmagic.remote.records.journal import FILE, Journal
from distmagic.remote.wire import protocol as p
from tests.builders.descriptors import closed_at_the_end
from tests.builders.file_server import FileServer, chosen, each_error
from tests.builders.messages import START

_JOB = f"home-{os.getpid()}"
_BLOB = p.Blob(sha256=sha256(b"x").hexdigest(), size_bytes=1)
_FAR = "far.0.another"
_WORK = p.WorkDir(name="train", origin="nb", is_fresh=True)
_REQUESTS: tuple[p.Message, ...] = (
    p.GetFacts(), p.ListJobs(), p.CheckBlobs(blobs=(_BLOB,)), p.ListWorkDirs(), p.PruneBlobs(removes=True),
    p.RemoveJob(job=_JOB), p.RemoveWorkDir(name="train"), p.RemoveWorkDir(name="far"), p.SweepJob(job="no"),
)  # fmt: skip


@pytest.fixture
def home(home_in_memory: Path) -> Iterator[Path]:
    """A home in which a job runs here, and one on another host."""
    listener = places.reader_listener(places.make_run_dir(_JOB, 0))
    yield home_in_memory
    listener.close()
    shutil.rmtree(places.run_dir(_JOB, 0), ignore_errors=True)


def furnish(home: Path) -> list[Path]:
    """Have in the home what two jobs use, and what is old; return the files that are in use."""
    shutil.rmtree(home, ignore_errors=True)
    places.make_private(home / "blobs")
    folder = places.job_dir(_JOB, 0)
    folder.mkdir(parents=True)
    listing.remember(folder, replace(START, job=_JOB, node_rank=0))
    Journal(folder).add(p.Notice(text="x"))
    work_dirs.prepare(replace(_WORK, is_fresh=False), _JOB, 0)
    work_dirs.prepare(replace(_WORK, name="far"), "far", 0)
    users = work_dirs.root() / ".far" / "users"
    next(users.iterdir()).rename(users / _FAR)
    environment = environments.root() / ".0123456789abcdef"
    environment.mkdir(parents=True)
    old = home / "jobs" / "old" / f"0-{socket.gethostname()}" / FILE
    in_use = [
        folder / FILE, work_dirs.root() / "train" / "snapshot", work_dirs.root() / "far" / "snapshot",
        places.blob(_BLOB.sha256), environment / "ready",
    ]  # fmt: skip
    for file in (*in_use, old):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    places.blob(_BLOB.sha256).write_bytes(b"x")
    for path in (old, old.parent, old.parent.parent):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    return in_use


def contact_said() -> list[p.Message]:
    """Have a contact in this process answer all requests; return what it says."""
    saved = os.dup(0), os.dup(1)
    requests, answers = os.memfd_create("requests"), os.memfd_create("answers")
    os.write(requests, b"".join(p.encode(request) for request in _REQUESTS))
    os.lseek(requests, 0, os.SEEK_SET)
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    try:
        talk = Contact(0o022)
        talk.run()
        os.close(talk.out)
    finally:
        for number, descriptor in enumerate(saved):
            os.dup2(descriptor, number)
            os.close(descriptor)
    os.lseek(answers, 0, os.SEEK_SET)
    with open(answers, "rb") as file:
        said = [p.decode(line)[1] for line in file]
    os.close(requests)
    return said


def prepare_fresh() -> None:
    for name in ("train", "far"):
        with contextlib.suppress(OSError):
            work_dirs.prepare(replace(_WORK, name=name), "other", 0)


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
@each_error
@pytest.mark.parametrize("act", [contact_said, prepare_fresh])
def test_an_error_of_the_home_costs_the_request_alone_and_nothing_that_is_in_use(
    home, monkeypatch, act, stays, home_error
):
    server = FileServer(monkeypatch, home, home_error)
    monkeypatch.setattr(expiry, "_LOOK_S", 1e9)

    def fail(at: int) -> None:
        with closed_at_the_end():
            in_use = furnish(home)
            server.fail(at, stays=stays)
            said = act()
            failed = server.failed
            server.fail(-1, stays=False)
        assert [path for path in in_use if not path.exists()] == [], failed
        if isinstance(said, list):
            ends = [m for m in said if not isinstance(m, p.Jobs) or not m.jobs]
            assert len(ends) == 1 + len(_REQUESTS), failed

    fail(-1)
    calls = server.calls_before
    assert len(calls) > 50
    for at in range(0, len(calls), 3) if stays else chosen(calls):
        fail(at)

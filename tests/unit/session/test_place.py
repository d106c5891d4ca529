"""Where a run is: nodes of a scheduler that several runs wait for, what is kept meanwhile, and the files that hosts need."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.connection.connections import Connections
from distmagic.connection.link_opener import Fleet
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, PayloadTooLarge, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.payload import blobs
from distmagic.remote.wire import protocol
from distmagic.request.access import Access
from distmagic.request.allocation import SlurmRequest
from distmagic.request.hosts import LOCALHOST, Host, parse_hosts
from distmagic.request.spec import JobSpec
from distmagic.session.allocations import Allocations
from distmagic.session.place import Place, with_files
from distmagic.session.session import Session
from distmagic.systems.slurm import allocation
from tests.builders.hosts import FakeHost, connector, fails, runs_to_its_end
from tests.builders.jobs import payload_in
from tests.builders.logins import CANCELLED, PENDING, RUNNING, Login, squeue
from tests.builders.runs import FakeScreen
from tests.lab.waiting import HANG_S, wait_until

WANTED = SlurmRequest(login="login1", nodes=2)


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Login:
    monkeypatch.setattr(allocation, "pauses", lambda: itertools.repeat(0.01))
    made = Login()
    squeue(made, PENDING)
    return made


class Waiting:
    """A run on nodes that are pending."""

    def __init__(self, allocations: Allocations) -> None:
        asker = NotebookAsker(can_ask=False)
        session: Any = SimpleNamespace(reach=lambda hosts, *_: hosts)
        access = Access()
        wanted = allocations.get(WANTED, access, asker, "me", is_elastic=False)
        self.place = Place(session, access, asker, JobSpec(), allocation=wanted)
        self.has_shown = threading.Event()

    def reach(self, pool: ThreadPoolExecutor, **more: Any) -> Future[Any]:
        """Wait for the nodes on a thread; return when it does."""
        screen = FakeScreen(lambda _: self.has_shown.set())
        reached = pool.submit(self.place.reach, screen, **more)
        assert self.has_shown.wait(HANG_S)
        return reached


@pytest.fixture
def allocations(login: Login) -> Iterator[Allocations]:
    made = Allocations(lambda host, access, asker: login)
    yield made
    made.leave()


@pytest.fixture
def pool(login: Login) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made
        squeue(login, CANCELLED)  # who waits still ends


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def test_of_runs_that_wait_for_the_same_nodes_one_that_gives_up_leaves_them_to_the_others(
    login, allocations, pool
):
    runs = [Waiting(allocations) for _ in range(3)]
    first, second, third = (run.reach(pool) for run in runs)
    runs[0].place.interrupt()
    with pytest.raises(KeyboardInterrupt):
        first.result(HANG_S)
    runs[0].place.cancel()  # as whoever gets the interrupt does
    assert not second.done()
    squeue(login, RUNNING)
    assert names(second.result(HANG_S)) == names(third.result(HANG_S)) == ["a1", "a2"]
    assert login.programs().count("sbatch") == 1
    assert "scancel" not in login.programs()
    assert len(login.leases) == 1, "another pipe would be held, and never renewed"
    assert allocations.alive


def test_the_last_one_that_gives_up_cancels_the_job(login, allocations, pool):
    runs = [Waiting(allocations) for _ in range(2)]
    reached = [run.reach(pool) for run in runs]
    for run in runs:
        assert "scancel" not in login.programs()
        run.place.interrupt()
    assert login.asked.count(("scancel", "17")) == 1
    for one in reached:
        assert one.exception(HANG_S) is not None
    assert not allocations.alive


def test_what_a_run_is_to_send_is_kept_here_while_it_waits(
    login, allocations, pool, tmp_path, monkeypatch
):
    """A job may be pending for hours, in which other runs send more than is kept of what nobody uses."""
    monkeypatch.setattr(blobs, "_TOUCH_S", 0.01)
    payload = payload_in(tmp_path)
    run = Waiting(allocations)
    reached = run.reach(pool, payload=payload)
    for local in payload.blobs:
        os.utime(local.path, (1, 1))
    for local in payload.blobs:
        wait_until(lambda local=local: local.path.stat().st_mtime > 1, "a touch")
    squeue(login, RUNNING)
    assert names(reached.result(HANG_S)) == ["a1", "a2"]


@pytest.mark.parametrize("answer", [True, False])
def test_above_the_limit_a_folder_is_sent_only_if_the_user_says_so(
    tmp_path, monkeypatch, answer
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(5000))
    payload = replace(payload_in(tmp_path), limit_bytes=1000)
    fleet = Fleet(hosts=parse_hosts("gpu-a"), access=Access())
    asked: list[str] = []
    asker: Any = SimpleNamespace(confirm=lambda text: asked.append(text) or answer)
    spec = JobSpec(sync=str(folder))
    if answer:
        tree = with_files(payload, spec, fleet, asker).tree
        assert tree is not None
    else:
        with pytest.raises(PayloadTooLarge):
            with_files(payload, spec, fleet, asker)
    assert len(asked) == 1


def test_this_machine_has_all_files(tmp_path):
    payload = payload_in(tmp_path)
    spec, fleet = JobSpec(sync="."), Fleet(hosts=(LOCALHOST,), access=Access())
    assert with_files(payload, spec, fleet, NotebookAsker(can_ask=False)) is payload


@pytest.mark.parametrize(
    ("begins", "kind"), [(runs_to_its_end, Cancelled), (fails, WorkerFailed)]
)
def test_an_interrupt_of_the_copying_of_files_loses_neither_the_run_nor_its_error(
    tmp_path, monkeypatch, capsys, begins, kind
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))

    def interrupt(_: protocol.Message) -> None:
        raise KeyboardInterrupt

    host = FakeHost("gpu-a", begins)
    host.answers[protocol.ListFiles] = interrupt
    spec, asker = JobSpec(fetch=("a", "b/*.pt")), NotebookAsker(can_ask=False)
    with closing(Session(Connections(connector(host)))) as session, closing(asker):
        place = Place(session, Access(cold=True), asker, spec, hosts=(host.host,))
        with pytest.raises(kind) as caught:
            place.launch(payload_in(tmp_path), FakeScreen(), "mine")
    run = caught.value.run
    assert isinstance(run, Run)
    assert run.unfetched == ("a", "b/*.pt")
    said = f"{caught.value}\n{capsys.readouterr().err}"
    assert "mine.fetch('a'); mine.fetch('b/*.pt')" in said
    assert len(host.requests_of(protocol.ListFiles)) == 1

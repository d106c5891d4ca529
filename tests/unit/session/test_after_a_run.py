"""What is left of a run in a session: results that are fetched later, and nothing that keeps a run alive."""

from __future__ import annotations

import gc
import getpass
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from distmagic.comparison import compare
from distmagic.connection import link_opener
from distmagic.connection.connections import Connections
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.link_opener import Fleet, LinkOpener
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import AuthenticationError, RunError, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.remote.values import parcel
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.hosts import Host, parse_hosts
from distmagic.request.spec import JobSpec
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.executor import Executor
from distmagic.runner.launch import Followed
from distmagic.runner.node_table import NodeTable
from distmagic.runner.run_loop import RunLoop
from distmagic.session.session import Session, left_of
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.transports.asking import Asker, ask
from tests.builders.hosts import FakeHost, connector, fails, runs_to_its_end
from tests.builders.jobs import payload_in
from tests.builders.links import FakeProcess, lines, reply
from tests.builders.plans import FACTS
from tests.builders.runs import FakeScreen
from tests.lab.waiting import HANG_S, wait_until


class OneTimePassword:
    """A host whose log-in asks for a code, on a thread of its own as paramiko does, and which has one file."""

    warnings = ()

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.codes: list[str] = []
        self.processes: list[FakeProcess] = []

    def connect(self, host: Host, access: Access, asker: Asker) -> Any:
        """Log in; raises what the asker raises."""
        errors: list[BaseException] = []

        def log_in() -> None:
            try:
                self.codes.append(ask(asker, host.name, "Verification code:"))
            except AuthenticationError as error:
                errors.append(error)

        thread = threading.Thread(target=log_in)
        thread.start()
        thread.join(HANG_S)
        if errors:
            raise errors[0]
        return self

    def start(self, argv: tuple[str, ...]) -> FakeProcess:
        """Start a process that sends the file."""
        self.processes.append(
            FakeProcess(
                reply(),
                lines(FACTS),
                lines(p.Data(size_bytes=len(self.data))),
                self.data,
            )
        )
        return self.processes[-1]

    def close(self) -> None:
        """Do nothing."""


def state_of(*, code: int = 0, result_bytes: int | None = None) -> RunState:
    """Return a run of one rank that is over."""
    failure = p.Failure(type="ValueError", message="no", traceback="") if code else None
    ended = p.Ended(
        rank=0, restart=0, outcome="raised" if code else "returned", code=code, failure=failure, result_bytes=result_bytes
    )  # fmt: skip
    worker = p.Worker(rank=0, local_rank=0, world_size=1, restart=0, pid=1)
    ends = (worker, ended, p.EngineEnded(code=code), p.Final(reason="done"), Gone())
    return fold(
        begin("j", ("gpu-a",)),
        [Event(node_rank=0, at_s=1.0, what=what) for what in ends],
    )


def opener_of(connect: Any, asker: NotebookAsker) -> LinkOpener:
    fleet = Fleet(hosts=parse_hosts("gpu-a"), access=Access())
    return LinkOpener(connections=Connections(connect), fleet=fleet, asker=asker)


def finished(
    state: RunState,
    host: OneTimePassword,
    small: Mapping[tuple[int, int], bytes] = MappingProxyType({}),
) -> Run:
    """Return what is left of a run whose connection was lost, when its cell is over."""
    opener = opener_of(host.connect, NotebookAsker(can_ask=True))
    opener.asker.close()
    followed = Followed(state=state, small_results=small, host_indices=(0,))
    run = left_of(Session(), followed, opener, FakeScreen())
    assert isinstance(run, Run)
    return run


@pytest.fixture
def host(tmp_path: Path) -> OneTimePassword:
    parcel.dump({"loss": 0.5}, tmp_path / "value")
    return OneTimePassword((tmp_path / "value").read_bytes())


@pytest.fixture
def at_the_keyboard(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[str, threading.Thread]]:
    """Answer every question, and return the questions with the threads that asked them."""
    asked: list[tuple[str, threading.Thread]] = []

    def answer(prompt: str) -> str:
        asked.append((prompt, threading.current_thread()))
        return "123456"

    monkeypatch.setattr(getpass, "getpass", answer)
    monkeypatch.setattr(link_opener, "asker_of", lambda: NotebookAsker(can_ask=True))
    return asked


def test_a_result_after_a_lost_connection_asks_for_a_one_time_password(
    host, at_the_keyboard, capsys
):
    run = finished(state_of(result_bytes=len(host.data)), host)
    assert run.results[0] == {"loss": 0.5}
    assert host.codes == ["123456"]
    assert at_the_keyboard == [
        ("gpu-a: Verification code: ", threading.current_thread())
    ]


def test_a_run_has_its_results_where_no_summary_can_be_made_of_it(
    host, at_the_keyboard, monkeypatch, capsys
):
    def fails(_: RunState) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(compare, "summary", fails)
    run = finished(state_of(result_bytes=len(host.data)), host)
    assert run.results[0] == {"loss": 0.5}
    assert "lacks this one: ZeroDivisionError: a bug." in capsys.readouterr().err


def test_a_small_result_that_another_host_has_sent_is_not_looked_at(
    host, at_the_keyboard, tmp_path, capsys
):
    """It would be unpickled in the name of a host that is trusted."""
    parcel.dump("of another host", tmp_path / "other")
    small = {(1, 0): (tmp_path / "other").read_bytes()}
    run = finished(state_of(result_bytes=len(host.data)), host, small)
    assert run.results[0] == {"loss": 0.5}


def test_an_interrupt_of_the_question_ends_the_look_at_a_result(
    host, at_the_keyboard, monkeypatch
):
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(getpass, "getpass", interrupt)
    run = finished(state_of(result_bytes=len(host.data)), host)
    with pytest.raises(KeyboardInterrupt):
        run.results[0]
    assert host.processes == []


def test_a_link_that_opens_after_an_interrupt_is_closed(host):
    interrupted = threading.Event()

    class Interrupted(NotebookAsker):
        def serve_until_done(self, futures: Any) -> None:
            raise KeyboardInterrupt

    def connect(*_: object) -> Any:
        assert interrupted.wait(HANG_S)
        return host

    opener = opener_of(connect, NotebookAsker(can_ask=False))
    with pytest.raises(KeyboardInterrupt):
        opener.link_after_run(0, Interrupted(can_ask=True))
    interrupted.set()
    wait_until(lambda: bool(host.processes), "the link")
    assert host.processes[0].is_closed.wait(HANG_S)


@contextmanager
def no_collection() -> Iterator[None]:
    """Have only counts of references free objects inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def test_a_run_is_gone_with_its_last_name(host, at_the_keyboard, capsys):
    with no_collection():
        run = finished(state_of(result_bytes=len(host.data)), host)
        assert run.results[0] == {"loss": 0.5}
        run.logs(0, "stdout")
        gone = weakref.ref(run)
        del run
        assert gone() is None


PARTS = (Run, RunLoop, NodeTable, EventQueue, Executor, FirstLinks, Link)


def parts() -> list[object]:
    """Return what is alive of any run."""
    return [one for one in gc.get_objects() if type(one) in PARTS]


def names_of_new(before: list[object]) -> list[str]:
    """Return the names of parts that came after these: an earlier test's may go meanwhile."""
    known = {id(one) for one in before}
    return sorted(type(one).__name__ for one in parts() if id(one) not in known)


@pytest.mark.parametrize("begins", [runs_to_its_end, fails])
def test_nothing_of_a_run_is_left_to_the_garbage_collector(tmp_path, begins):
    gc.collect()
    before = parts()
    hosts = FakeHost("gpu-a", begins), FakeHost("gpu-b", begins)
    session = Session(Connections(connector(*hosts)))
    with (
        no_collection(),
        closing(session),
        closing(NotebookAsker(can_ask=False)) as asker,
    ):
        reaching = session.reach(
            tuple(one.host for one in hosts), Access(cold=True), asker, JobSpec()
        )
        try:
            run = session.launch(
                reaching, JobSpec(), payload_in(tmp_path), FakeScreen()
            )
        except WorkerFailed as error:
            run = error.run
        assert "Run" in names_of_new(before)
        del run, reaching
        try:
            wait_until(lambda: not names_of_new(before), "all of the run to be gone")
        except AssertionError:
            left = names_of_new(before)
            gc.collect()
            text = f"{left} were left, and after a collection {names_of_new(before)}"
            raise AssertionError(text) from None


def test_a_run_that_failed_is_gone_with_its_error(host):
    def failed() -> weakref.ref[object]:
        try:
            finished(state_of(code=1), host)
        except WorkerFailed as error:
            return weakref.ref(cast(RunError, error).run)
        raise AssertionError("it failed")

    with no_collection():
        gone = failed()
        assert gone() is None


def test_a_run_that_failed_keeps_its_error_where_no_hint_can_be_looked_for(
    host, tmp_path, monkeypatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(WorkerFailed) as caught:
        finished(state_of(code=1), host)
    assert isinstance(caught.value.run, Run)

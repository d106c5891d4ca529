"""Runs in the background: the cell goes on at once, the run is asked and ended from other cells, and ends with its process."""

from __future__ import annotations

import getpass
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distmagic.connection import link_opener
from distmagic.connection.connections import Connections
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, Unreachable, UsageError, WorkerFailed
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.payload.pack import Payload
from distmagic.remote.system import threads
from distmagic.remote.wire import protocol as p
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.request.spec import JobSpec
from distmagic.session import background
from distmagic.session.background import BackgroundRun
from distmagic.session.place import Place
from distmagic.session.session import Session
from distmagic.staying.control import Control
from distmagic.transports.asking import Asker, ask
from tests.builders.hosts import (
    FakeHost,
    connector,
    down,
    fails,
    runs_on,
    runs_to_its_end,
)
from tests.builders.jobs import (
    PressingScreen,
    assert_left,
    has_ranks,
    payload_in,
    press,
    two,
)
from tests.builders.runs import FakeScreen
from tests.lab.waiting import HANG_S, wait_until

COLD = Access(cold=True)


class Kernel:
    """A session over fake hosts, and the payload of its runs."""

    def __init__(self, folder: Path) -> None:
        self.payload = payload_in(folder)
        self.session = Session()

    def over(self, *hosts: FakeHost) -> Kernel:
        """Have the session connect to these hosts."""
        self.session = Session(Connections(connector(*hosts)))
        self.hosts = tuple(one.host for one in hosts)
        return self

    def begin(self, screen: Screen | None = None) -> BackgroundRun:
        asker = NotebookAsker(can_ask=False)
        place = Place(self.session, COLD, asker, JobSpec(), hosts=self.hosts)
        return place.begin(self.payload, screen or FakeScreen(), "b")

    def running(self, screen: Screen | None = None) -> BackgroundRun:
        """Begin a run, and wait until its ranks run."""
        run = self.begin(screen)
        wait_until(lambda: has_ranks(run.state), "its ranks", HANG_S)
        return run


@pytest.fixture
def kernel(tmp_path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.session.close()


def test_the_first_state_is_shown_at_once_and_all_others_on_another_thread(kernel):
    a, b = two()
    threads: list[str] = []
    screen = FakeScreen(lambda _: threads.append(threading.current_thread().name))
    run = kernel.over(a, b).begin(screen)
    first = screen.shown[0]
    assert first.job == run.job
    assert [node.host for node in first.nodes] == ["gpu-a", "gpu-b"]
    assert first.began_unix_s > 0
    assert run.wait(HANG_S).state.phase == "done"
    assert threads[0] == threading.current_thread().name
    assert threading.current_thread().name not in threads[1:]
    assert [state.phase for state in screen.finished] == ["done"], "once"


def test_a_run_that_is_over_has_what_a_run_of_a_cell_has(kernel, golden):
    a, b = two(returns_none)
    run = kernel.over(a, b).begin()
    left = run.wait(HANG_S)
    assert isinstance(left, Run)
    assert run.done
    assert left.job == run.job
    assert sorted(run.results) == sorted(left.results) == [0, 1]
    assert run[1] is run[-1] is None
    assert (list(run), len(run)) == ([None, None], 2)
    a.results["rank0.stdout.log"] = b"hello\n"
    assert run.logs(0, "stdout") == "hello\n"
    run.stop()  # nothing is left to stop
    with golden.raises(UsageError):
        run.stacks()


def returns_none(start: p.StartNode) -> list[p.Message]:
    ended = p.Ended(rank=start.node_rank, restart=0, outcome="returned", result_bytes=0)
    return [*runs_on(start), ended, p.EngineEnded(code=0), p.Final(reason="done")]


def test_while_it_goes_on_it_is_asked_for_logs_and_stacks(kernel, golden):
    a, b = two(runs_on)
    for rank, host in enumerate((a, b)):
        host.results[f"rank{rank}.stdout.log"] = f"so far {rank}\n".encode()
        host.answers[p.DumpStacks] = lambda request, host=host, rank=rank: tell(
            host, request, rank
        )
    run = kernel.over(a, b).running()
    assert not run.done
    assert run.logs(1, "stdout") == "so far 1\n"
    assert repr(run.stacks()).startswith(f"{run.job}: 2 ranks at 1 place")
    assert "2 ranks at 1 place" in run.stacks()._repr_html_()
    assert run.metrics == []
    with golden.raises(UsageError):
        run.results  # noqa: B018
    with golden.raises(UsageError):
        run.logs(7)
    with golden.raises(TimeoutError):
        run.wait(0.01)


def test_a_log_after_a_lost_connection_asks_for_a_one_time_password(
    kernel, monkeypatch
):
    """On the thread that wants the log, whichever one the log-in asks on."""
    a, b = two(runs_on)
    a.results["rank0.stdout.log"] = b"hello\n"
    run = kernel.over(a, b).running()
    asked: list[threading.Thread] = []

    def answer(_: str) -> str:
        asked.append(threading.current_thread())
        return "123456"

    monkeypatch.setattr(getpass, "getpass", answer)
    monkeypatch.setattr(link_opener, "asker_of", lambda: NotebookAsker(can_ask=True))
    connections = kernel.session._connections
    connect = connections._connect

    def log_in(host: Host, access: Access, asker: Asker) -> Any:
        question = threading.Thread(target=ask, args=(asker, host.name, "Code:"))
        question.start()
        question.join(HANG_S)
        return connect(host, access, asker)

    monkeypatch.setattr(connections, "_connect", log_in)
    connections._open.clear()
    assert run.logs(0, "stdout") == "hello\n"
    assert asked == [threading.current_thread()]


def tell(host: FakeHost, request: p.DumpStacks, rank: int) -> list[p.Message]:
    frame = p.Frame(file="Cell In[3]", line=2, function="work", mine=True)
    host.agent_sends(
        p.Stacks(
            request_id=request.request_id,
            rank=rank,
            local_rank=0,
            threads=(p.Thread(frames=(frame,)),),
        ),
        p.StacksDone(request_id=request.request_id, ranks=1),
    )
    return []


def test_stop_ends_it_and_wait_says_so(kernel, golden):
    a, b = two(runs_on)
    run = kernel.over(a, b).running()
    run.stop()
    assert run.done
    assert run.state.phase == "stopped"
    for host in (a, b):
        assert [one.reason for one in host.requests_of(p.StopNode)] == ["interrupted"]
    with golden.raises(Cancelled) as got:
        run.wait()
    assert got.value.run.state.phase == "stopped"
    assert_left(a, b)


def test_an_interrupt_while_it_is_waited_for_leaves_it_alone(kernel):
    a, b = two(runs_on)
    run = kernel.over(a, b).running()
    timer = threading.Timer(0.05, press)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come at once
        timer.start()
        run.wait(HANG_S)
    timer.join()
    assert not run.done
    assert a.requests_of(p.StopNode) == []


def test_an_interrupt_of_another_run_leaves_it_alone(kernel):
    a, b = two(runs_on)
    other = FakeHost("gpu-c", runs_on)
    kernel.over(a, b, other)
    kernel.hosts = (a.host, b.host)
    run = kernel.running()
    asker = NotebookAsker(can_ask=False)
    reaching = kernel.session.reach((other.host,), COLD, asker, JobSpec())
    with pytest.raises(Cancelled):
        kernel.session.launch(
            reaching, JobSpec(), kernel.payload, PressingScreen(has_ranks)
        )
    assert other.requests_of(p.StopNode) != []
    assert not run.done
    assert run.state.phase == "running"
    assert a.requests_of(p.StopNode) == []


def test_its_failure_is_shown_and_raised_by_wait_and_by_its_results(kernel, golden):
    a, b = FakeHost("gpu-a", runs_on), FakeHost("gpu-b", fails)
    screen = FakeScreen()
    run = kernel.over(a, b).begin(screen)
    with pytest.raises(WorkerFailed) as caught:
        run.wait(HANG_S)
    with pytest.raises(WorkerFailed):
        run[0]
    (last,) = screen.finished
    assert last.phase == "failed"
    assert last.notices[-1] in caught.value.hint.splitlines()
    golden(caught.value)
    assert (last.variable, run.state.variable) == ("b", "b")
    b.results["rank1.stderr.log"] = b"oh\n"
    assert run.logs(1, "stderr") == "oh\n", "what was written is still there"


def test_a_host_that_is_down_is_told_in_the_view_with_what_to_do(kernel):
    a, b = two()
    b.error = down("gpu-b")
    b.error.hint = "Check the network."
    screen = FakeScreen()
    run = kernel.over(a, b).begin(screen)
    with pytest.raises(Unreachable):
        run.wait(HANG_S)
    (last,) = screen.finished
    assert "gpu-b" in last.abandoned
    assert last.notices[-1] == "Check the network."
    assert kernel.session.background.running == ()


def test_what_fails_before_the_run_is_told_in_the_view_too(kernel, monkeypatch):
    monkeypatch.setattr(Session, "launch", raise_bug)
    screen = FakeScreen()
    run = kernel.over(*two()).begin(screen)
    with pytest.raises(ZeroDivisionError):
        run.wait(HANG_S)
    assert screen.finished[0].abandoned == "ZeroDivisionError('a bug')"


def raise_bug(*_: object) -> None:
    raise ZeroDivisionError("a bug")


def test_a_second_screen_shows_it_too_and_its_end(kernel):
    a, b = two(runs_on)
    first, second = FakeScreen(), FakeScreen()
    run = kernel.over(a, b).running(first)
    run.screen.add(second)
    assert second.shown[0].phase == "running"
    second.clicks = ["stop"]
    with pytest.raises(Cancelled):
        run.wait(HANG_S)
    late = FakeScreen()
    run.screen.add(late)  # it was looked for a moment before the end
    screens = (first, second, late)
    assert [len(screen.finished) for screen in screens] == [1, 1, 1]


def test_a_click_on_detach_leaves_the_job_on_its_own(kernel):
    a, b = two(runs_on)
    screen = FakeScreen()
    a.begins = lambda start: [*runs_on(start), p.PeerState(node_rank=1, state="joined")]
    a.answers[p.DetachJob] = lambda _: a.agent_sends(p.Detached(why="asked")) or []
    run = kernel.over(a, b).running(screen)
    screen.clicks = ["detach"]
    left = run.wait(HANG_S)
    assert isinstance(left, Detached)
    assert screen.finished[0].notices[-1] == str(left)
    with pytest.raises(AttributeError, match="'results'"):
        run.results  # noqa: B018


def test_those_that_go_on_are_found_by_name(kernel):
    a, b = two(runs_on)
    run = kernel.over(a, b).running()
    runs = kernel.session.background
    assert runs.running == (run,)
    assert runs.find(run.job) is runs.find(run.job[:-1]) is run
    assert runs.find("") is runs.find("another") is None
    run.stop()
    assert runs.find(run.job) is None


@pytest.mark.parametrize("begins", [runs_to_its_end, fails])
def test_a_run_that_is_over_is_let_go_of_with_its_name(kernel, begins):
    run = kernel.over(*two(begins)).begin()
    assert run.wait_until_over(HANG_S)
    kept = weakref.ref(run)
    del run
    wait_until(lambda: kept() is None, "the run to be gone", HANG_S)
    assert kernel.session.background.running == ()


def test_a_run_that_is_stopped_while_it_begins_is_let_go_of_too(kernel):
    run = kernel.over(*two(runs_on)).begin()
    run.stop()
    kept = weakref.ref(run)
    del run
    wait_until(lambda: kept() is None, "the run to be gone", HANG_S)


def test_the_end_of_the_session_ends_it_as_an_interrupt_does(kernel):
    a, b = two(runs_on)
    run = kernel.over(a, b).running()
    kernel.session.close()
    assert run.done
    assert [one.reason for one in a.requests_of(p.StopNode)] == ["interrupted"]


def test_ranks_that_outlive_the_kernel_are_left_by_the_end_of_the_session(kernel):
    a, b = two(runs_on)
    place = Place(kernel.over(a, b).session, COLD, NotebookAsker(can_ask=False), JobSpec(), hosts=kernel.hosts)  # fmt: skip
    run = place.begin(kernel.payload, FakeScreen(), "exp", Control(60.0))
    wait_until(lambda: has_ranks(run.state), "its ranks", HANG_S)
    kernel.session.background.close()
    assert a.requests_of(p.StopNode) == b.requests_of(p.StopNode) == []
    assert not run.done
    run.stop()


def test_hosts_are_told_to_end_also_where_no_thread_can_be_started(kernel, monkeypatch):
    """As when Python ends, from 3.12 on."""
    a, b = two(runs_on)
    run = kernel.over(a, b).running()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threads, "begin", refuse)
    monkeypatch.setattr(background, "_LAST_WAIT_S", 0.0)
    run.ask_to_stop()
    wait_until(
        lambda: a.requests_of(p.StopNode) and b.requests_of(p.StopNode),
        "both hosts to be told",
        HANG_S,
    )


class PendingPlace(Place):
    """Nodes of a scheduler that are pending until somebody gives them up."""

    names = ("node 1",)

    def __init__(self, session: Session) -> None:
        self._session, self._access, self._spec = session, Access(), JobSpec()
        self.given_up = threading.Event()

    def reach(self, screen: Screen, payload: Payload) -> None:
        self.given_up.wait(2 * HANG_S)
        raise UsageError("Slurm job 17 was cancelled.")

    def interrupt(self) -> None:
        self.given_up.set()

    def cancel(self) -> None:
        assert self.given_up.is_set()


def test_a_run_that_waits_for_nodes_is_given_up_by_stop(kernel):
    run = PendingPlace(kernel.session).begin(kernel.payload, FakeScreen())
    with pytest.raises(UsageError, match=r"^Rank 0 "):
        run.logs(0)
    run.stop()
    with pytest.raises(UsageError, match="Slurm job 17 was cancelled"):
        run.wait()


def test_hosts_are_told_to_end_before_a_scheduler_that_is_away_is_waited_for(kernel):
    class Away(PendingPlace):
        def interrupt(self) -> None:
            assert run.wait_until_over(HANG_S), "its hosts have not been told"
            super().interrupt()

    a, b = two(runs_on)
    kernel.over(a, b)
    pending = Away(kernel.session).begin(kernel.payload, FakeScreen())
    run = kernel.running()
    kernel.session.background.close()
    assert run.done
    assert pending.wait_until_over(HANG_S)

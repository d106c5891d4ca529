"""A kernel's session: what a run leaves, or the error that carries it; jobs that are let go; hosts that are kept warm."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import (
    Cancelled,
    ConnectionLost,
    PayloadError,
    PreflightError,
    Unreachable,
    UsageError,
    WorkerFailed,
)
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host
from distmagic.request.spec import JobSpec
from distmagic.session import session as session_module
from distmagic.session import session as sessions
from distmagic.session.dry_run import start_commands
from distmagic.session.place import fetch
from distmagic.session.session import Session
from distmagic.transports.asking import Asker, ask
from tests.builders.hosts import (
    FakeConnection,
    FakeHost,
    connector,
    down,
    fails,
    runs_on,
)
from tests.builders.jobs import (
    LatePressingScreen,
    PressingScreen,
    assert_left,
    begun,
    has_ranks,
    listing,
    payload_in,
    two,
)
from tests.builders.runs import FakeScreen

COLD = Access(cold=True)


class Kernel:
    """A session over fake hosts, and the payload of its runs."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self._monkeypatch = monkeypatch
        self.payload = payload_in(tmp_path)
        self.session = Session()

    def over(self, *hosts: FakeHost) -> Kernel:
        """Have the session connect to these hosts."""
        self._monkeypatch.setattr(sessions, "connect", connector(*hosts))
        self.session = Session()
        self.hosts = tuple(one.host for one in hosts)
        return self

    def reach(self, access: Access = COLD, spec: JobSpec | None = None) -> FirstLinks:
        return self.session.reach(
            self.hosts, access, NotebookAsker(can_ask=False), spec
        )

    def launch(
        self,
        spec: JobSpec | None = None,
        screen: FakeScreen | None = None,
        access: Access = COLD,
    ) -> Run | Detached:
        spec = spec or JobSpec()
        return self.session.launch(
            self.reach(access, spec), spec, self.payload, screen or FakeScreen()
        )


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path, monkeypatch)
    yield kernel
    kernel.session.close()


def started(host: FakeHost) -> list[p.Message]:
    return host.requests_of(p.StartNode)


# ---- a dry run


def test_a_dry_run_gives_the_command_of_each_host_and_starts_nothing(kernel):
    a, b = two()
    b.facts = replace(b.facts, executable="/opt/python3", address="10.0.0.2")
    kernel.over(a, b)
    text = start_commands(kernel.reach(), JobSpec(nproc_per_node=2))
    first, _, second, _ = text.splitlines()
    assert first == "# gpu-a (node_rank 0, 2 ranks)"
    assert second == "# gpu-b (node_rank 1, 2 ranks)"
    assert "/usr/bin/python3 -m torch.distributed.run --nnodes=2 " in text
    assert "/opt/python3 -m torch.distributed.run --nnodes=2 " in text
    assert started(a) == started(b) == []
    assert_left(a, b)


def test_a_home_that_can_not_be_written_is_told_once_whoever_asks(
    kernel, tmp_path, monkeypatch, golden
):
    """A command as `%distributed jobs`, too, which packs nothing."""
    kernel.over(*two())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "file"))
    with golden.raises(PayloadError):
        kernel.reach()


def test_a_dry_run_of_what_can_not_be_planned_closes_the_links(kernel, golden):
    a, b = two()
    kernel.over(a, b)
    with golden.raises(UsageError):
        start_commands(kernel.reach(), JobSpec(nnodes=(3, 3)))
    assert_left(a, b)


# ---- launch


def test_runs_are_kept_for_comparison_under_the_names_that_their_user_gave(kernel):
    a, b = two()
    run = kernel.over(a, b).launch(JobSpec(name="wide"))
    (kept,) = kernel.session.history.runs
    assert (kept.job, kept.label, kept.phase) == (run.job, "wide", "done")


def test_messages_name_the_variable_that_gets_the_run(kernel, golden):
    screen = FakeScreen()
    kernel.over(FakeHost("gpu-a", fails))
    with golden.raises(WorkerFailed) as caught:
        kernel.session.launch(
            kernel.reach(), JobSpec(), kernel.payload, screen, variable="b"
        )
    assert {state.variable for state in [*screen.shown, *screen.finished]} == {"b"}
    assert caught.value.run.state.variable == "b", "it is shown again later"


def test_it_is_remembered_where_a_job_was_begun(kernel):
    a, b = two()
    job = kernel.over(a, b).launch().job
    hosts = kernel.session.begun_at(job).hosts
    assert [host.name for host in hosts] == ["gpu-a", "gpu-b"]
    assert kernel.session.begun_at(job[:-1]) == kernel.session.begun_at(job)
    assert kernel.session.begun_at("another") is None
    assert kernel.session.begun_at("") is None
    assert kernel.session.begun[0] == job


def test_a_host_that_could_not_be_reached_is_not_asked_for_its_jobs(kernel):
    """A name that was mistyped would make each list of jobs wait for it."""
    _, b = two()
    b.error = down("gpu-b")
    with pytest.raises(Unreachable):
        kernel.over(b).launch()
    assert kernel.session.begun == ()


def test_hosts_on_which_a_start_may_have_come_about_are_remembered(kernel):
    a, b = two()
    b.answers[p.StartNode] = lambda _: [p.Refused(what="start_node", error="full")]
    with pytest.raises(PreflightError):
        kernel.over(a, b).launch()
    assert len(kernel.session.begun) == 1


def test_a_run_that_is_interrupted_raises_cancelled_that_carries_it(kernel, golden):
    a, b = two(runs_on)
    with golden.raises(Cancelled) as caught:
        kernel.over(a, b).launch(screen=PressingScreen(has_ranks))
    assert caught.value.run.state.stopping == "interrupted"


def test_an_interrupt_behind_a_run_that_went_well_raises_cancelled_that_carries_its_results(
    kernel, golden
):
    a, b = two()
    with golden.raises(Cancelled) as caught:
        kernel.over(a, b).launch(screen=LatePressingScreen())
    assert sorted(caught.value.run.results) == [0, 1]


# ---- attach


def test_a_job_that_has_failed_raises_its_error_again(kernel):
    a, b = two(fails)
    job = begun(a, b)
    kernel.over(a, b)
    with pytest.raises(WorkerFailed) as caught:
        kernel.session.attach(kernel.reach(), job, FakeScreen())
    assert caught.value.run.job == "j"


# ---- jobs that are let go


def detached(
    kernel: Kernel, a: FakeHost, b: FakeHost, screen: FakeScreen | None = None
) -> Detached:
    """Launch a job on two hosts that is let go as soon as it runs; the hosts list it from then on."""
    a.begins = lambda start: [*runs_on(start), p.PeerState(node_rank=1, state="joined")]

    def let_go(_: p.Message) -> tuple[()]:
        a.agent_sends(p.Detached(why="asked"))
        return ()

    a.answers[p.DetachJob] = let_go
    left = kernel.over(a, b).launch(JobSpec(detach=True), screen)
    assert isinstance(left, Detached)
    for node_rank, host in enumerate((a, b)):
        host.listings = (listing(left.job, node_rank, (a, b), is_detached=True),)
    return left


def test_a_job_that_is_let_go_says_how_it_is_found_again(kernel, golden):
    a, b = two(runs_on)
    screen = FakeScreen()
    left = detached(kernel, a, b, screen)
    assert left.hosts == ("gpu-a", "gpu-b")
    (state,) = screen.finished
    assert state.notices[-1] == str(left)
    golden(left)
    assert_left(a, b)


def test_a_job_that_was_let_go_is_followed_again(kernel, monkeypatch):
    a, b = two(runs_on)
    left = detached(kernel, a, b)
    for rank, host in enumerate((a, b)):
        host.agent_sends(
            p.Ended(rank=rank, restart=0, outcome="returned", result_bytes=0),
            p.EngineEnded(code=0),
            p.Final(reason="done"),
        )
    screen = FakeScreen()
    monkeypatch.setattr(session_module, "screen_for", lambda: screen)
    run = left.attach()
    assert (run.job, run.results[1]) == (left.job, None)
    assert screen.finished == [run.state]


@pytest.mark.parametrize("method", ["attach", "stop"])
def test_a_connection_that_breaks_while_a_job_is_looked_for_asks_the_user_again(
    kernel, monkeypatch, method
):
    a, b = two(runs_on)
    left = detached(kernel, a, b)
    asked: list[str] = []

    def listed_once_more(_: p.Message) -> list[p.Message]:
        a.error = ConnectionLost("gpu-a: the connection ended.")
        return [p.Jobs(jobs=a.listings), p.Jobs()]

    def connect(host: Host, access: Access, asker: Asker) -> FakeConnection:
        ask(asker, host.name, "Verification code:")
        a.error = None
        return a.connect()

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "123456"

    a.answers[p.ListJobs] = listed_once_more
    monkeypatch.setattr(sessions, "connect", connect)
    monkeypatch.setattr(getpass, "getpass", answer)
    monkeypatch.setattr(session_module, "asker_of", lambda: NotebookAsker(can_ask=True))
    monkeypatch.setattr(session_module, "screen_for", FakeScreen)
    for rank, host in enumerate((a, b)):
        if method == "attach":
            host.agent_sends(
                p.Ended(rank=rank, restart=0, outcome="returned", result_bytes=0),
                p.EngineEnded(code=0),
                p.Final(reason="done"),
            )
    getattr(left, method)()
    assert asked == ["gpu-a: Verification code: "]


def test_a_job_that_was_let_go_is_stopped(kernel):
    a, b = two(runs_on)
    left = detached(kernel, a, b)
    left.stop()
    assert (
        a.requests_of(p.StopNode)
        == b.requests_of(p.StopNode)
        == [p.StopNode(grace_s=30.0)]
    )
    assert_left(a, b)


def test_a_job_that_was_let_go_and_has_been_removed_is_not_found(kernel, golden):
    a, b = two(runs_on)
    left = detached(kernel, a, b)
    a.listings = b.listings = ()
    with golden.raises(UsageError):
        left.stop()


# ---- hosts that are kept warm


def test_a_link_rests_between_runs_where_the_host_keeps_something_loaded(kernel):
    a = FakeHost("gpu-a")
    kernel.over(a).launch(access=Access())
    (warming,) = a.requests_of(p.TemplateRequest)
    (start,) = started(a)
    assert warming.owner == kernel.session.kernel
    assert start.warm == warming
    assert [process.is_closed.is_set() for process in a.processes] == [False]
    a.events.clear()
    kernel.launch(access=Access())
    assert len(a.processes) == 1, "the second run began over the link of the first"


def test_nothing_is_loaded_before_it_is_known_what_is_to_run(kernel):
    a = FakeHost("gpu-a")
    kernel.over(a).session.housekeeping.jobs(kernel.reach(Access()))
    assert a.requests == [p.ListJobs()]


def test_down_ends_what_hosts_keep_loaded_and_closes_all_links(kernel):
    a, b = two()
    kernel.over(a, b).launch(access=Access())
    assert kernel.session.down() == ()
    for host in (a, b):
        assert host.requests[-1] == p.EndTemplates(owner=kernel.session.kernel)
        assert len(host.processes) == 1, "it was told over the link that rested"
    assert_left(a, b)


def test_down_connects_to_a_host_whose_link_is_gone(kernel):
    a = FakeHost("gpu-a", fails)
    with pytest.raises(WorkerFailed):
        kernel.over(a).launch(access=Access())
    a.cut()
    assert kernel.session.down() == ()
    assert a.requests[-1] == p.EndTemplates(owner=kernel.session.kernel)
    assert_left(a)


def test_down_names_the_hosts_that_it_could_not_tell(kernel):
    a, b = two()
    kernel.over(a, b).launch(access=Access())
    b.cut()
    b.error = down("gpu-b")
    assert kernel.session.down() == ("gpu-b",)
    assert kernel.session.down() == (), "it is told once"


def test_what_a_host_is_asked_to_keep_while_down_works_is_ended_by_the_next_one(kernel):
    """A run in the background may be reaching it."""
    a, b = two()
    session = kernel.over(a, b).session
    session._warm_hosts._asked[a.host] = Access()

    def reaches_b(_: p.Message) -> list[p.Message]:
        session._warm_hosts._asked[b.host] = Access()
        return [p.Templates()]

    a.answers[p.EndTemplates] = reaches_b
    assert session.down() == ()
    assert session.down() == ()
    assert b.requests[-1] == p.EndTemplates(owner=session.kernel)


# ---- small things


@pytest.mark.parametrize(
    ("host", "pythons", "python"),
    [
        (Host(name="gpu-a"), (), "python3"),
        (LOCALHOST, (), sys.executable),
        (Host(name="gpu-a"), (("gpu-a", "/opt/python"), ("", "/other")), "/opt/python"),
        (LOCALHOST, (("", "/other"),), "/other"),
    ],
)
def test_which_python_a_host_starts(host, pythons, python):
    assert Access(pythons=pythons).interpreter(host) == python


def test_no_host_means_this_machine(kernel):
    here = FakeHost("localhost")
    reaching = kernel.over(here).session.reach((), COLD, NotebookAsker(can_ask=False))
    assert reaching.fleet.hosts == (LOCALHOST,)
    reaching.wait()
    reaching.cancel()
    assert_left(here)


def test_files_are_fetched_after_a_run_and_one_that_can_not_be_had_loses_nothing(
    capsys, golden
):
    class FetchedRun:
        unfetched = ()

        def fetch(self, pattern):
            if pattern == "no":
                raise UsageError("No file of the run fits 'no'.", "Look.")
            return [Path("ck/a\x1b[31m\n.pt"), Path("ck/b.pt")]

    run = FetchedRun()
    fetch(run, ("ck/*", "no"))
    assert run.unfetched == ("no",)
    said = capsys.readouterr().err
    assert said.startswith("fetched ck/a.pt, ck/b.pt\n")
    golden(said)

"""What a session asks hosts apart from a run: each question over real links, to hosts that answer by script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmagic.connection.first_links import FirstLinks
from distmagic.errors import (
    Cancelled,
    ConnectionLost,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.names import owner
from distmagic.planning.jobs import Job
from distmagic.planning.start_messages import start_messages
from distmagic.remote.wire import protocol as p
from distmagic.request.spec import JobSpec
from distmagic.session.housekeeping import Stopped
from distmagic.session.packages import Packages
from distmagic.session.session import Session
from tests.builders.hosts import HANG_UP, FakeHost, down, reach, runs_on
from tests.builders.jobs import assert_left, begun, listing, payload_in, press, two
from tests.builders.plans import A, B, plan_for
from tests.lab import wait_until
from tests.lab.waiting import HANG_S


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.close()


# ---- jobs


def test_jobs_of_all_hosts_are_put_together_the_oldest_first(session):
    a, b = two()
    a.listings = (listing("a-late", 0, [a]), listing("j", 0, [a, b], began_ago_s=9.0))
    b.listings = (listing("j", 1, [a, b], is_running=False, reason="done"),)
    jobs = session.housekeeping.jobs(reach(a, b))
    assert [(job.name, job.host_indices, job.running) for job in jobs] == [
        ("j", (0, 1), (0,)),
        ("a-late", (0,), (0,)),
    ]
    assert_left(a, b)


def test_jobs_are_found_while_a_host_is_down(session):
    a, b = two()
    a.error = down("gpu-a")
    b.listings = (listing("j", 1, [a, b]),)
    reaching = reach(a, b)
    (job,) = session.housekeeping.jobs(reaching)
    assert (job.host_indices, job.missing) == ((-1, 1), ("gpu-a",))
    assert reaching.absent == {0: "gpu-a: no answer."}


def test_jobs_are_not_found_where_no_host_is_up(session):
    a = FakeHost("gpu-a")
    a.error = down("gpu-a")
    with pytest.raises(Unreachable) as caught:
        session.housekeeping.jobs(reach(a))
    assert caught.value is a.error


# ---- add


class ElasticJob:
    """Job "j", which runs on gpu-a and gpu-b and takes in the hosts that its lead is asked for."""

    def __init__(self, tmp_path: Path) -> None:
        self.lead = FakeHost("gpu-a", runs_on)
        spec = JobSpec(nnodes=(1, 4), max_restarts=1)
        plan = plan_for(spec, A, B, job="j")
        self.start, _ = start_messages(plan, payload_in(tmp_path), "00ff", [None, None])
        self.hosts = list(self.start.hosts)
        self.found: Job = begun(self.lead, terms=plan.terms)
        self.lead.answers[p.GetStart] = lambda _: [p.LeadStart(start=self.start)]
        self.lead.answers[p.AddNode] = self.count

    def count(self, request: p.Message) -> list[p.Message | bytes]:
        assert isinstance(request, p.AddNode)
        self.hosts.append(request.host)
        return [p.NodeAdded(request_id=request.request_id, hosts=tuple(self.hosts))]


def newcomers() -> tuple[FakeHost, FakeHost]:
    return FakeHost("gpu-c", runs_on), FakeHost("gpu-d", runs_on)


def test_hosts_come_to_a_job_and_each_is_told_of(session, tmp_path):
    job = ElasticJob(tmp_path)
    c, d = newcomers()
    told: dict[str, int] = {}
    session.housekeeping.add(reach(job.lead, c, d), job.found, told.__setitem__)
    assert told == {name: job.hosts.index(name) for name in ("gpu-c", "gpu-d")}
    for host in (c, d):
        (start,) = host.requests_of(p.StartNode)
        assert (start.job, start.node_rank) == ("j", told[host.host.name])
    assert_left(job.lead, c, d)


def test_a_job_that_takes_in_no_host_now_says_why_and_the_links_are_closed(
    session, tmp_path, golden
):
    job = ElasticJob(tmp_path)
    c, _ = newcomers()
    job.lead.answers[p.AddNode] = lambda _: [
        p.Refused(what="add_node", error="it is about to end")
    ]
    told: list[object] = []
    with golden.raises(UsageError):
        session.housekeeping.add(
            reach(job.lead, c), job.found, lambda *what: told.append(what)
        )
    assert told == []
    assert c.requests_of(p.StartNode) == []
    assert_left(job.lead, c)


def test_a_job_that_its_host_does_not_have_any_more_takes_in_nobody(
    session, tmp_path, golden
):
    job = ElasticJob(tmp_path)
    c, _ = newcomers()
    job.lead.answers[p.FollowJob] = lambda _: [
        p.Refused(what="follow_job", error="there is no job j here")
    ]
    with golden.raises(UsageError):
        session.housekeeping.add(reach(job.lead, c), job.found, lambda *_: None)
    assert c.requests_of(p.StartNode) == []
    assert_left(job.lead, c)


def test_one_host_that_does_not_start_does_not_keep_the_other_one_away(
    session, tmp_path
):
    job = ElasticJob(tmp_path)
    c, d = newcomers()
    c.answers[p.StartNode] = lambda _: [p.Refused(what="start_node", error="no room")]
    told: dict[str, int] = {}
    with pytest.raises(PreflightError) as caught:
        session.housekeeping.add(reach(job.lead, c, d), job.found, told.__setitem__)
    assert caught.value.host == "gpu-c"
    assert list(told) == ["gpu-d"]
    assert_left(job.lead, c, d)


def test_an_interrupt_while_hosts_come_says_where_to_look(session, tmp_path, golden):
    job = ElasticJob(tmp_path)
    c, _ = newcomers()
    with golden.raises(Cancelled):
        session.housekeeping.add(reach(job.lead, c), job.found, lambda *_: press())
    assert_left(job.lead, c)


# ---- stop


def test_a_job_is_stopped_on_all_of_its_nodes_that_run(session):
    a, b = two(runs_on)
    job = begun(a, b)
    assert session.housekeeping.stop(reach(a, b), job) == Stopped(
        ended=("gpu-a", "gpu-b"), unknown={}
    )
    for node_rank, host in enumerate((a, b)):
        assert host.requests == [
            p.FollowJob(job="j", node_rank=node_rank),
            p.StopNode(grace_s=30.0),
        ]
    assert_left(a, b)


def test_a_node_that_has_ended_is_not_stopped(session):
    a, b = two(runs_on)
    b.listings = (listing("j", 1, [a, b], is_running=False),)
    a.listings = (listing("j", 0, [a, b]),)
    a.agent_sends(p.Notice(text="it runs"))
    (job,) = session.housekeeping.jobs(reach(a, b))
    session.housekeeping.stop(reach(a, b), job)
    assert len(a.requests_of(p.StopNode)) == 1
    assert b.requests_of(p.StopNode) == []


def test_a_host_that_breaks_off_a_stop_is_told_of_and_the_links_are_closed(session):
    a, b = two(runs_on)
    job = begun(a, b)
    b.answers[p.StopNode] = lambda _: HANG_UP
    stopped = session.housekeeping.stop(reach(a, b), job)
    assert (stopped.ended, list(stopped.unknown), stopped.was_interrupted) == (
        ("gpu-a",),
        ["gpu-b"],
        False,
    )
    with pytest.raises(ConnectionLost, match=r"^gpu-b: "):
        stopped.raise_unknown()
    assert_left(a, b)


def test_a_job_is_stopped_where_a_host_of_it_has_gone_meanwhile(session):
    a, b = two(runs_on)
    job = begun(a, b)
    b.error = down("gpu-b")
    stopped = session.housekeeping.stop(reach(a, b), job)
    assert (stopped.ended, str(stopped.unknown["gpu-b"])) == (
        ("gpu-a",),
        "gpu-b: no answer.",
    )
    assert a.requests_of(p.StopNode) == [p.StopNode(grace_s=30.0)]


def test_one_interrupt_ends_the_waiting_for_a_stop(session, golden):
    a, b = two(runs_on)
    job = begun(a, b)
    may_end = threading.Event()

    def hang(_: p.Message) -> list[p.Message | bytes]:
        wait_until(
            lambda: any(isinstance(event, p.Final) for event in a.events),
            "the end of the other host's node",
        )
        press()
        may_end.wait(HANG_S)
        return []

    b.answers[p.StopNode] = hang
    try:
        stopped = session.housekeeping.stop(reach(a, b), job)
    finally:
        may_end.set()
    assert stopped.was_interrupted
    golden(stopped.unknown["gpu-b"])
    assert_left(a, b)


# ---- logs


def test_the_log_of_a_rank_is_what_all_hosts_have_of_it(session, golden):
    a, b = two()
    job = begun(a, b)
    a.results |= {
        "rank1.stdout.log": b"first out\n",
        "rank1.stderr.log": b"first err\n",
    }
    b.results |= {"rank1.stdout.log": b"then \xff here\n"}
    golden(session.housekeeping.logs(reach(a, b), job, 1))
    assert_left(a, b)


def test_of_a_long_log_the_newest_lines_are_shown_and_where_all_of_it_is(
    session, golden
):
    a, b = two()
    job = begun(a, b)
    line = b"0123456789abcde\n"
    a.results["rank1.stdout.log"] = b"begins\n" + 200_000 * line
    a.results["rank1.stderr.log"] = b"one line\n"
    shown = session.housekeeping.logs(reach(a, b), job, 1)
    first, *rest = shown.splitlines(keepends=True)
    # Of 2 MiB each stream has a half, and its first line may be a part of one.
    golden(first)
    assert rest == [*65_535 * [line.decode()], "one line\n"]


def test_what_is_shown_of_logs_is_shared_by_all_hosts_that_have_one(session):
    """Of a line without an end, as of a bar, the newest part is shown."""
    a, b = two()
    job = begun(a, b)
    for host in (a, b):
        host.results["torchrun.stdout.log"] = 3 * (1 << 20) * b"."
        host.results["torchrun.stderr.log"] = 3 * (1 << 20) * b"," + b"\n"
    shown = session.housekeeping.logs(reach(a, b), job, -1)
    assert [shown.count(char) for char in ".,"] == [
        2 * (1 << 19) + 4 * 5,  # and those of the lines that say what is left out
        2 * ((1 << 19) - 1) + 4 * 3,
    ]
    assert shown.count(" bytes of stdout not shown; ") == 2


def test_a_rank_that_ran_nowhere_has_no_log(session):
    a, b = two()
    job = begun(a, b)
    assert session.housekeeping.logs(reach(a, b), job, 7) is None


def test_a_rank_that_wrote_nothing_has_an_empty_log(session):
    a, b = two()
    job = begun(a, b)
    a.results["rank0.stdout.log"] = b""
    assert session.housekeeping.logs(reach(a, b), job, 0) == ""


# ---- stacks


def tell_stacks(host: FakeHost, rank: int, function: str) -> None:
    """Have a host tell that a rank is in this function of the user."""

    def answer(request: p.Message) -> list[p.Message | bytes]:
        assert isinstance(request, p.DumpStacks)
        frame = p.Frame(file="Cell In[3]", line=7, function=function, mine=True)
        thread = p.Thread(frames=(frame,))
        stacks = p.Stacks(
            request_id=request.request_id, rank=rank, local_rank=0, threads=(thread,)
        )
        return [stacks, p.StacksDone(request_id=request.request_id, ranks=1)]

    host.answers[p.DumpStacks] = answer


def test_all_ranks_are_asked_where_they_are_and_nothing_is_changed(session, golden):
    a, b = two(runs_on)
    job = begun(a, b)
    tell_stacks(a, 0, "train")
    tell_stacks(b, 1, "load_batch")
    explanation = session.housekeeping.stacks(reach(a, b), job)
    assert explanation.unanswered == ()
    golden(*sorted(explanation.sentence.split("; ")))
    for host in (a, b):
        assert [type(request) for request in host.requests] == [
            p.FollowJob,
            p.DumpStacks,
        ]
    assert_left(a, b)


@pytest.mark.parametrize("is_down", [True, False])
def test_a_host_that_does_not_tell_is_named(session, is_down, golden):
    a, b = two(runs_on)
    job = begun(a, b)
    tell_stacks(a, 0, "train")
    if is_down:
        b.error = down("gpu-b")
    else:
        b.answers[p.DumpStacks] = lambda _: HANG_UP
    explanation = session.housekeeping.stacks(reach(a, b), job)
    assert explanation.unanswered == ("gpu-b",)
    golden(explanation.sentence)


# ---- what hosts keep


def reaching_with_one_down() -> tuple[FirstLinks, FakeHost]:
    a, b = two()
    b.error = down("gpu-b")
    return reach(a, b), a


def test_jobs_are_removed_by_name_from_all_hosts(session):
    a, b = two()
    a.listings = (listing("j", 0, [a, b]), listing("old", 0, [a]))
    jobs = session.housekeeping.jobs(reach(a, b))
    assert session.housekeeping.remove(reach(a, b), [*jobs, jobs[0]]) == 4 * 10, (
        "bytes of two jobs on each of two hosts"
    )
    for host in (a, b):
        assert host.requests_of(p.RemoveJob) == [
            p.RemoveJob(job="j"),
            p.RemoveJob(job="old"),
        ]
    assert_left(a, b)


def test_what_is_removed_for_an_owner_each_host_decides_by_what_it_knows(session):
    a, b = two()
    mine = p.JobTerms(lease_s=60.0, owner="nb")
    a.listings = (listing("j", 0, [a, b], terms=mine, is_running=False),)
    b.listings = (listing("j", 1, [a, b], is_running=False),)
    (job,) = session.housekeeping.jobs(reach(a, b))
    assert job.terms.owner == "nb", "as gpu-a says"
    session.housekeeping.remove(reach(a, b), [job], "nb")
    assert b.requests_of(p.RemoveJob) == [p.RemoveJob(job="j", owner="nb")]
    assert_left(a, b)


def test_jobs_are_removed_from_the_hosts_that_are_up(session):
    reaching, a = reaching_with_one_down()
    job = begun(a)
    assert session.housekeeping.remove(reaching, [job]) == 10
    assert list(reaching.absent) == [1]


def test_a_job_that_runs_is_not_removed(session):
    a = FakeHost("gpu-a", runs_on)
    job = begun(a)
    a.answers[p.RemoveJob] = lambda _: [
        p.Refused(what="remove_job", error="job j runs")
    ]
    with pytest.raises(PreflightError, match=r"^gpu-a: job j runs\.$"):
        session.housekeeping.remove(reach(a), [job])
    assert_left(a)


@pytest.mark.parametrize("removes", [False, True])
def test_what_hosts_keep_of_what_was_sent_is_counted_and_removed_only_if_wanted(
    session, removes
):
    reaching, a = reaching_with_one_down()
    assert session.housekeeping.cached(reaching, removes=removes, owner="nb") == 20
    assert a.requests == [p.PruneBlobs(removes=removes, owner="nb")]
    assert_left(a)


def test_what_hosts_keep_loaded_is_told_for_each_host_and_none_for_one_that_is_down(
    session,
):
    reaching, a = reaching_with_one_down()
    template = p.Template(pid=7, age_s=9.0, idle_s=1.0)
    a.answers[p.ListTemplates] = lambda _: [p.Templates(templates=(template,))]
    assert session.housekeeping.templates(reaching) == ((template,), None)
    assert a.requests == [p.ListTemplates(owner=session.kernel)]
    assert_left(a)


def test_working_directories_are_told_and_removed_where_hosts_are_up(session):
    reaching, a = reaching_with_one_down()
    kept = p.KeptWorkDir(
        name="train", origin="nb", size_bytes=7, age_s=1.0, is_used=False
    )
    a.answers[p.ListWorkDirs] = lambda _: [p.WorkDirs(dirs=(kept,))]
    assert session.housekeeping.work_dirs(reaching) == {a.host.name: (kept,)}
    assert_left(a)
    reaching, a = reaching_with_one_down()
    assert (
        session.housekeeping.remove_work_dirs(
            reaching, {a.host.name: ["train", "x"], "gpu-z": ["y"]}
        )
        == 60
    )
    assert a.requests == [p.RemoveWorkDir(name="train"), p.RemoveWorkDir(name="x")]
    assert_left(a)


# ---- environments

PACKAGES = Packages(name="train", requirements=("torch==2.9.0",))
READY = p.EnvironmentReady(python="/envs/.1/bin/python", was_there=False, elapsed_s=3.0)


def test_environments_of_all_hosts_are_made_and_a_host_that_cant_is_named(
    session, golden
):
    a, b = two()
    said = p.EnvironmentProgress(line="Downloading torch")
    shown: list[dict[str, p.EnvironmentProgress]] = []
    is_shown = threading.Event()

    def show(latest):
        shown.append(latest)
        if latest == {"gpu-a": said}:
            is_shown.set()

    def second(_: p.Message) -> list[p.Message | bytes]:
        assert is_shown.wait(HANG_S)
        return [p.Refused(what="sync_environment", error="apex could not be built")]

    a.answers[p.SyncEnvironment] = lambda _: [said, READY]
    b.answers[p.SyncEnvironment] = second
    synced = session.housekeeping.sync_environment(reach(a, b), PACKAGES, show)
    assert synced.ready == {"gpu-a": READY}
    golden(synced.error)
    (request,) = a.requests_of(p.SyncEnvironment)
    assert request == p.SyncEnvironment(
        name="train", requirements=("torch==2.9.0",), owner=owner()
    )
    assert_left(a, b)


def test_an_interrupt_ends_the_conversations_in_which_environments_are_made(
    session, golden
):
    a, b = two()
    a.answers[p.SyncEnvironment] = lambda _: []  # it says nothing more
    b.answers[p.SyncEnvironment] = lambda _: [READY]
    with golden.raises(Cancelled):
        session.housekeeping.sync_environment(reach(a, b), PACKAGES, lambda _: press())
    assert a.is_left
    assert b.is_left

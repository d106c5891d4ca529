"""Jobs that several hosts list, put together and chosen by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.errors import UsageError
from distmagic.notebook.job_tables import table
from distmagic.planning.jobs import (
    Job,
    check_orphans,
    choose,
    found_jobs,
    known_whereabouts,
    whereabouts,
)
from distmagic.remote.wire.protocol import PROTOCOL, JobListing, JobTerms, MetricRow
from distmagic.request.hosts import parse_hosts


def listed(
    job: str,
    node_rank: int = 0,
    *,
    hosts: str = "a b",
    running: bool = False,
    reason: str = "done",
) -> JobListing:
    return JobListing(
        job=job, node_rank=node_rank, hosts=tuple(hosts.split()), protocol=PROTOCOL, terms=JobTerms(lease_s=60.0),
        began_s=1.0, began_ago_s=7300.0 - len(job), is_running=running, reason="" if running else reason, size_bytes=500_000,
    )  # fmt: skip


JOBS = found_jobs(["one", "two"], [
    [listed("x1", 1), listed("xyz", 1, running=True)],
    [listed("x1", 0, reason="failed"), listed("xyz", 0, running=True), listed("yyyy", 2, hosts="a b c", reason="")],
])  # fmt: skip


def test_nodes_of_one_job_are_put_together_whatever_the_order_of_the_hosts():
    assert [job.name for job in JOBS] == ["x1", "xyz", "yyyy"]
    assert [job.host_indices for job in JOBS] == [(1, 0), (1, 0), (-1, -1, 1)]
    assert [job.phase for job in JOBS] == ["failed", "running", "died"]
    assert [job.size_bytes for job in JOBS] == [1_000_000, 1_000_000, 500_000]


def test_a_node_beyond_the_job_s_hosts_does_not_run():
    (job,) = found_jobs(
        ["one"],
        [
            [
                listed("x1", 7, running=True),
                listed("x1", -1, running=True),
                listed("x1", 1, running=True),
            ]
        ],
    )
    assert job.running == (1,)


def test_a_node_that_two_hosts_list_is_where_it_runs():
    """Hosts with one name and one home see each other's files, and each sees only its own processes."""
    here, there = listed("x1", 0, running=True), listed("x1", 1, running=True)
    gone = [replace(one, is_running=False) for one in (here, there)]
    (job,) = found_jobs(["one", "two"], [[here, gone[1]], [gone[0], there]])
    assert (job.host_indices, job.running) == ((0, 1), (0, 1))
    (job,) = found_jobs(["one", "two"], [[gone[0], there], [here, gone[1]]])
    assert (job.host_indices, job.running) == ((1, 0), (0, 1))


def places(asked: str, *answers: list[JobListing]) -> list[tuple[int, ...]]:
    """Return for each job that is found where its nodes are, as indices into the hosts that were asked."""
    return [job.host_indices for job in found_jobs(asked.split(), answers)]


EVIL = listed("x1", hosts="gpu-a evil", running=True)


@pytest.mark.parametrize(("asked", "answers", "found"), [
    ("gpu-a evil", [[listed("x1", hosts="gpu-a evil")], [EVIL, listed("x1", 1, hosts="gpu-a evil")]], (0, 1)),
    ("evil gpu-a", [[EVIL], [listed("x1", hosts="gpu-a evil")]], (1, -1)),
    # No host is asked under the name of the first node: one that is another node's is the last to tell.
    ("evil one", [[EVIL], [listed("x1", hosts="gpu-a evil")]], (1, -1)),
])  # fmt: skip
def test_no_host_passes_for_another_one(asked, answers, found):
    assert places(asked, *answers) == [found]


def test_localhost_is_each_machine_s_own():
    """A notebook on gpu-a began the job on its own machine; this one, on another, asks its own machine too."""
    nodes = [listed("x1", rank, hosts="localhost gpu-b") for rank in (0, 1)]
    assert places("localhost gpu-a", [], [listed("x1", hosts="localhost")]) == [(1,)]
    assert places("gpu-a localhost", nodes[:1], nodes[1:]) == [(0, 1)]
    # A job of this machine is told by this machine.
    running = listed("x1", hosts="localhost", running=True)
    assert places("evil localhost", [running], [listed("x1", hosts="localhost")]) == [(1,)]  # fmt: skip


@pytest.mark.parametrize("of_gpu_a", [[], [listed("other", hosts="gpu-a")]])
def test_a_host_that_says_nothing_of_a_node_has_nobody_who_does(of_gpu_a):
    jobs = found_jobs(["gpu-a", "evil"], [of_gpu_a, [EVIL]])
    assert [job.name for job in jobs] == [one.job for one in of_gpu_a]


def test_one_host_under_two_names_is_two_nodes_and_under_one_of_them_both():
    nodes = [listed("x1", rank, hosts="dm1 dm1b") for rank in (0, 1)]
    assert places("dm1b dm1", nodes, nodes) == [(1, 0)]
    assert places("dm1", nodes) == [(0, 0)]
    assert places("dm1c", nodes) == [(0, 0)]


def test_hosts_of_one_home_tell_each_of_its_own_node():
    nodes = [listed("x1", rank, hosts="dm1 dm2") for rank in (0, 1)]
    assert places("dm2 dm1", nodes, nodes) == [(1, 0)]
    assert places("dm2 other", nodes, nodes) == [(1, 0)]


def test_only_a_job_of_this_notebook_that_nobody_here_follows_is_an_orphan(golden):
    def jobs(owner: str) -> tuple[Job, ...]:
        terms = JobTerms(lease_s=60.0, owner=owner)
        return found_jobs(["a"], [[replace(listed("x1", running=True), terms=terms)]])

    with golden.raises(UsageError):
        check_orphans(jobs("me@a:/x.ipynb"), "me@a:/x.ipynb")
    check_orphans(jobs("me@a:/x.ipynb"), "me@a:/x.ipynb", {"x1"})
    check_orphans(jobs("me@a:/y.ipynb"), "me@a:/x.ipynb")


def test_a_job_is_chosen_by_the_beginning_of_its_name():
    assert choose(JOBS, "x1").name == "x1"
    assert choose(JOBS, "xy").name == "xyz"


def test_a_job_is_chosen_by_the_name_of_its_ranks_a_running_one_first():
    def job(name: str, *, running: bool) -> JobListing:
        terms = JobTerms(lease_s=60.0, stays=True, call="%%ranks exp")
        return replace(listed(name, hosts="a", running=running), terms=terms)

    ended = [job("z", running=False), job("zz", running=False)]
    assert choose(found_jobs(["a"], [ended]), "exp").name == "zz"
    others = [job("zzz", running=True), listed("exponent", hosts="a")]
    jobs = found_jobs(["a"], [[*others, *ended]])
    assert choose(jobs, "exp").name == "zzz"
    assert choose(jobs, "expo").name == "exponent"


@pytest.mark.parametrize("name", [
    "x",
    "q",
    "",
])  # fmt: skip
def test_a_name_that_fits_none_or_several(name, golden):
    with golden.raises(UsageError):
        choose(JOBS, name)


def test_the_hosts_of_a_job_come_in_the_order_of_its_nodes():
    assert [host.name for host in whereabouts(JOBS[0], parse_hosts("one,two"))] == [
        "two",
        "one",
    ]


def test_a_job_of_which_a_host_is_missing(golden):
    with golden.raises(UsageError):
        whereabouts(JOBS[2], parse_hosts("one,two"))
    assert [
        host.name for host in known_whereabouts(JOBS[2], parse_hosts("one,two"))
    ] == ["two"]
    assert (JOBS[2].known, JOBS[2].missing) == ((2,), ("a", "b"))


def test_a_host_that_did_not_answer_is_found_by_its_name(golden):
    assert [host.name for host in whereabouts(JOBS[2], parse_hosts("b,two,a"))] == [
        "a",
        "b",
        "two",
    ]
    with golden.raises(UsageError):
        whereabouts(JOBS[2], parse_hosts("a,two"))


def test_the_table(golden):
    assert table([]) == "no jobs on these hosts"
    terms = JobTerms(lease_s=60.0, call="train(3)", ranks=8)
    reported = MetricRow(at_s=1.0, metrics={"loss": 0.5})
    run = replace(listed("xyz", 0, running=True), terms=terms, reported=reported)
    jobs = found_jobs(["one", "two"], [[run], [listed("xyz", 1), listed("x1", reason="failed"), listed("x1", 1), listed("yyyy", 2, hosts="a b c", reason="")]])  # fmt: skip
    golden(*table(jobs).splitlines())

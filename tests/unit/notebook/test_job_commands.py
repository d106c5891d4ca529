"""`%distributed jobs | attach | add | stop | clean`, over a fake session."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from distmagic.connection.link_opener import Fleet
from distmagic.errors import Cancelled, Unreachable, UsageError
from distmagic.names import own_origin, owner
from distmagic.notebook.job_tables import kept_table, table
from distmagic.notebook.magic import Magics
from distmagic.planning.jobs import Job
from distmagic.remote.wire.protocol import JobTerms, KeptWorkDir, Template
from distmagic.request.access import Access
from distmagic.request.hosts import Host, parse_hosts
from distmagic.session.housekeeping import Stopped
from distmagic.systems.slurm.srun_words import source
from tests import scenes
from tests.builders.terms import on_terms
from tests.scenes import done
from tests.unit.notebook.fakes import Lab

ESCAPE = "\x1b]52;c;AAAA\x07"  # has a terminal write to the clipboard
MINE = owner()  # of this process

TERMS = JobTerms(lease_s=60.0, owner=MINE, min_nodes=2)
ENDED = Job(
    name="mine", hosts=("gpu-a", "gpu-b"), host_indices=(0, 1), running=(), terms=TERMS, is_detached=False,
    reason="done", size_bytes=10**6, age_s=1.0, began_ago_s=60.0,
)  # fmt: skip
THEIRS = replace(ENDED, name="theirs", terms=replace(TERMS, owner="laptop:/you.ipynb"))
RUNNING = replace(
    ENDED, name="busy", running=(0, 1), reason="", terms=replace(TERMS, max_nodes=3)
)


def fleet(hosts: str, access: Access | None = None) -> Fleet:
    return Fleet(hosts=parse_hosts(hosts), access=access or Access())


@pytest.fixture
def jobs(lab: Lab) -> Lab:
    lab.session.found = (ENDED, THEIRS, RUNNING)
    lab.value("%distributed hosts gpu-a gpu-b")
    lab.session.log.clear()
    return lab


@pytest.mark.parametrize(("reason", "words"), [
    ("gang", "no UDP between hosts"), ("lease", "lease ran out"), ("rendezvous", "hosts did not meet"), ("lost", "lost"),
])  # fmt: skip
def test_the_table_says_in_words_how_a_job_ended(reason, words):
    _, row = table([replace(ENDED, reason=reason)]).splitlines()
    assert row.split("  ")[1] == words


def test_the_table_names_the_owner():
    rows = table(
        [ENDED, THEIRS, replace(ENDED, name="script", terms=replace(TERMS, owner=""))],
        MINE,
    ).splitlines()
    assert [row.split("1.0 MB")[1].strip() for row in rows[1:]] == [
        "this notebook",
        "laptop:/you.ipynb",
        "",
    ]


def test_a_row_says_what_was_run_for_how_long_and_what_came_of_it():
    terms = replace(TERMS, call="train(steps=500, " + 40 * "x" + ")", ranks=8)
    job = replace(
        ENDED, terms=terms, age_s=754.0, metrics={"loss": 0.123456, "acc": 0.9}
    )
    titles, row = table([job], MINE).splitlines()
    for title, value in {
        "took": "12 min 34 s",
        "ranks": "8",
        "call": "train(steps=500, xxxxxxxxxxxxxxxxxxxx...",
        "last values": "loss 0.1235, acc 0.9",
        "owner": "this notebook",
    }.items():
        assert row[titles.index(title) :].startswith(value), title
    hostile = replace(job, metrics={ESCAPE: 1.0}, terms=replace(terms, call=ESCAPE))
    assert "\x1b" not in table([hostile])


def test_runs_that_wait_come_before_all_jobs_and_say_for_whom():
    state = on_terms(scenes.waiting(), call="train(3)")
    hostile = on_terms(replace(state, job="hostile"), call=ESCAPE)
    shown = table([ENDED], MINE, [state, hostile])
    titles, last, first, job, *below = shown.splitlines()
    assert last.split()[0] == "hostile"
    assert job.split()[0] == "mine"
    for title, value in {
        "job": state.job,
        "state": "waiting ",
        "hosts": "gpu-a, gpu-b",
        "call": "train(3)",
        "owner": "this notebook",
    }.items():
        assert first[titles.index(title) :].startswith(value), title
    why = "waits on gpu-b for device 0, held by job 0612-100100-77ab of ann@laptop:/nb/train.ipynb since 10:01; 1 more run comes before"
    assert below == [f"{state.job} {why}", f"hostile {why}"]
    assert "\x1b" not in shown
    assert table([], MINE, [state]).splitlines()[1].split() == first.split()


def test_the_newest_job_is_first_and_seconds_count():
    old = replace(ENDED, name="old", began_ago_s=50.0)
    new = replace(ENDED, name="new", began_ago_s=12.0)
    rows = table([old, new]).splitlines()
    assert [row.split()[0] for row in rows] == ["job", "new", "old"]
    assert "12 s ago" in rows[1]
    assert "50 s ago" in rows[2]


def test_a_job_of_this_kernel_is_reached_where_and_as_it_was_begun(jobs):
    access = Access(ssh_config="of the cell")
    begun = parse_hosts("gpu-c:1")
    jobs.session.begun_places = {"busy": Fleet(hosts=begun, access=access)}
    jobs.session.stopped = Stopped(ended=("gpu-c",), unknown={})
    jobs.session.found = (
        replace(RUNNING, hosts=("gpu-c",), host_indices=(0,), running=(0,)),
    )
    jobs.value("%distributed stop busy")
    assert [host.name for host in jobs.session.hosts] == ["gpu-c"]
    assert jobs.session.access == access


@pytest.mark.parametrize(
    "log",
    [
        "one\ntwo\n",
        "no end of a line",
        "\x1b[31mred\n",
        "\x1b[31mred\x1b[0m\n",
        "\x1b[1;8mbold\x1b[2J",
        "",
    ],
)
def test_a_log_that_is_shown_leaves_the_terminal_as_it_was(
    jobs, monkeypatch, capsys, log, golden
):
    monkeypatch.setattr(jobs.session, "logs", lambda *_, **__: log, raising=False)
    capsys.readouterr()
    jobs.value("%distributed logs busy 0")
    golden(capsys.readouterr().out)


def test_a_log_is_asked_for_in_the_order_of_time(jobs, monkeypatch, capsys):
    def logs(reaching, job, rank, *, by_time):
        return f"rank {rank} by time: {by_time}"

    monkeypatch.setattr(jobs.session, "logs", logs, raising=False)
    jobs.value("%distributed logs busy 3 --by-time")
    jobs.value("%distributed logs busy 3")
    out = capsys.readouterr().out
    assert out == "rank 3 by time: True\nrank 3 by time: False\n"


def test_clean_all_takes_what_this_notebook_began(jobs, capsys, golden):
    capsys.readouterr()
    jobs.value("%distributed clean all")
    shown = capsys.readouterr().out
    assert "remove mine" in jobs.session.log
    assert set(jobs.session.cleaned_for) == {MINE}
    assert "theirs" not in shown
    golden(shown)


def test_clean_all_of_everybody(jobs, capsys):
    capsys.readouterr()
    jobs.value("%distributed clean all --everybody")
    assert "remove mine theirs" in jobs.session.log
    assert set(jobs.session.cleaned_for) == {""}
    assert capsys.readouterr().out.endswith("removed: 2.5 MB\n")


def test_a_job_of_somebody_else_can_be_named(jobs):
    jobs.value("%distributed clean theirs")
    assert "remove theirs" in jobs.session.log
    assert "clear" not in jobs.session.log
    assert jobs.session.cleaned_for == ["laptop:/you.ipynb"], "as what it was shown"


def test_clean_alone_removes_nothing_and_tells_what_all_would_leave(
    jobs, capsys, golden
):
    capsys.readouterr()
    jobs.value("%distributed clean")
    assert {entry for entry in jobs.session.log if entry != "reach"} == {"measure"}
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    [
        "clean busy",
        "clean mine --everybody",
        "stop mine",
        "stop busy --hard",
        "attach",
        "logs busy 0 1",
        "logs busy x",
        "debug --rank 2",
        "debug busy",
        "end exp",
    ],
)
def test_a_wrong_command_about_jobs(jobs, line, golden):
    error = jobs.error(f"%distributed {line}")
    assert isinstance(error, UsageError)
    golden(error)


LATE = Unreachable(
    "gpu-b", "connected, but job busy did not confirm its end within 60 s."
)


@pytest.mark.parametrize(
    ("hosts", "more"),
    [(("gpu-a", "gpu-b"), {}), (("gpu-b",), {}), (("gpu-b",), {"is_detached": True})],
    ids=["several hosts", "one host", "one host, detached"],
)
def test_a_stop_says_of_each_host_whether_the_job_has_ended_and_what_ends_it_else(
    jobs, capsys, hosts, more, golden
):
    indices = tuple(range(len(hosts)))
    jobs.session.found = (
        replace(RUNNING, hosts=hosts, host_indices=indices, running=indices, **more),
    )
    jobs.session.stopped = Stopped(ended=hosts[:-1], unknown={"gpu-b": LATE})
    capsys.readouterr()
    jobs.value("%distributed stop busy")
    *begin, unknown, end = capsys.readouterr().out.splitlines()
    assert begin == [f"Job busy was stopped on {name}" for name in hosts[:-1]]
    golden(unknown, end)


def test_a_stop_that_is_interrupted_says_what_is_known_and_fails_the_cell(
    jobs, capsys, golden
):
    late = Unreachable("gpu-b", "the wait for the job's end was interrupted.")
    jobs.session.stopped = Stopped(
        ended=("gpu-a",), unknown={"gpu-b": late}, was_interrupted=True
    )
    capsys.readouterr()
    error = jobs.error("%distributed stop busy")
    assert isinstance(error, Cancelled)
    golden(error)
    shown = capsys.readouterr().out
    golden(shown)


def test_a_stop_names_the_hosts_that_could_not_be_asked(jobs, capsys, golden):
    jobs.session.found = (replace(RUNNING, host_indices=(0, -1), running=(0,)),)
    jobs.session.stopped = Stopped(ended=("gpu-a",), unknown={})
    capsys.readouterr()
    jobs.value("%distributed stop busy")
    golden(capsys.readouterr().out)


def test_the_newest_running_job_is_viewed_and_detached_ones_come_first(jobs):
    older = replace(RUNNING, name="older", began_ago_s=9.0)
    newer = replace(RUNNING, name="newer", began_ago_s=8.0)
    jobs.session.found = (newer, older, replace(ENDED, began_ago_s=7.0))
    assert jobs.value("%distributed view") == "the run of newer"
    assert jobs.value("%distributed view older") == "the run of older"
    jobs.session.found = (newer, replace(older, is_detached=True))
    assert jobs.value("%distributed view") == "the run of older"


def test_a_job_of_this_kernel_on_other_hosts_is_viewed_too(jobs, golden):
    jobs.session.found = (ENDED,)
    golden(jobs.error("%distributed view"))
    begun = parse_hosts("gpu-c:1")
    jobs.session.begun = ("busy",)
    jobs.session.begun_places = {"busy": Fleet(hosts=begun, access=Access())}
    there = replace(RUNNING, hosts=("gpu-c",), host_indices=(0,), running=(0,))
    jobs.session.jobs = lambda reaching: (
        (there,) if jobs.session.hosts[0].name == "gpu-c" else (ENDED,)
    )
    assert jobs.value("%distributed view") == "the run of busy"


def test_jobs_of_cells_that_named_hosts_of_their_own_are_listed_too(
    jobs, capsys, golden
):
    """Each is reached as its cell has reached it; hosts that are gone for good are named and leave the others alone."""
    way = Access(ssh_config="/mine", pythons=(("", "/p"),))
    jobs.session.begun = ("there", "here", "gone", "slurm")
    jobs.session.begun_places = {
        "there": fleet("gpu-c:1", way),
        "here": fleet("gpu-a:7"),
        "gone": fleet("gpu-z:1", Access(ssh_config="/old")),
        "slurm": Fleet(
            hosts=(replace(parse_hosts("n1")[0], allocation=source("x", "7")),),
            access=Access(),
        ),
    }
    there = replace(RUNNING, name="there", hosts=("gpu-c",), host_indices=(0,), began_ago_s=9.0)  # fmt: skip
    asked = []

    def of_hosts(first_links):
        names = list(first_links.fleet.names)
        asked.append((names, jobs.session.access.ssh_config))
        if names == ["gpu-z"]:
            raise Unreachable("gpu-z", "no answer.")
        return (there,) if names == ["gpu-c"] else (ENDED,)

    jobs.session.jobs = of_hosts
    capsys.readouterr()
    jobs.value("%distributed jobs")
    shown = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in shown[-2:]] == ["there", "mine"]
    golden(shown[0])
    assert asked == [
        (["gpu-a", "gpu-b"], None),
        (["gpu-c"], "/mine"),
        (["gpu-z"], "/old"),
    ]


def test_an_attached_run_that_gets_a_name_is_no_value(jobs):
    assert jobs.value("%distributed attach mine") == "the run of mine"
    assert jobs.session.variable == "_run"
    assert jobs.shell.user_ns["_run"] == "the run of mine"
    assert jobs.value("%distributed attach mine seen") is None
    assert jobs.session.variable == "seen"
    assert jobs.shell.user_ns["seen"] == "the run of mine"


def test_kept_ranks_take_no_name_that_stands_for_others(jobs):
    terms = replace(TERMS, stays=True, ends_idle_s=60.0, call="%%ranks exp")
    jobs.session.found = (replace(RUNNING, terms=terms),)
    notebook = jobs.shell.find_line_magic("distributed").__self__.notebook
    notebook.ranks["exp"] = SimpleNamespace(job="other", done=False)
    error = jobs.error("%distributed attach exp")
    notebook.ranks.clear()
    assert error.message == "exp already stands for other ranks in this notebook."
    assert error.hint == "%distributed attach busy NAME gives these another name."


def test_what_hosts_told_is_no_escape_sequence_in_a_terminal(jobs, capsys, golden):
    jobs.session.found = (
        replace(RUNNING, name=f"busy{ESCAPE}", hosts=("gpu-a", f"gpu-b{ESCAPE}")),
    )
    capsys.readouterr()
    jobs.value("%distributed stop busy")
    jobs.value("%distributed add busy gpu-c")
    jobs.value("%distributed jobs")
    shown = capsys.readouterr().out
    golden(shown)
    assert "\x1b" not in shown
    assert "AAAA" not in shown


def test_clean_tells_of_working_directories_and_all_takes_this_notebooks_own(
    jobs, capsys, golden
):
    def kept(
        name: str, origin: str, *owners: str, is_used: bool = False
    ) -> KeptWorkDir:
        return KeptWorkDir(
            name=name,
            origin=origin,
            size_bytes=12_345_678,
            age_s=600.0,
            is_used=is_used,
            owners=owners,
        )

    own = own_origin()
    jobs.session.dirs = (
        kept("me", own, MINE),
        kept("busy", own, MINE, is_used=True),
        kept("x", "you@there:/x", f"you@there:/x{ESCAPE}"),
        # A kernel without a name of its own, in the same folder.
        kept("folder", own, MINE, "me@here:notebook (kernel 2)"),
        kept("named", "", MINE),
        kept("old", own),
        kept("/home/me/data", own, MINE),
        kept("/scratch/x", own, "you@there:/x"),
    )
    jobs.value("%distributed clean")
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("working directory", "copied by"))
    ]
    golden(*lines)
    jobs.value("%distributed clean all")
    shown = capsys.readouterr().out
    golden(shown)
    jobs.value("%distributed clean all --everybody")
    golden(*[line for line in jobs.session.log if line.startswith("rmdir")])


def test_status_names_the_packages_that_are_loaded_and_those_that_are_not(golden):
    one = Template(
        pid=7,
        age_s=9.0,
        idle_s=2.0,
        size_bytes=3 * 10**8,
        packages=("lightning", "yaml"),
        refused=("cupy (uses a GPU)\x07",),
    )
    found = kept_table([Host(name="gpu-a"), Host(name="gpu-b")], [(one,), None])
    golden(*found.splitlines())


def test_the_runs_of_this_notebook_side_by_side(jobs, capsys):
    jobs.value("%distributed runs")
    assert capsys.readouterr().out == "no runs\n"
    for lr in ("0.1", "0.2"):
        call = f"train(lr={lr})"
        jobs.session.history.add(on_terms(replace(done(), job=f"job{lr}"), call=call))
    jobs.value("%distributed runs")
    rows = capsys.readouterr().out.splitlines()
    assert [row.partition("  ")[0] for row in rows] == [
        "run",
        "train(lr=0.1)",
        "train(lr=0.2)",
    ]
    error = jobs.error("%distributed runs now")
    assert error.message == "%distributed runs can't take 'now'."


def test_jobs_that_were_listed_are_completed(jobs):
    notebook = magic_of(jobs).notebook
    jobs.session.begun = ("mine",)
    jobs.session.begun_places = {"mine": fleet("gpu-a")}
    jobs.session.found = (THEIRS, RUNNING)
    jobs.value("%distributed jobs")
    assert notebook.job_names() == ("mine", "busy", "theirs")


def magic_of(lab: Lab) -> Magics:
    return lab.shell.magics_manager.magics["cell"]["distributed"].__self__


@pytest.mark.parametrize("words", ["a b", "--steps", "busy --steps x"])
def test_a_wrong_line_of_profile_says_what_to_write(jobs, words, golden):
    golden(jobs.error(f"%distributed profile {words}"))


def test_profile_asks_the_running_job_for_three_steps_or_as_many_as_are_named(jobs):
    assert jobs.value("%distributed profile busy") == "3 steps of busy"
    assert jobs.value("%distributed profile busy --steps 5") == "5 steps of busy"
    assert jobs.error("%distributed profile mine").message.startswith("Job mine has")

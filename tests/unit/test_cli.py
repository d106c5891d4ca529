"""`distmagic run` in a terminal: its words and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import distmagic
from distmagic import api, cli
from distmagic.errors import Cancelled, PreflightError, Unreachable, WorkerFailed
from distmagic.notebook.settings import Notebook
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.planning.jobs import Job
from distmagic.remote.wire.parts import JobTerms
from distmagic.request.config import Distmagic
from distmagic.request.flags import Program
from distmagic.screens import choose
from distmagic.session import programs
from distmagic.session.housekeeping import Stopped
from distmagic.state.explanation import Explanation
from tests import REPOSITORY
from tests.builders.events import begun, output
from tests.builders.shell import completed
from tests.scenes import running
from tests.unit.notebook.fakes import FakeSession


@pytest.fixture
def ran(monkeypatch):
    """What was run in place of a job, and what comes of it."""

    class Ran:
        outcome: object = None
        calls: list = []  # noqa: RUF012

    def run_program(session, request, program, hosts, access, *_):
        Ran.calls.append((request, program, hosts, access))
        if isinstance(Ran.outcome, BaseException):
            raise Ran.outcome
        return Ran.outcome

    Ran.calls = []
    monkeypatch.setattr(programs, "run_program", run_program)
    monkeypatch.setattr(
        programs, "dry_run", lambda *given: f"would run {given[2].target}"
    )
    monkeypatch.delenv("DISTMAGIC_HOSTS", raising=False)
    return Ran


def test_flags_stand_before_the_script(ran, monkeypatch, capsys):
    assert (
        cli.main(
            ["run", "--hosts", "gpu-a:4", "--cold", "train.py", "50", "--lr", "0.1"]
        )
        == 0
    )
    ((_, program, hosts, access),) = ran.calls
    assert program == Program(target="train.py", args=("50", "--lr", "0.1"))
    assert [(host.name, host.slots) for host in hosts] == [("gpu-a", 4)]
    assert access.cold
    monkeypatch.setenv("DISTMAGIC_HOSTS", "gpu-b")
    assert cli.main(["run", "--sync", ".", "-m", "pkg"]) == 0
    assert ran.calls[1][2][0].name == "gpu-b"
    assert ran.calls[1][0].spec.sync == "."
    assert cli.main(["run", "--dry-run", "train.py"]) == 0
    assert capsys.readouterr().out == "would run train.py\n"


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (WorkerFailed("rank 1 raised ValueError.", "Look."), 1, "rank 1 raised ValueError.\nLook.\n"),
        (PreflightError("gpu-a", "no torch.", "Install it."), 1, "gpu-a: no torch.\nInstall it.\n"),
        (Cancelled("Interrupted."), 130, "Interrupted.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_the_exit_code_says_how_it_ended(ran, capsys, outcome, code, said):
    ran.outcome = outcome
    assert cli.main(["run", "train.py"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("unfetched", "code"), [((), 0), (("no.pt",), 1)])
def test_a_file_that_was_not_brought_is_in_the_exit_code(ran, unfetched, code):
    ran.outcome = Run(begun(), {}, lambda _: None, shown=False)
    ran.outcome.unfetched = unfetched
    assert cli.main(["run", "--fetch", "no.pt", "train.py"]) == code


@pytest.fixture
def sigterm():
    """SIGTERM as this process has it, in place of its end."""
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda *_: arrived.append("as before"))
    yield arrived
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("flags", "code", "arrives"),
    [
        ([], 130, []),
        (["--detach"], 130, []),
        (["--on", "osmo"], 130, []),
        (["--on-disconnect", "keep"], 0, ["as before"]),
    ],
)
def test_sigterm_is_an_interrupt_unless_the_job_goes_on_alone(
    ran, monkeypatch, sigterm, flags, code, arrives
):
    def ended(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(programs, "run_program", ended)
    monkeypatch.setattr(programs, "run_workflow", ended)
    assert cli.main(["run", *flags, "train.py"]) == code
    assert sigterm == arrives
    os.kill(os.getpid(), signal.SIGTERM)
    assert sigterm == [*arrives, "as before"], "only as long as the command runs"


@pytest.mark.parametrize(
    "hint",
    ["Its whole output: run.logs(1), on gpu-a.", "Its result is kept: run.results[1]. It.",
     "To go on with it: _run.fetch('a*')"],
    ids=["logs", "results", "fetch"],
)  # fmt: skip
def test_an_error_names_no_variable_that_a_terminal_does_not_have(
    ran, capsys, golden, hint
):
    ran.outcome = WorkerFailed("rank 1 raised ValueError.", hint)
    ran.outcome.run = SimpleNamespace(job="1122-7")
    cli.main(["run", "train.py"])
    golden(capsys.readouterr().err)


@pytest.mark.parametrize("is_shown", [True, False])
def test_an_error_of_several_lines_is_told_once(ran, capsys, is_shown):
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "RuntimeError: shapes differ:\n  weight: [3]\n  bias: [4]"
    )
    printed = traceback if is_shown else "nothing of it"
    failed = WorkerFailed(
        "rank 1 raised RuntimeError: shapes differ: ...", "Look.", traceback
    )
    failed.run = SimpleNamespace(
        job="j", state=begun(output(f"{printed}\n", rank=1, stream="stderr"))
    )
    ran.outcome = failed
    cli.main(["run", "train.py"])
    words = "rank 1 raised RuntimeError: shapes differ: ...\nLook.\n"
    assert capsys.readouterr().err == (words if is_shown else f"{traceback}\n{words}")


def test_a_job_that_goes_on_alone_is_named(ran, capsys):
    ran.outcome = Detached("1122-7", ("gpu-a",), attach=lambda: None, stop=lambda: None)
    assert cli.main(["run", "--detach", "train.py"]) == 0
    assert capsys.readouterr().out == "1122-7\n"


def test_the_version_and_the_help_are_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"distmagic {distmagic.__version__}\n"
    assert (cli.main([]), cli.main(["--help"])) == (2, 0)
    capsys.readouterr()
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: distmagic run [FLAGS] SCRIPT")
    assert text.index("--nproc-per-node") < text.index("--partition")


class Asked(FakeSession):
    """A session whose hosts have one job, which two ranks run."""

    left: object = None

    def logs(self, reaching, job, rank, *, by_time):
        self.log.append(f"logs {job.name} {rank}")
        return "loss 3\n"

    def stacks(self, reaching, job):
        self.log.append(f"stacks {job.name}")
        return Explanation(groups=())

    def attach(self, reaching, job, screen, variable="run"):
        self.log.append(f"attach {job.name}")
        if isinstance(self.left, BaseException):
            raise self.left
        return self.left


@pytest.fixture
def asked(monkeypatch):
    terms = JobTerms(owner="laptop:/me.ipynb", lease_s=60.0)
    running = Job(
        name="1122-7", hosts=("gpu-a", "gpu-b"), host_indices=(0, 1), running=(0, 1), terms=terms, is_detached=True,
        reason="", size_bytes=0, age_s=1.0, began_ago_s=60.0,
    )  # fmt: skip
    session = Asked(found=(running,))
    monkeypatch.setattr(api, "session", lambda: session)
    monkeypatch.delenv("DISTMAGIC_HOSTS", raising=False)
    return session


@pytest.mark.parametrize(
    ("words", "asks", "said"),
    [
        ("jobs", "", "1122-7"),
        ("logs 1122-7 3", "logs 1122-7 3", "loss 3"),
        ("stacks", "stacks 1122-7", "1122-7"),
        ("attach 1122", "attach 1122-7", ""),
        ("view", "attach 1122-7", ""),
        ("get gpu-a runs/a.pt", "folder runs of gpu-a", ".pt"),
        ("put gpu-a train.py", "folder ~ of gpu-a", "gpu-a:"),
        ("clean", "measure", "distmagic clean --hosts gpu-a,gpu-b all"),
        ("help jobs", "", "# Jobs"),
        ("help ipv6", "", "More: `distmagic help howto-hosts`"),
    ],
)
def test_the_commands_of_a_notebook_are_those_of_a_terminal(
    asked, capsys, words, asks, said
):
    assert (
        cli.main([*words.split(), "--hosts", "gpu-a,gpu-b"] if asks else words.split())
        == 0
    )
    assert not asks or asks in asked.log
    assert said in capsys.readouterr().out


def test_hosts_are_named_behind_a_command(asked, capsys, golden):
    gone = Unreachable("gpu-b", "It is gone.", "")
    asked.stopped = Stopped(ended=("gpu-a",), unknown={"gpu-b": gone})
    words = [
        "stop",
        "--hosts",
        "me@gpu-a:2222,gpu-b",
        "--python",
        "/opt/python",
        "1122",
    ]
    assert cli.main(words) == 0
    assert [(host.name, host.port) for host in asked.hosts] == [
        ("gpu-a", 2222),
        ("gpu-b", None),
    ]
    assert dict(asked.access.pythons) == {"": "/opt/python"}
    golden(capsys.readouterr().out)


def test_a_job_that_is_followed_gives_its_exit_code(asked, capsys, golden):
    asked.left = WorkerFailed("rank 1 died.", "Its whole output: run.logs(1).")
    asked.left.run = SimpleNamespace(job="1122-7")
    assert cli.main(["attach", "1122-7", "--hosts", "gpu-a,gpu-b"]) == 1
    golden(capsys.readouterr().err)
    asked.left = Cancelled("Interrupted.")
    assert cli.main(["attach", "1122-7", "--hosts", "gpu-a,gpu-b"]) == 130


def test_notices_of_a_run_name_the_commands_of_a_terminal(monkeypatch):
    shown = []
    inner = SimpleNamespace(finish=shown.append)
    monkeypatch.setattr(choose, "screen_for", lambda *_, **__: inner)
    words = ("run", "--hosts", "me@gpu-a", "train.py", "--hosts", "x")
    screen = Notebook(None, Distmagic(), cli.for_terminal(words)).screen()
    notice = "job 1122-7 goes on: %distributed stop 1122-7 ends it"
    screen.finish(replace(running(), job="1122-7", notices=(notice,)))
    ((only,),) = [state.notices for state in shown]
    assert only.endswith(": distmagic stop --hosts me@gpu-a 1122-7 ends it")


@pytest.mark.parametrize(
    "words",
    [["hosts", "gpu-a"], ["down"], ["attach", "1", "run"], ["jobs", "x"]],
    ids=str,
)
def test_what_only_a_notebook_has_is_refused(asked, capsys, golden, words):
    assert cli.main(words) == 2
    golden(capsys.readouterr().err)


def test_the_usage_of_a_command_is_printed(capsys):
    assert cli.main(["logs", "--help"]) == 0
    assert capsys.readouterr().out.startswith("distmagic logs ID RANK ")
    assert cli.main([]) == 2
    usage = capsys.readouterr().out
    assert "distmagic jobs " in usage
    assert "distmagic playground" not in usage
    assert "%" not in usage.partition("python -m")[2]


@pytest.mark.parametrize(
    "words",
    [
        ["runn", "x"],
        ["run"],
        ["run", "--hosts", "a", "--hosts", "b", "x.py"],
        ["run", "--hots", "a", "x.py"],
        ["run", "--whole", "x.py"],
        ["run", "--name", "a/b", "x.py"],
    ],
    ids=str,
)
def test_a_mistake_in_the_words_is_told(ran, capsys, words, golden):
    assert cli.main(words) == 2
    golden(capsys.readouterr().err)
    assert ran.calls == []


# ---- started by a scheduler on every node

HALF = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}
OF_A_RANK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
SHOW = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(json.dumps([sys.argv, __name__, *(os.environ[name] for name in names)]))
"""


def test_variables_that_are_half_set_are_an_error_unless_hosts_are_named(
    ran, monkeypatch, capsys, golden
):
    for name, value in HALF.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "train.py"]) == 2
    golden(capsys.readouterr().err)
    assert ran.calls == []
    for words in (["--on", "none"], ["--hosts", "gpu-a"], ["--on", "slurm"]):
        assert cli.main(["run", *words, "train.py"]) == 0
    assert len(ran.calls) == 3


@pytest.mark.parametrize("is_module", [False, True])
def test_a_process_that_is_one_rank_runs_the_script_itself(tmp_path, is_module):
    (tmp_path / "show.py").write_text(SHOW)
    words = ["-m", "show"] if is_module else ["show.py"]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "DISTMAGIC_"))
    }
    done = completed(
        [sys.executable, "-m", "distmagic.cli", "run", *words, "50"],
        env={**env, **OF_A_RANK, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    argv, name, *variables = json.loads(done.stdout)
    assert argv[0].endswith("show.py")
    assert (argv[1:], name) == (["50"], "__main__")
    assert variables == ["1", "2", "1", "2", "localhost"]


def test_programs_that_differ_have_different_digests(tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.py").write_text("1")
    (tmp_path / "c.py").write_text("1")
    program = Program(target=str(tmp_path / "a.py"), args=("50",))
    same = programs.digest(program)
    assert programs.digest(replace(program, target=str(tmp_path / "b/a.py"))) == same
    assert programs.digest(replace(program, target=str(tmp_path / "c.py"))) != same
    assert programs.digest(replace(program, args=("51",))) != same
    (tmp_path / "a.py").write_text("2")
    assert programs.digest(program) != same
    module = Program(target="pkg", is_module=True)
    assert programs.digest(module) != programs.digest(replace(module, target="other"))


def test_python_starts_the_program_by_its_module():
    left = completed([sys.executable, "-m", "distmagic", "--version"])
    assert left.stdout == f"distmagic {distmagic.__version__}\n"

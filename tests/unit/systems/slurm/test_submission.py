"""What sbatch is told; and that no value of the user becomes anything else on the way."""

import os
import sys

import pytest

from distmagic.errors import UsageError
from distmagic.request.allocation import SlurmRequest
from distmagic.request.systems import Wanted
from distmagic.systems.slurm import srun_words, submission
from distmagic.systems.slurm.hosts import asked
from distmagic.systems.slurm.submission import KeeperTerms
from distmagic.transports import program_text, quoting
from tests import REPOSITORY
from tests.builders.shell import completed

HOSTILE = [
    "two words",
    "it's",
    '"',
    "$HOME",
    "$(id)",
    "`id`",
    "a;b",
    "é ü",
    "\\",
    "!x",
    "*",
    "--nodes=9",
    "%j",
    "a|b",
    "#",
]


@pytest.fixture(autouse=True)
def _short_programs(monkeypatch):
    """The programs that travel change with every edit; their text is not what is looked at here."""
    monkeypatch.setattr(program_text, "_one_line", lambda role: f"<{role}>")


def words(**changes):
    request = SlurmRequest(**changes)
    return submission.arguments(request, "distmagic:lab", is_elastic=False)


def test_what_is_submitted():
    request = SlurmRequest(
        nodes=3, options=(("gpus-per-node", "4"), ("partition", "gpu"), ("exclusive", "")), setup="module load cuda\nset -x",
        idle_s=600,
    )  # fmt: skip
    command = submission.arguments(
        request, submission.comment_of("me:/a b.ipynb"), is_elastic=True
    )
    text = (
        " ".join(command)
        + "\n\n"
        + submission.script(
            request,
            KeeperTerms(python="~/py/bin/python3", lease_s=60.0, is_elastic=True),
        )
    )
    alone = submission.script(
        SlurmRequest(), KeeperTerms(python="python3", lease_s=60.0)
    )
    golden = REPOSITORY / "tests/golden/sbatch.txt"
    assert f"{text}\n{alone}" == golden.read_text()


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_stays_one_argument_for_every_shell(value):
    command = words(options=(("account", value),), nodes=2)
    line = quoting.command_line(("printf", "%s\\n", *command))
    for shell in ("sh", "bash"):
        told = completed([shell, "-c", line]).stdout
        assert told.splitlines() == [*command]
        assert f"--account={value}" in told.splitlines()


def test_a_hostile_python_stays_one_word_of_the_script():
    script = submission.script(
        SlurmRequest(), KeeperTerms(python="/opt/my $(id) py'thon", lease_s=60.0)
    )
    shown = script.replace("exec ", "printf '%s\\n' ")
    told = completed(["sh", "-c", shown]).stdout
    assert told.splitlines()[0] == "/opt/my $(id) py'thon"


@pytest.mark.parametrize(
    "option",
    [("gpus", "8"), ("array", "1-9"), ("Account", "a"), ("account=x --wrap", "id"), ("account", "a\nb")],
    ids=["of the whole job", "ours", "no option", "two options", "two lines"],
)  # fmt: skip
def test_options_that_can_not_be(option, golden):
    with golden.raises(UsageError):
        SlurmRequest(options=(option,))


@pytest.mark.parametrize(
    "changes",
    [{"nodes": 0}, {"idle_s": 0.0}, {"login": "a;b"}, {"setup": "\0"}],
    ids=lambda changes: next(iter(changes)),
)
def test_requests_that_can_not_be(changes, golden):
    with golden.raises(UsageError):
        SlurmRequest(**changes)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("slurm", ("", "")),
        ("slurm:login1", ("login1", "")),
        ("slurm:me@login1", ("me@login1", "")),
        ("slurm:me@login1:2222", ("me@login1", "2222")),
        ("slurm:17", ("", "17")),
        ("slurm:login1:17", ("login1", "17")),
    ],
)
def test_places(text, place):
    request = asked(text, Wanted())
    assert (request.login, request.job) == place


@pytest.mark.parametrize(
    ("answer", "job"), [("17\n", "17"), ("17;east\n", "17"), ("hello\n17\n", "17")]
)
def test_the_number_of_a_job(answer, job):
    assert submission.job_id(answer) == job


@pytest.mark.parametrize("answer", ["", "\n", "Submitted batch job 17", "17;a b"])
def test_an_answer_without_a_number(answer, golden):
    with golden.raises(ValueError):
        submission.job_id(answer)


def test_variables_of_a_job_around_are_taken_away_and_the_users_own_choice_stays():
    odd = {
        "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", "SLURM_CONF": "/a", "SBATCH_ACCOUNT": "mine", "SBATCH_WAIT": "1",
        "SRUN_DEBUG": "3", "PMIX_RANK": "0", "SQUEUE_FORMAT": "%i", "MINE": "x\nSLURM_HELLO=1", "PATH": os.environ["PATH"],
    }  # fmt: skip
    program = "import os; print(sorted(os.environ))"
    done = completed(srun_words.clean((sys.executable, "-I", "-c", program)), env=odd)
    left = {name for name in odd if f"'{name}'" in done.stdout}
    assert left == {"SLURM_CONF", "SBATCH_ACCOUNT", "MINE", "PATH"}
    assert done.stderr == ""

"""Rows of squeue, understood, and in words."""

import pytest

from distmagic.systems.slurm import job_states
from distmagic.systems.slurm.job_states import (
    JobState,
    ended,
    never_starts,
    rows,
    waiting,
)

PRINTED = """\
CLUSTER: east
17|PENDING|Resources||2026-03-04T05:06:07|30:00|2|distmagic:lab:/a.ipynb
18|RUNNING|None|a[1-2],b7|2026-03-04T05:06:07|29:58|16|(null)
19|PENDING|ReqNodeNotAvail, UnavailableNodes:a3||N/A|30:00|1|a|b
20|COMPLETED|None|a1|N/A|0:00|1|
welcome to the cluster
"""


def test_rows():
    found = rows(PRINTED)
    assert list(found) == ["17", "18", "19", "20"]
    assert found["17"] == JobState(
        job="17", state="PENDING", reason="Resources", starts="2026-03-04T05:06:07", left="30:00", cpus=2,
        comment="distmagic:lab:/a.ipynb",
    )  # fmt: skip
    assert found["18"].nodes == ("a1", "a2", "b7")
    assert [one.has_ended for one in found.values()] == [False, False, False, True]
    assert [one.is_ours for one in found.values()] == [True, False, False, False]
    assert found["19"].comment == "a|b"


@pytest.mark.parametrize(
    "text",
    ["", "slurm_load_jobs error: Invalid job id", "17|RUNNING", "a|b|c|d|e|f|g|h"],
)
def test_what_is_no_row(text):
    assert rows(text) == {}


def test_names_of_nodes_that_can_not_be_read():
    with pytest.raises(ValueError, match=r"a\[1-"):
        rows("18|RUNNING|None|a[1-|x|y|1|")


def test_what_squeue_prints_is_no_escape_sequence_in_a_terminal():
    """A comment is what any user of the cluster has written; a site has its own reasons."""
    found = rows("18|RUN\x1b[2JNING|a\x9b2J\x07b|a1|x|1\u202e|1|\x1bcy")["18"]
    assert (found.state, found.reason, found.left) == ("RUNNING", "a2Jb", "1")


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "Priority",
        "ReqNodeNotAvail, UnavailableNodes:a3",
        "NeverHeardOf",
        "",
    ],
)  # fmt: skip
def test_reasons_in_words(reason, golden):
    state = JobState(job="17", state="PENDING", reason=reason)
    golden(waiting(state))


def test_when_it_may_start(golden):
    state = JobState(
        job="17", state="PENDING", reason="Resources", starts="2026-03-04T05:06:07"
    )
    golden(waiting(state))


def test_nodes_that_are_made_ready(golden):
    state = JobState(job="17", state="CONFIGURING")
    golden(waiting(state))


@pytest.mark.parametrize(
    ("reason", "is_endless"),
    [
        ("PartitionNodeLimit", True),
        ("BadConstraints", True),
        ("Job's account not known, so it can't use this partition (gpu allows staff)", True),
        ("Job's QOS not permitted to use this partition (gpu allows high not low)", True),
        ("Resources", False),
        ("ReqNodeNotAvail, UnavailableNodes:a3", False),
    ],
)  # fmt: skip
def test_what_never_starts(reason, is_endless):
    state = JobState(job="1", state="PENDING", reason=reason)
    assert never_starts(state) == is_endless
    assert ("it will never start" in waiting(state)) == is_endless


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("TIMEOUT", "reached its time limit", "Ask for more: --time"),
        ("PREEMPTED", "was preempted", "not preempted"),
        ("NODE_FAIL", "lost a node", "other nodes"),
        ("OUT_OF_MEMORY", "used more memory", "--mem"),
        ("CANCELLED", "was cancelled with scancel, not by this notebook", "new nodes"),
        ("COMPLETED", "has ended: nobody used it", "new nodes"),
        ("NEW_WORD", "has ended (NEW_WORD)", "new nodes"),
    ],
)
def test_ends_in_words(word, message, hint):
    error = ended("17", JobState(job="17", state=word))
    assert f"Slurm job 17 {message}" in error.message
    assert hint in error.hint


def test_an_end_that_is_no_longer_known_and_what_a_script_printed(golden):
    golden(ended("17", None))
    failed = ended("17", JobState(job="17", state="FAILED"), "python3: not found\n")
    golden(failed)


def test_the_question_for_a_job_and_for_all():
    assert job_states.squeue("17") == (
        "squeue",
        "--noheader",
        "--jobs=17",
        "--states=all",
        f"--format={job_states.FORMAT}",
    )
    assert "--me" in job_states.squeue("")


def test_jobs_of_an_array_and_parts_of_a_heterogeneous_job_have_numbers_of_their_own():
    """For readers squeue prints %i, and the number of each such job as %A."""
    for read in ("123_7", "123+1"):
        printed = job_states.FORMAT.replace("%i", read).replace("%A", "130")
        assert list(rows(printed.replace("%N", "a1"))) == ["130"]

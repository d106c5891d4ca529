"""Rows of squeue, understood, and in words."""

from __future__ import annotations

import pytest

from distmagic.systems.slurm import job_states
from distmagic.systems.slurm.job_states import (
    JobState,
    cure_of_endless,
    ended,
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
    assert (found["18"].is_running, found["17"].is_pending, found["20"].is_running) == (
        True,
        True,
        False,
    )
    assert found["19"].comment == "a|b"


@pytest.mark.parametrize(
    "text",
    ["", "slurm_load_jobs error: Invalid job id", "17|RUNNING", "a|b|c|d|e|f|g|h"],
)
def test_what_is_no_row(text):
    assert rows(text) == {}


@pytest.mark.parametrize(
    "nodes", ["a[1-", "a\x1b]52;c;ZQ==\x07", "-a", "a b", "n" * 256, "a[1-2],\u202eb"]
)
def test_broken_names_of_nodes_are_no_nodes(nodes):
    assert rows(f"18|RUNNING|None|{nodes}|x|y|1|")["18"].nodes == ()


def test_what_squeue_prints_is_no_escape_sequence_in_a_terminal():
    """A comment is what any user of the cluster has written; a site has its own reasons."""
    long = "y" * 100_000
    found = rows(f"18|RUN\x1b[2JNING|a\x9b2J\x07b|a1|\x1b]0;x\x07{long}|1\u202e|1|\x1bc{long}")["18"]  # fmt: skip
    assert (found.state, found.reason, found.left) == ("RUNNING", "a2Jb", "1")
    assert (len(found.starts), len(found.comment)) == (1000, 1000)


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "Priority",
        "QOSMaxGRESPerUser",
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
    state = JobState(job="17", state="CONFIGURING", reason="None")
    golden(waiting(state))


NOT_KNOWN = "Job's account not known, so it can't use this partition (gpu allows staff)"
NOT_PERMITTED = (
    "Job's QOS not permitted to use this partition (gpu allows high not low)"
)


@pytest.mark.parametrize(
    ("reason", "words", "cure"),
    [
        ("PartitionNodeLimit", "it asks for more nodes than the partition has or allows", "--nodes"),
        ("PartitionTimeLimit", "it asks for more time than the partition allows", "--time"),
        ("PartitionConfig", "the partition can't give as many nodes", "sinfo"),
        ("BadConstraints", "no nodes are as it asks for", "sinfo"),
        (NOT_KNOWN, "its account may not use this partition", "--account"),
        (NOT_PERMITTED, "its quality of service may not use this partition", "--qos"),
    ],
)  # fmt: skip
def test_what_never_starts(reason, words, cure):
    state = JobState(job="1", state="PENDING", reason=reason)
    told = waiting(state)
    assert told.startswith(f"Slurm job 1 is pending: {words}")
    assert ", so it will never start (" in told
    assert cure in cure_of_endless(state)


def test_what_may_start():
    assert cure_of_endless(JobState(job="1", state="PENDING", reason="Resources")) == ""


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


def test_one_question_for_all_jobs():
    command = job_states.squeue(("17", "18"), "east")
    assert command == (
        "squeue",
        "--noheader",
        "--clusters=east",
        "--jobs=17,18",
        "--states=all",
        f"--format={job_states.FORMAT}",
    )
    assert "--me" in job_states.squeue((), "")

"""What Slurm records about nodes: those that it takes out of use are findings, with the administrator's reason."""

from __future__ import annotations

import pytest

from distmagic.systems.slurm import node_states

NODES = ("a1", "a2")


def test_the_question_is_about_these_nodes_alone():
    assert node_states.sinfo(NODES)[-2:] == ("--nodes=a1,a2", "--format=%N|%T|%E")


@pytest.mark.parametrize(
    "row",
    [
        "a1|idle|none",
        "a1|mixed|none",
        "a1|mixed*|none",
        "a1|allocated|",
        "a1|completing|(null)",
        "a1|reserved|for a course",
        "a3|drained|not ours",
        "slurm_load_node: something else",
        "",
    ],
)
def test_nodes_in_use_and_rows_that_are_none_are_no_finding(row):
    assert node_states.findings(row, NODES, "") == ()


@pytest.mark.parametrize(
    "row",
    [
        "a1|draining|GPU 3: Xid 79 | see ticket 12",
        "a1|drained*|fan",
        "a1|down*|Not responding",
        "a1|fail|none",
        "a1|draining@|Kill task failed\x1b[2J",
    ],
)
def test_a_node_that_is_taken_out_of_use(row, golden):
    (finding,) = node_states.findings(f"{row}\n{row}\n", NODES, "ssh login1 ")
    assert (finding.level, finding.host) == ("warning", "a1")
    assert "\x1b" not in finding.evidence
    assert " --slurm exclude=a1." in finding.cure, "a flag of cells"
    golden(f"{finding.evidence}\n{finding.cure}")

"""Which hosts the lead of an elastic job lets in, and as which node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.gang.liveness import FORM_S
from distmagic.remote.wire import protocol as p
from tests.builders.messages import START

MEMBERSHIP = p.Membership(
    secret="00ff", address="", lead_address="", port=1, nodes=3, lost_after_s=4.0
)
TERMS = p.JobTerms(lease_s=60.0, max_nodes=3)
LEAD = replace(
    START, node_rank=0, hosts=("a", "b", "c"), membership=MEMBERSHIP, terms=TERMS
)
LATER = 2 * FORM_S


def members(lead: p.StartNode = LEAD, **heard: bool) -> ElasticMembers:
    """Return that of a job in which the lead hears, and no longer hears, nodes as `heard` says: node1=True."""
    return ElasticMembers(lead, lambda node_rank: heard.get(f"node{node_rank}"), 0.0)


def hosts_after(
    found: ElasticMembers, host: str, now: float = LATER, *, is_ending: bool = False,
    has_returned_node: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    return found.add(
        p.AddNode(host=host, request_id="a1"), now, is_ending=is_ending, has_returned_node=has_returned_node
    ).hosts  # fmt: skip


def test_a_host_that_was_lost_comes_back_as_a_new_node():
    assert hosts_after(members(node1=True, node2=False), "c") == ("a", "b", "c", "c")


def test_another_host_takes_the_place_of_one_that_was_lost():
    assert hosts_after(members(node1=False, node2=True), "d") == ("a", "b", "c", "d")


def test_hosts_are_counted_one_after_the_other():
    found = members(node1=False, node2=False)
    assert hosts_after(found, "c") == ("a", "b", "c", "c")
    assert hosts_after(found, "b") == ("a", "b", "c", "c", "b")


@pytest.mark.parametrize(
    ("heard", "host"),
    [
        ({"node1": True, "node2": True}, "b"),
        ({"node1": True, "node2": False}, "a"),
        ({"node1": True, "node2": True}, "d"),
    ],
)
def test_who_is_not_let_in(heard, host, golden):
    with golden.raises(ValueError):
        hosts_after(members(**heard), host)


def test_nobody_comes_to_a_job_that_ends_or_is_not_elastic(golden):
    with golden.raises(ValueError):
        hosts_after(members(node2=False), "c", is_ending=True)
    for start in (
        replace(LEAD, membership=None),
        replace(LEAD, terms=replace(TERMS, max_nodes=0)),
        replace(LEAD, lead=False),
    ):
        with golden.raises(ValueError):
            hosts_after(members(start, node2=False), "c")


def test_nobody_comes_once_all_ranks_of_a_node_have_returned(golden):
    found = members(node1=True, node2=False)
    with golden.raises(ValueError):
        hosts_after(found, "c", has_returned_node=True)
    assert hosts_after(found, "c") == ("a", "b", "c", "c")


def test_a_node_that_is_about_to_begin_is_there_although_nobody_has_heard_it(golden):
    found = members(node1=True, node2=False)
    assert hosts_after(found, "c", LATER) == ("a", "b", "c", "c")
    with golden.raises(ValueError):
        hosts_after(found, "c", LATER + FORM_S - 1)
    assert hosts_after(found, "c", LATER + FORM_S + 1) == ("a", "b", "c", "c", "c"), (
        "it never came"
    )

"""The gang channel: what is believed, who is lost, who stops, played with a network and a clock that are ours."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.agent.patience import Lease
from distmagic.remote.gang import liveness
from distmagic.remote.gang.datagrams import (
    NOBODY,
    PHASES,
    REASONS,
    SIZE_BYTES,
    Datagram,
    OwnState,
    seal,
    unseal,
)
from distmagic.remote.gang.liveness import FORM_S, Gang, News

SECRET = bytes(range(32))
LOST_S = 4.0
A_DATAGRAM = Datagram(
    node_rank=3,
    to=0,
    counter=7,
    echo=5,
    said=OwnState(4, "stopping", "failed", 1, is_detached=True, has_returned=True),
)

DATAGRAMS = st.builds(
    Datagram,
    node_rank=st.integers(0, NOBODY), to=st.integers(0, NOBODY), counter=st.integers(0, 2**64 - 1),
    echo=st.integers(0, 2**64 - 1), said=st.builds(
        OwnState, st.integers(0, 2**32 - 1), st.sampled_from(PHASES), st.sampled_from(REASONS),
        st.integers(0, NOBODY), *[st.booleans()] * 5,
    ),
)  # fmt: skip


# ---- datagrams


@given(DATAGRAMS)
def test_what_is_sealed_is_unsealed(one):
    data = seal(SECRET, one)
    assert len(data) == SIZE_BYTES
    assert unseal(SECRET, data) == one


@given(DATAGRAMS, st.integers(0, SIZE_BYTES - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(one, place, change):
    data = bytearray(seal(SECRET, one))
    data[place] ^= change
    assert unseal(SECRET, bytes(data)) is None


@given(st.binary(max_size=300))
def test_garbage_is_nothing(data):
    assert unseal(SECRET, data) is None


def test_another_secret_a_cut_and_an_addition_are_nothing():
    data = seal(SECRET, A_DATAGRAM)
    assert unseal(bytes(32), data) is None
    assert unseal(SECRET, data[:-1]) is None
    assert unseal(SECRET, data + b"\0") is None


# ---- a gang of three on a network of our own


class Net:
    """A lead and two members. `down` holds the nodes whose cable is cut; `seen` is all that was ever on the wire."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes: dict[int, Gang] = {
            0: liveness.lead(SECRET, 3, LOST_S, self.now),
            **{
                i: liveness.member(SECRET, i, "node0", LOST_S, self.now) for i in (1, 2)
            },
        }
        self.down: set[int] = set()
        self.news: dict[int, list[News]] = {0: [], 1: [], 2: []}
        self.seen: list[tuple[str, str, bytes]] = []

    def step(self, seconds: float = 0.1) -> None:
        self.now += seconds
        for node, gang in self.nodes.items():
            self.news[node] += [
                one
                for one in gang.poll(self.now)
                if one not in self.news[node] or one.kind == "lost"
            ]
        while any(gang.outbox for gang in self.nodes.values()):
            for node, gang in self.nodes.items():
                self._carry(node, gang)

    def _carry(self, node: int, gang: Gang) -> None:
        out, gang.outbox[:] = list(gang.outbox), []
        for address, data in out:
            target = int(address.removeprefix("node"))
            self.seen.append((f"node{node}", address, data))
            if target in self.nodes and not {node, target} & self.down:
                self.nodes[target].receive(data, f"node{node}", self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.step()

    def told(self, node: int) -> set[tuple[str, int]]:
        return {(news.kind, news.node_rank) for news in self.news[node]}


@pytest.fixture
def net() -> Net:
    net = Net()
    net.run(2.0)
    return net


def test_everybody_joins(net):
    assert net.told(0) == {("joined", 1), ("joined", 2)}
    assert net.told(1) == net.told(2) == {("joined", 0)}
    net.run(60.0)
    assert net.told(0) == {("joined", 1), ("joined", 2)}


def test_a_cable_that_is_cut_is_noticed_on_both_ends_and_only_there(net):
    net.down = {2}
    net.run(LOST_S - 1.0)
    assert ("lost", 2) not in net.told(0)
    net.run(2.0)
    assert ("lost", 2) in net.told(0)
    assert ("lost", 0) in net.told(2)
    assert net.told(1) == {("joined", 0)}


@pytest.mark.slow
def test_one_that_comes_back_is_told(net):
    net.down = {2}
    net.run(LOST_S + 1.0)
    net.down = set()
    net.run(1.0)
    assert ("back", 2) in net.told(0)


@pytest.mark.parametrize("who", [0, 1])
def test_who_stops_is_heard_by_all(net, who):
    net.nodes[who].announce(
        OwnState(phase="stopping", reason="failed", culprit=who), net.now
    )
    net.step()
    net.step()
    assert {
        node
        for node in net.nodes
        if any(news.kind == "stops" for news in net.news[node])
    } == ({1, 2} if who == 0 else {0})
    heard = next(
        news for node in net.nodes for news in net.news[node] if news.kind == "stops"
    )
    assert (heard.reason, heard.culprit) == ("failed", who)


def test_a_member_leaves_when_the_lead_knows_and_the_lead_when_all_have(net):
    member, lead = net.nodes[1], net.nodes[0]
    member.announce(OwnState(phase="clear"), net.now)
    assert not member.may_leave
    net.step()
    net.step()
    assert member.may_leave
    assert not lead.may_leave
    del net.nodes[1]
    net.run(3 * LOST_S)
    assert ("lost", 1) not in net.told(0), "it had said goodbye"
    net.nodes[2].announce(OwnState(phase="clear"), net.now)
    net.run(0.2)
    assert lead.may_leave


def test_a_member_cut_off_while_it_leaves_does_not_wait_for_ever(net):
    net.down = {1}
    net.nodes[1].announce(OwnState(phase="clear"), net.now)
    net.run(LOST_S + 1.0)
    assert net.nodes[1].may_leave


def test_a_member_that_hears_of_the_leads_end_when_the_lead_is_gone_leaves(net):
    """It was frozen meanwhile; the lead's last words waited in its socket."""
    lead, member = net.nodes[0], net.nodes[2]
    lead.announce(OwnState(phase="clear", reason="lost", culprit=2), net.now)
    lead.poll(net.now)
    last_words = [data for address, data in lead.outbox if address == "node2"]
    del net.nodes[0]
    net.run(LOST_S + 1.0)
    member.receive(last_words[-1], "node0", net.now)
    member.announce(OwnState(phase="clear"), net.now)
    net.run(1.0)
    assert not member.may_leave
    net.run(LOST_S)
    assert member.may_leave


def test_who_is_never_heard_is_silent_and_nobody_is_lost():
    net = Net()
    net.down = {2}
    net.run(FORM_S + 1.0)
    assert net.told(0) == {("joined", 1), ("silent", 2)}
    assert net.told(2) == {("silent", 0)}
    assert not net.nodes[2].has_formed
    assert net.nodes[0].has_formed
    net.down = set()
    net.run(2.0)
    assert ("joined", 2) in net.told(0)


def test_what_was_heard_once_is_not_heard_again(net):
    """Whoever has recorded every datagram can't keep a dead node alive with them, nor stop anybody."""
    dice = random.Random(7)
    before = {node: net.told(node) for node in net.nodes}
    net.down, recorded = {2}, list(net.seen)
    for _ in range(round((LOST_S + 1.0) / 0.1)):
        for sender, address, data in dice.sample(recorded, 20):
            net.nodes[int(address.removeprefix("node"))].receive(data, sender, net.now)
        net.step()
    assert net.told(0) - before[0] == {("lost", 2)}
    assert net.told(1) == before[1]


def test_what_is_held_back_does_not_prove_that_its_sender_is_alive_now(net):
    net.down, before = {2}, len(net.seen)
    net.run(2.0)
    held = [data for sender, _, data in net.seen[before:] if sender == "node2"]
    assert len(held) >= 3
    del net.nodes[2]  # it has died; the network delivers what it said one by one
    while held:
        net.nodes[0].receive(held.pop(0), "node2", net.now)
        net.run(0.7)
    assert ("lost", 2) in net.told(0)


def test_forged_and_reflected_datagrams_change_nothing(net):
    before = {node: net.told(node) for node in net.nodes}
    said = OwnState(phase="stopping", reason="failed")
    stop = Datagram(node_rank=1, to=0, counter=10**6, echo=0, said=said)
    for gang in net.nodes.values():
        gang.receive(seal(bytes(32), stop), "evil", net.now)
        gang.receive(b"\0" * SIZE_BYTES, "evil", net.now)
        # Echoes what was never said.
        gang.receive(seal(SECRET, replace(stop, echo=10**9)), "evil", net.now)
    for sender, _, data in net.seen:
        # Back to whoever has sent it.
        net.nodes[int(sender.removeprefix("node"))].receive(data, "evil", net.now)
    net.run(1.0)
    assert {node: net.told(node) for node in net.nodes} == before


def test_a_word_to_one_member_is_no_word_to_another(net):
    """Else whoever records what the lead says to one could tell another that the lead still lives."""
    net.run(10.0)
    to_one = [
        data
        for sender, address, data in net.seen
        if (sender, address) == ("node0", "node1")
    ]
    net.down = {2}
    before = net.nodes[2].peers[0].last_counter
    for data in to_one:
        net.nodes[2].receive(data, "node0", net.now)
    assert net.nodes[2].peers[0].last_counter == before


def test_a_host_that_comes_back_is_a_new_node(net):
    net.down = {2}
    net.run(LOST_S + 1.0)
    assert net.nodes[0].alive_count == 2
    net.nodes[3] = liveness.member(SECRET, 3, "node0", LOST_S, net.now)
    net.news[3] = []
    net.run(1.0)
    assert ("joined", 3) in net.told(0)
    assert ("joined", 0) in net.told(3)
    assert net.nodes[0].alive_count == 3


def test_the_lead_asks_all_to_form_anew(net):
    assert net.nodes[1].formations == 0
    net.nodes[0].announce(OwnState(formations=1), net.now)
    net.run(0.2)
    assert [gang.formations for gang in net.nodes.values()] == [1, 1, 1]


def test_all_learn_from_the_lead_that_a_job_is_detached(net):
    # Only the lead has a say in that.
    net.nodes[1].announce(OwnState(is_detached=True), net.now)
    net.run(0.2)
    assert [gang.is_detached for gang in net.nodes.values()] == [False, False, False]
    net.nodes[0].announce(OwnState(is_detached=True), net.now)
    net.run(0.2)
    assert [gang.is_detached for gang in net.nodes.values()] == [True, True, True]


def test_all_learn_from_the_lead_that_the_ranks_of_a_node_have_returned(net):
    def heard() -> list[bool]:
        return [gang.has_returned_node for gang in net.nodes.values()]

    net.run(0.2)
    assert heard() == [False, False, False]
    net.nodes[2].announce(OwnState(has_returned=True), net.now)
    net.run(1.0)
    assert heard()[:2] == [True, True]
    # It ends, so it is no node any more that the others would wait for.
    net.nodes[2].announce(OwnState(phase="clear", has_returned=True), net.now)
    net.run(1.0)
    assert heard() == [False, False, False]
    net.nodes[0].announce(OwnState(has_returned=True), net.now)
    net.run(1.0)
    assert heard() == [False, True, True]


def test_a_node_that_has_returned_and_is_lost_is_waited_for_by_nobody(net):
    net.nodes[2].announce(OwnState(has_returned=True), net.now)
    net.run(1.0)
    net.down = {2}
    net.run(LOST_S + 1.0)
    assert not net.nodes[0].has_returned_node
    assert not net.nodes[1].has_returned_node


# ---- the lease


def test_a_lease_that_is_renewed_goes_on():
    lease = Lease(0.0, 10.0, keep=False)
    assert not lease.ends_job(10.0)
    lease.renew(9.0)
    assert not lease.ends_job(19.0)
    assert lease.ends_job(19.1)


def test_a_detached_job_needs_none():
    lease = Lease(0.0, 10.0, keep=False)
    assert lease.detach()
    assert not lease.detach()
    assert not lease.ends_job(100.0)
    assert lease.has_run_out(100.0)


def test_a_kept_job_only_loses_its_notebook():
    assert not Lease(0.0, 10.0, keep=True).ends_job(11.0)


def test_nobody_leaves_a_short_job_before_the_others_know_although_none_has_joined_yet():
    lead, member = (
        liveness.lead(SECRET, 2, LOST_S, 0.0),
        liveness.member(SECRET, 1, "lead", LOST_S, 0.0),
    )
    assert lead.may_leave  # a member that never says a word is not waited for
    member.poll(0.0)
    ((_, data),) = member.outbox
    lead.receive(data, "member", 0.01)
    assert lead.poll(0.02) == []
    lead.announce(OwnState(phase="clear"), 0.02)
    assert not lead.may_leave
    assert not member.may_leave
    member.outbox.clear()
    member.announce(OwnState(phase="clear"), 0.03)
    member.poll(0.03)
    assert member.may_leave  # it has said so, and has never heard anybody
    lead.receive(member.outbox[0][1], "member", 0.04)
    assert lead.may_leave

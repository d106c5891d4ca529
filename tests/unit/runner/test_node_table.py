"""The nodes of a run: scripts of events go in, and what is tried next comes out. No thread, no host, no clock."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.connection.link_opener import UNKNOWN_HOST
from distmagic.errors import (
    AuthenticationError,
    ConnectionLost,
    HostKeyError,
    PreflightError,
    ProtocolError,
    Unreachable,
    UsageError,
)
from distmagic.remote.wire import protocol as p
from distmagic.runner.actions import (
    Action,
    AttemptFailed,
    Close,
    Collect,
    Collected,
    Join,
    Joined,
    JoinFailed,
    Linked,
    LinkEnded,
    Listen,
    Note,
    Reconnect,
    Send,
)
from distmagic.runner.node_row import FIRST_PAUSE_S, Growth
from distmagic.runner.node_table import REFUSED_PAUSE_S, NodeTable
from distmagic.state.events import Broken, Event, Gone, Lost, Mended, Warned

HOSTS = ("gpu-a", "gpu-b", "gpu-c")
STOP = p.StopNode(grace_s=3.0, reason="interrupted")
CUT = ConnectionLost("gpu-b: the connection ended.")
AWAY = Unreachable("gpu-b", "no answer.")
LOCKED = AuthenticationError("gpu-b", "the key agent is locked.")


def a_link(agent_error: str = "") -> Any:
    return SimpleNamespace(agent_error=agent_error, kept=None)


class Table:
    """A node table of hosts gpu-a and gpu-b, both followed since second 0, and what it asked for since the last look."""

    def __init__(
        self, growth: Growth | None = None, missing: tuple[int, ...] = ()
    ) -> None:
        numbers = itertools.count(1)
        self.table = NodeTable((0, 1), 60.0, lambda: f"id{next(numbers)}", growth)
        self.links = {node: a_link() for node in (0, 1) if node not in missing}
        self.begun = self.table.follow(self.links, 0.0)

    def after(self, *what: Any, node: int = 1, at_s: float = 0.0) -> list[Action]:
        actions: list[Action] = []
        for one in what:
            actions += self.table.receive(Event(node_rank=node, at_s=at_s, what=one))
        return actions

    def ended(
        self,
        node: int = 1,
        error: Exception | None = None,
        last: int = 9,
        at_s: float = 0.0,
    ) -> list[Action]:
        link = self.table.rows[node].link or a_link()
        return self.after(
            LinkEnded(link=link, last=last, error=error), node=node, at_s=at_s
        )

    def attempts(
        self, error: Exception | None, until_s: float, kind: type = AttemptFailed
    ) -> list[float]:
        """Let every attempt fail; return when they began."""
        began = []
        for tenth in range(int(until_s * 20)):
            now_s = tenth / 20
            for action in self.table.due(now_s):
                if isinstance(action, Reconnect):
                    began.append(now_s)
                    self.after(AttemptFailed(error=error), at_s=now_s)
                elif isinstance(action, Join):
                    began.append(now_s)
                    self.after(
                        JoinFailed(
                            host_index=action.host_index,
                            error=error,
                            request_id=action.request_id,
                        ),
                        at_s=now_s,
                    )
        return began


def elastic(*awaited: int) -> Growth:
    return Growth(host_names=HOSTS, awaited=awaited)


def lost(why: str, node: int = 1, *, is_agent_gone: bool = False) -> Note:
    return Note(node_rank=node, what=Lost(why=why, is_agent_gone=is_agent_gone))


# ---- to the end


def test_all_nodes_are_followed_from_the_beginning():
    table = Table()
    assert table.begun == [
        Listen(node_rank=node, link=table.links[node], after=0) for node in (0, 1)
    ]
    assert table.table.links == (table.links[0], table.links[1])
    assert table.table.due(1e9) == []


def test_an_agent_that_ends_well_leaves_its_small_results_and_its_link_rests():
    table = Table()
    link = table.links[1]
    ends = [
        p.Ended(rank=2, restart=0, outcome="raised", result_bytes=30),
        p.Ended(rank=3, restart=0, outcome="raised", result_bytes=50),
        # torchrun has started all ranks again
        p.Ended(rank=3, restart=1, outcome="returned", result_bytes=0),
        p.Ended(rank=2, restart=1, outcome="returned", result_bytes=40),
        p.Final(reason="done"),
    ]
    assert table.after(*ends) == []
    assert table.ended() == [Collect(node_rank=1, link=link, sizes={2: 40})]
    assert table.after(Collected(results={2: b"x"}, is_kept_idle=True)) == [
        Note(node_rank=1, what=Gone())
    ]
    assert table.table.small_results == {(1, 2): b"x"}
    assert table.table.links == (table.links[0],)


@pytest.mark.parametrize("size", [None, 0, (1 << 20) + 1])
def test_no_result_and_a_large_one_are_not_collected(size):
    table = Table()
    table.after(
        p.Ended(rank=2, restart=0, outcome="returned", result_bytes=size),
        p.Final(reason="done"),
    )
    (collect,) = table.ended()
    assert collect.sizes == {}


def test_a_connection_that_breaks_after_the_last_event_is_no_loss():
    table = Table()
    table.after(p.Final(reason="done"))
    assert table.ended(error=CUT) == [Note(node_rank=1, what=Gone())]


@pytest.mark.parametrize(
    ("agent_error", "why"),
    [
        ("", "its agent exited without an error message (was it killed?)"),
        ("MemoryError", "its agent broke down: MemoryError"),
    ],
)
def test_an_agent_that_ends_without_a_last_event_is_lost(agent_error, why):
    table = Table()
    link = table.links[1]
    link.agent_error = agent_error
    assert table.ended() == [Close(link=link), lost(why, is_agent_gone=True)]
    assert table.table.links == (table.links[0],), "its connection is left alone"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ProtocolError("gpu-b: event 4 came after event 2."), "gpu-b: event 4 came after event 2."),
        (RuntimeError("oh"), "a fault of distmagic: RuntimeError('oh')"),
    ],
)  # fmt: skip
def test_what_can_not_be_mended_ends_the_following(error, why):
    assert Table().ended(error=error) == [lost(why)]


# ---- a broken connection


def test_a_link_that_ends_at_once_each_time_is_tried_until_the_lease_is_over():
    table = Table()
    table.ended(error=CUT, at_s=100.0)
    now_s, attempts = 100.0, 0
    while now_s < 170.0:
        now_s += 0.1
        for action in table.table.due(now_s):
            if isinstance(action, Reconnect):
                attempts += 1
                table.after(Linked(link=a_link()), at_s=now_s)
                table.ended(error=CUT, at_s=now_s)
    assert table.table.rows[1].state == "lost"
    assert attempts < 25


def test_a_link_that_ends_at_once_has_mended_nothing():
    table = Table()
    first = table.ended(error=CUT, at_s=100.0)
    table.table.due(100.3)
    table.after(Linked(link=a_link()), at_s=101.0)
    second = table.ended(error=CUT, at_s=101.1)
    assert [*first, *second] == [
        Note(node_rank=1, what=Broken(why=CUT.message, again=again))
        for again in (False, True)
    ]


def test_a_link_that_lasts_or_brings_an_event_begins_the_lease_anew():
    hardware = p.Hardware(used_bytes=1, total_bytes=2)
    for heard, last, lasts_s in (([], 10, 0.0), ([], 9, 30.0), ([hardware], 9, 2.0)):
        table = Table()
        table.ended(error=CUT, at_s=100.0)
        table.table.due(100.3)
        table.after(Linked(link=a_link()), *heard, at_s=130.0)
        table.ended(error=CUT, at_s=130.0 + lasts_s, last=last)
        assert table.table.rows[1].attempts.until_s == 190.0 + lasts_s


@pytest.mark.parametrize("heard", ["joined", "back"])
def test_a_node_that_was_given_up_stays_lost_whatever_the_others_hear_of_it(heard):
    """Else the run would wait for it for ever: nobody follows it to its end."""
    table = Table(elastic())
    table.ended()
    heard_of = p.PeerState(node_rank=1, state=heard)
    why = "its agent exited without an error message (was it killed?)"
    assert table.after(heard_of, node=0) == [lost(why, is_agent_gone=True)]
    assert table.after(replace(heard_of, node_rank=0), node=1) == []
    assert table.after(replace(heard_of, node_rank=9), node=0) == []


def test_a_broken_connection_is_tried_again_with_growing_pauses_until_the_lease_is_over():
    table = Table()
    assert table.ended(error=CUT) == [Note(node_rank=1, what=Broken(why=CUT.message))]
    began = table.attempts(AWAY, 30.0)
    assert began == [0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75, 22.75, 27.75]
    assert table.table.due(60.0) == [lost("no connection for 60 s")]
    assert table.table.due(1e9) == []


def test_a_new_connection_goes_on_after_the_last_event():
    table, link = Table(), a_link()
    broken = table.links[1]
    table.ended(error=CUT, last=9)
    (attempt,) = table.table.due(1.0)
    assert attempt == Reconnect(
        node_rank=1, host_index=1, after=9, broken=broken, can_ask=True
    )
    assert table.after(Linked(link=link)) == [
        Note(node_rank=1, what=Mended()), Listen(node_rank=1, link=link, after=9),
    ]  # fmt: skip
    assert table.table.links == (table.links[0], link)


def test_a_connection_that_breaks_twice_goes_on_from_the_newest_event():
    table = Table()
    table.ended(error=CUT, last=9)
    table.table.due(1.0)
    table.after(Linked(link=a_link()), at_s=1.0)
    table.ended(error=CUT, last=12, at_s=2.0)
    (attempt,) = table.table.due(3.0)
    assert attempt.after == 12


@pytest.mark.parametrize(
    "error",
    [LOCKED, PreflightError("gpu-b", "nologin."), ProtocolError("gpu-b sent x.")],
)
def test_a_refusal_while_reconnecting_is_no_end_of_a_healthy_run(error):
    table, link = Table(), a_link()
    table.ended(error=CUT)
    (attempt,) = table.table.due(1.0)
    assert table.after(AttemptFailed(error=error), at_s=1.0) == [
        Note(node_rank=1, what=Broken(why=error.message))
    ]
    assert table.table.due(5.9) == []
    (attempt,) = table.table.due(6.0)
    assert not attempt.can_ask, "a user is asked once"
    assert Listen(node_rank=1, link=link, after=9) in table.after(
        Linked(link=link), at_s=6.0
    )


def test_another_host_key_is_never_tried_again():
    table = Table()
    table.ended(error=CUT)
    table.table.due(1.0)
    error = HostKeyError("gpu-b", "the host key has changed.")
    assert table.after(AttemptFailed(error=error)) == [lost(error.message)]


def test_a_node_that_others_hear_is_not_given_up_when_only_this_notebook_can_not_reach_it():
    table = Table()
    table.ended(error=CUT)
    (attempt,) = table.table.due(60.0, alive_elsewhere={1})
    assert isinstance(attempt, Reconnect)
    table.after(AttemptFailed(error=AWAY), at_s=60.0)
    assert table.table.due(61.0) == [lost("no connection for 60 s")]


def test_a_host_that_is_down_when_a_job_is_followed_is_tried_as_after_a_break():
    table = Table(missing=(1,))
    assert table.begun[1:] == [
        Note(node_rank=1, what=Broken(why="it could not be reached"))
    ]
    (attempt,) = table.table.due(1.0)
    assert attempt == Reconnect(
        node_rank=1, host_index=1, after=0, broken=None, can_ask=True
    )


def test_a_stop_reaches_a_broken_node_with_its_next_connection():
    table, link = Table(), a_link()
    table.ended(error=CUT)
    assert table.table.stop((0, 1), STOP) == [
        Send(links=(table.links[0], table.links[1]), message=STOP)
    ]
    table.table.due(1.0)
    assert table.after(Linked(link=link))[0] == Send(links=(link,), message=STOP)


# ---- hosts that join


ADDED = p.NodeAdded(request_id="id1", hosts=HOSTS)


def joined(link: Any, request_id: str = "id1", node_rank: int = 2) -> Joined:
    return Joined(host_index=2, request_id=request_id, link=link, node_rank=node_rank)


def unjoined(error: Exception, node_rank: int | None = None) -> JoinFailed:
    return JoinFailed(host_index=2, error=error, request_id="id1", node_rank=node_rank)


def test_an_awaited_host_is_tried_until_it_is_counted_and_then_followed():
    table, link = Table(elastic(2)), a_link()
    assert table.attempts(AWAY, 3.0) == [0.25, 0.75, 1.75]
    (join,) = table.table.due(10.0)
    assert (join.host_index, join.broken) == (2, None)
    added = p.NodeAdded(request_id=join.request_id, hosts=HOSTS)
    assert table.after(added, node=0) == []
    assert table.after(joined(link, join.request_id)) == [
        Listen(node_rank=2, link=link, after=0)
    ]
    assert table.table.due(1e9) == []


def test_an_agent_that_runs_is_followed_as_soon_as_the_lead_has_told_all_of_its_node():
    table, link = Table(elastic(2)), a_link()
    table.table.due(1.0)
    assert table.after(joined(link)) == []
    assert table.after(ADDED, node=0) == [Listen(node_rank=2, link=link, after=0)]
    assert table.table.due(1e9) == []


def test_a_lost_node_s_host_is_tried_as_a_new_node():
    table = Table(elastic())
    link = table.links[1]
    why = "its agent exited without an error message (was it killed?)"
    assert table.ended() == [Close(link=link), lost(why, is_agent_gone=True)]
    assert table.table.due(1.0) == [Join(host_index=1, request_id="id1", broken=None)]


def test_a_node_that_says_itself_that_it_is_lost_is_tried_again_when_it_is_gone():
    table = Table(elastic())
    table.after(p.Final(reason="lost"))
    table.ended()
    assert table.table.due(1.0) == []
    table.after(Collected(results={}, is_kept_idle=True))
    assert [type(action) for action in table.table.due(1.0)] == [Join]


def test_no_host_joins_a_job_that_is_not_elastic():
    table = Table()
    table.ended()
    assert table.table.due(1e9) == []


def test_a_node_that_was_counted_and_could_not_be_started_is_lost_and_tried_again():
    table = Table(elastic(2))
    table.table.due(1.0)
    table.after(ADDED, node=0)
    assert table.after(unjoined(CUT), at_s=1.0) == [lost(str(CUT), node=2)]
    assert table.table.due(1.4) == []
    assert [type(action) for action in table.table.due(1.5)] == [Join]


def test_an_attempt_that_fails_late_ends_no_other_one():
    """Meanwhile another notebook had brought the host, it was lost again, and is being started as one more node."""
    table = Table(elastic(2))
    assert [one.request_id for one in table.table.due(1.0)] == ["id1"]
    table.after(p.NodeAdded(request_id="another's", hosts=HOSTS), node=0, at_s=2.0)
    (meet,) = table.table.due(3.0)
    table.after(Linked(link=a_link()), node=meet.node_rank, at_s=3.0)
    table.ended(node=2, at_s=4.0)
    (again,) = table.table.due(5.0)
    table.after(
        p.NodeAdded(request_id=again.request_id, hosts=(*HOSTS, HOSTS[2])), node=0
    )
    assert table.after(unjoined(CUT), at_s=6.0) == []
    table.after(joined(LINK, again.request_id, 3), at_s=7.0)
    assert (table.table.rows[3].state, table.table.rows[3].why_lost) == (
        "following",
        "",
    )


def with_an_unanswered_start(error: Exception) -> Table:
    """Return a table whose third node was counted, and whose host was asked to start it and did not answer."""
    table = Table(elastic(2))
    table.table.due(1.0)
    table.after(ADDED, node=0)
    assert table.after(unjoined(error, 2), at_s=1.0) == []
    return table


@pytest.mark.parametrize("error", [AWAY, CUT])
def test_a_node_whose_start_was_not_answered_is_looked_for_and_followed(error):
    table, again = with_an_unanswered_start(error), a_link()
    assert table.table.due(1.0 + FIRST_PAUSE_S) == [
        Reconnect(node_rank=2, host_index=2, meets=True)
    ]
    assert table.after(Linked(link=again), node=2) == [
        Listen(node_rank=2, link=again, after=0)
    ]


def test_a_node_whose_start_was_not_answered_and_that_is_not_there_is_lost_and_tried_again():
    table = with_an_unanswered_start(CUT)
    until_s = table.table.rows[2].attempts.until_s
    table.table.due(2.0)
    table.after(AttemptFailed(error=None), node=2, at_s=2.0)
    assert lost("it never began", node=2) in table.table.due(until_s)
    assert [type(action) for action in table.table.due(until_s + 1.0)] == [Join]


def test_a_node_whose_start_was_not_answered_and_whose_host_stays_away_may_run():
    """It is not said to have never begun: what a user is told of a stop goes by that."""
    table = with_an_unanswered_start(CUT)
    until_s = table.table.rows[2].attempts.until_s
    table.table.due(2.0)
    table.after(AttemptFailed(error=AWAY), node=2, at_s=2.0)
    assert lost(AWAY.message, node=2) in table.table.due(until_s)


@pytest.mark.parametrize(
    "error", [AWAY, CUT, UsageError("gpu-c already runs a node of this job.")]
)
def test_what_passes_by_itself_is_not_told(error):
    table = Table(elastic(2))
    table.table.due(1.0)
    assert table.after(unjoined(error), at_s=1.0) == []


def test_a_host_that_refuses_is_told_of_and_tried_again_later():
    table = Table(elastic(2))
    table.table.due(1.0)
    error = PreflightError("gpu-c", "has no torch.")
    told = Note(
        node_rank=0,
        what=Warned(text="gpu-c: has no torch. The run continues without this host."),
    )
    assert table.after(unjoined(error), at_s=1.0) == [told]
    assert table.table.due(REFUSED_PAUSE_S) == []
    assert [type(action) for action in table.table.due(1.0 + REFUSED_PAUSE_S)] == [Join]


def test_a_fault_of_our_own_is_told_and_that_host_is_tried_no_more(golden):
    table = Table(elastic(2))
    table.table.due(1.0)
    (told,) = table.after(unjoined(RuntimeError("oh")))
    golden(told.what.text)
    assert table.table.due(1e9) == []


def test_a_host_that_another_notebook_starts_is_met_and_not_tried_here():
    table, link = Table(elastic(2)), a_link()
    assert table.after(p.NodeAdded(request_id="another's", hosts=HOSTS), node=0) == []
    assert table.table.due(1.0) == [Reconnect(node_rank=2, host_index=2, meets=True)]
    assert table.after(Linked(link=link), node=2) == [
        Listen(node_rank=2, link=link, after=0)
    ]


def test_a_node_that_nobody_starts_is_lost_and_started_here():
    table = Table(elastic())
    table.after(p.NodeAdded(request_id="another's", hosts=HOSTS), node=0)
    until_s = table.table.rows[2].attempts.until_s
    table.table.due(1.0)
    table.after(AttemptFailed(error=None), node=2, at_s=1.0)
    assert lost("it never began", node=2) in table.table.due(until_s)
    assert [type(action) for action in table.table.due(until_s + 1.0)] == [Join]


@pytest.mark.parametrize(
    ("growth", "notes"),
    [
        (None, ["it never began"]),
        (elastic(), ["it is not among the hosts of this notebook"]),
    ],
)
def test_a_node_on_a_host_that_is_not_known_here_is_passed_over(growth, notes, golden):
    table = Table(growth)
    actions = table.after(
        p.NodeAdded(request_id="x", hosts=("gpu-a", "gpu-b", "elsewhere")), node=0
    )
    assert table.table.rows[2].host_index == UNKNOWN_HOST
    assert [
        action.what.why for action in actions if isinstance(action.what, Lost)
    ] == notes
    warned = [action.what.text for action in actions if isinstance(action.what, Warned)]
    golden(*warned)


def test_only_the_lead_counts_nodes():
    table = Table(elastic())
    assert table.after(ADDED, node=1) == []
    assert len(table.table.rows) == 2


TOO_LATE = p.StopNode(grace_s=0.0, reason="too late")


def test_a_stop_ends_all_joining():
    table, link = Table(elastic(2)), a_link()
    table.table.due(1.0)
    table.after(joined(link))
    assert Send(links=(link,), message=TOO_LATE) in table.table.stop((0, 1), STOP)
    assert table.after(ADDED, node=0) == [lost("it never began", node=2)]
    late = a_link()
    assert table.after(joined(late, "id9")) == [Send(links=(late,), message=TOO_LATE)]
    assert [action for action in table.table.due(1e9) if isinstance(action, Join)] == []


def test_a_link_that_nobody_waits_for_any_more_is_closed():
    table, link = Table(elastic(2)), a_link()
    table.table.due(1.0)
    table.after(p.NodeAdded(request_id="another's", hosts=HOSTS), node=0)
    table.table.due(2.0)
    assert table.after(joined(link)) == [Close(link=link)]
    assert table.table.rows[2].state == "meeting"


@pytest.mark.parametrize("order", ["counted", "starting"])
def test_a_host_that_joins_while_the_run_is_stopped_is_lost_and_never_waited_for(order):
    table = Table(elastic(2))
    table.table.due(1.0)
    if order != "counted":
        table.after(ADDED, node=0)
    table.table.stop((0, 1), STOP)
    what = ADDED if order == "counted" else unjoined(CUT, 2)
    actions = table.after(what, node=0)
    assert [action.node_rank for action in actions if isinstance(action, Note)] == [2]
    assert table.table.rows[2].state == "lost"


@pytest.mark.parametrize(
    ("stopped", "message"),
    [
        ((0, 1), TOO_LATE),
        # It may have ranks by then, which "too late" does not end.
        ((0, 1, 2), STOP),
    ],
)
def test_a_host_that_has_started_in_the_moment_of_a_stop_is_stopped(stopped, message):
    table, link = Table(elastic(2)), a_link()
    table.table.due(1.0)
    table.after(ADDED, node=0)
    table.table.stop(stopped, STOP)
    actions = table.after(joined(link))
    assert Send(links=(link,), message=message) in actions


# ---- whatever happens


LINK = a_link()
ANYTHING = st.sampled_from(
    [
        p.Final(reason="done"), p.Final(reason="lost"), ADDED, p.NodeAdded(request_id="x", hosts=(*HOSTS, "gpu-d")),
        LinkEnded(link=LINK, last=3, error=None), LinkEnded(link=LINK, last=3, error=CUT), Linked(link=LINK),
        LinkEnded(link=LINK, last=3, error=RuntimeError()), Collected(results={}, is_kept_idle=True),
        joined(LINK), unjoined(CUT), unjoined(CUT, 2),
    ]
)  # fmt: skip


@given(st.lists(st.tuples(ANYTHING, st.integers(-1, 3))))
def test_any_order_of_events_leaves_a_table_that_can_be_stopped(script):
    table = Table(elastic(2))
    for second, (what, node) in enumerate(script):
        table.after(what, node=node, at_s=float(second))
        table.table.due(float(second))
    table.table.stop(range(len(table.table.rows)), STOP)
    for node_rank in range(2, len(table.table.rows)):
        table.after(unjoined(CUT, node_rank))
    assert not [action for action in table.table.due(1e9) if isinstance(action, Join)]
    assert [row.state for row in table.table.rows[2:] if row.state == "waiting"] == []

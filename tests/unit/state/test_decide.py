"""What is decided about a run: scripts of states go in, decisions come out. No loop, no thread, no host, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.vocabulary import POLITE_REASONS
from distmagic.state import decide
from distmagic.state.decide import (
    CONFIRM_S,
    GRACE_S,
    NODE_LOST_S,
    OWN_WORD_S,
    AskForStacks,
    Decision,
    Detach,
    Leave,
    Limits,
    Lose,
    RunMemory,
    Stop,
    StopLate,
)
from distmagic.state.events import Broken, Event, Gone, Lost, Mended, StopRequested
from distmagic.state.fold import UNHEARD, begin, fold
from distmagic.state.standstill import STACKS_S, WORTH_ASKING_S
from tests.builders.any_events import EVENTS
from tests.builders.events import at, begun, hello, progress, raised, worker
from tests.builders.runs import end_of
from tests.builders.terms import on_terms, terms

JOINED = at(p.PeerState(node_rank=1, state="joined"))
AWAY = "it could not be reached for 10 s"


class Decider:
    """A run whose decisions are carried out at once; each look is at a time in seconds, after some events."""

    def __init__(self, *events: Event, limits: Limits | None = None) -> None:
        self._requests = 0
        self._limits = limits or Limits()
        self.state = begun(*events)
        self.memory = RunMemory()

    def at(self, at_s: float, *events: Event) -> list[Decision]:
        """Return what is decided then."""
        self.fold(at_s, *events)
        decided = decide.after_step(
            self.state, self._limits, self.memory, at_s, self._new_id()
        )
        return self._done(at_s, decided)

    def interrupted(self, at_s: float) -> list[Decision]:
        self.fold(at_s)
        decided = decide.after_interrupt(self.state, self.memory, at_s, self._new_id())
        return self._done(at_s, decided)

    def clicked(self, at_s: float) -> list[Decision]:
        self.fold(at_s)
        decided = decide.stopped(self.state, self.memory, at_s, "interrupted")
        return self._done(at_s, decided)

    def _new_id(self) -> str:
        return f"id{self._requests + 1}"

    def fold(self, at_s: float, *events: Event) -> None:
        self.state = fold(
            self.state,
            [*(replace(one, at_s=at_s) for one in events), at(None, at_s=at_s)],
        )

    def _done(self, at_s: float, decided: decide.Decided) -> list[Decision]:
        self.memory, decisions = decided
        for one in decisions:
            if isinstance(one, Stop):
                self.fold(at_s, at(StopRequested(reason=one.reason)))
            elif isinstance(one, Lose):
                lost = Lost(why=one.why)
                self.fold(at_s, at(lost, one.node_rank))
            elif isinstance(one, AskForStacks):
                self._requests += 1
        return list(decisions)


def stop(reason: str, *node_ranks: int, grace_s: float | None = None) -> Stop:
    if grace_s is None:
        grace_s = 30.0 if reason in POLITE_REASONS else GRACE_S
    return Stop(node_ranks=node_ranks, grace_s=grace_s, reason=reason)


def test_of_a_run_that_goes_on_nothing_is_decided():
    run = Decider()
    assert run.at(2.0) == run.at(3.0) == []
    assert run.memory == RunMemory()


def test_a_node_out_of_reach_is_lost_before_it_is_decided_to_stop():
    run = Decider(at(Broken(why="cut"), 1))
    assert run.at(1.0 + NODE_LOST_S) == []
    assert run.at(1.1 + NODE_LOST_S) == [
        Lose(node_rank=1, why=AWAY), stop("lost", 0),
    ]  # fmt: skip
    assert run.at(1.2 + NODE_LOST_S) == []


def test_when_the_notebook_itself_was_cut_off_the_second_node_has_time_after_the_first():
    """Links come back one after the other; what the nodes know of each other comes only with them."""
    run = Decider(at(Broken(why="cut"), 0), at(Broken(why="cut"), 1))
    assert run.at(30.0) == []
    assert run.at(33.0, Event(node_rank=0, at_s=33.0, what=Mended())) == []
    assert run.at(33.0 + NODE_LOST_S) == []
    assert run.at(33.1 + NODE_LOST_S) == [
        Lose(node_rank=1, why=AWAY), stop("lost", 0),
    ]  # fmt: skip


def test_breaks_of_one_node_give_a_dead_one_no_more_time_while_another_is_reached():
    run = Decider()
    third = replace(run.state.nodes[1], node_rank=2, host="c")
    run.state = replace(run.state, nodes=(*run.state.nodes, third))
    run.fold(1.0, at(Broken(why="cut"), 1))
    run.fold(8.0, at(Broken(why="cut"), 0))
    run.fold(9.0, at(Mended(), 0))
    assert run.at(1.1 + NODE_LOST_S)[0] == Lose(node_rank=1, why=AWAY)


# The lead counts a third host into a job of two.
THIRD = at(p.NodeAdded(request_id="a1", hosts=("gpu-0", "gpu-1", "gpu-2")))
THIRD_JOINED = at(p.PeerState(node_rank=2, state="joined"))


def elastic(size: int) -> Decider:
    """An elastic job of so many nodes with a rank each, which goes on as long as one is left."""
    run = Decider()
    run.state = begin(
        "j", [f"gpu-{node}" for node in range(size)], terms(3, min_nodes=1)
    )
    hellos = [hello(node) for node in range(size)]
    ranks = [worker(node, node, world=size) for node in range(size)]
    run.fold(1.0, *hellos, *ranks)
    return run


def growing_alone() -> Decider:
    """An elastic job of two nodes that goes on without the notebook and counts a third host in."""
    run = elastic(2)
    run._limits = Limits(away_s=60.0)
    run.state = on_terms(run.state, goes_on_alone=True)
    run.fold(2.0, THIRD)
    return run


def test_a_host_that_is_only_joining_does_not_tell_that_the_notebook_has_its_cable():
    """Nobody has heard of it yet. The lead, which nothing else protects, would end the run."""
    run = elastic(2)
    run.fold(2.0, THIRD)
    cuts = [at(Broken(why="cut"), node) for node in (0, 1)]
    assert run.at(3.0, *cuts) == run.at(40.0) == []
    assert run.at(41.0, hello(2)) == []
    assert run.at(41.0 + NODE_LOST_S) == [], "from here on the others count as late"
    assert run.at(41.1 + NODE_LOST_S) == [
        Lose(node_rank=0, why=AWAY), Lose(node_rank=1, why=AWAY), stop("lost", 2),
    ]  # fmt: skip


def test_a_member_that_has_lost_its_own_network_takes_nobody_along():
    """It says that the lead is gone, which this notebook can't reach just now either. The third one goes on."""
    run = elastic(3)
    run.fold(1.0, at(p.PeerState(node_rank=1, state="joined")))
    run.fold(2.0, at(Broken(why="cut"), 0), at(Broken(why="cut"), 1))
    ended_alone = [at(p.NodeStopping(reason="lost", culprit=0), 2), *end_of(2, -15)]
    assert run.at(3.0, *ended_alone) == run.at(40.0) == []


def test_a_node_that_the_others_come_to_know_after_its_loss_is_lost_no_more():
    run = elastic(2)
    run.fold(2.0, at(Broken(why="cut"), 1))
    assert run.at(2.1 + NODE_LOST_S) == [Lose(node_rank=1, why=AWAY)]
    run.fold(20.0, at(Mended(), 1), at(p.PeerState(node_rank=1, state="joined")))
    assert run.state.lost == {}
    assert run.at(20.0) == []


def test_the_lead_of_an_elastic_job_is_lost_when_all_others_have_ended_without_it():
    run = elastic(3)
    run.fold(2.0, at(Broken(why="cut"), 0))
    for node in (1, 2):
        stopping = at(p.NodeStopping(reason="lost", culprit=0), node)
        assert run.at(3.0, stopping, *end_of(node, -15)) == []
    assert run.at(2.0 + NODE_LOST_S) == []
    (lost,) = run.at(2.1 + NODE_LOST_S)
    assert lost == Lose(node_rank=0, why=AWAY)


def test_a_healthy_elastic_job_goes_on_when_only_this_notebook_can_not_reach_its_lead():
    run = elastic(3)
    hears = [at(p.PeerState(node_rank=0, state="joined"), node) for node in (1, 2)]
    run.fold(1.0, *hears, at(Broken(why="cut"), 0))
    assert run.at(40.0) == []
    run.fold(41.0, at(p.PeerState(node_rank=0, state="lost"), 1))
    assert run.at(80.0) == [], "one that lost its own network would say so"


def without_hosts(*events: Event, goes_on_alone: bool = False) -> Decider:
    """A job of two nodes of which none has been reached since second 1, and which is left after a minute of that."""
    run = Decider(*events, limits=Limits(away_s=60.0))
    run.state = on_terms(run.state, goes_on_alone=goes_on_alone)
    run.fold(1.0, at(Broken(why="cut"), 0), at(Broken(why="cut"), 1))
    return run


@pytest.mark.parametrize(
    "run",
    [without_hosts(at(p.Detached(why="asked"))), without_hosts(goes_on_alone=True)],
    ids=["detached", "keep"],
)
def test_a_job_that_needs_no_notebook_is_left_when_this_one_is_cut_off_for_long(run):
    """Its hosts are not lost: they only can't be reached from here."""
    assert run.at(61.0) == []
    assert decide.alive_elsewhere(run.state, Limits(away_s=60.0)) == {0, 1}
    why = "no host could be reached for 60 s; if they are up, the job continues without this notebook"
    assert run.at(61.1) == [Leave(why=why)]
    assert decide.is_left(run.state, run.memory)
    assert run.at(61.2) == []
    assert run.state.lost == {}


def test_a_job_whose_hosts_can_be_reached_but_not_followed_is_left_as_well():
    """What a host runs for this notebook dies each time, at once."""
    run = without_hosts(at(p.Detached(why="asked")))
    for second in range(2, 61, 2):
        both = [at(Mended(), node) for node in (0, 1)]
        assert run.at(float(second), *both) == []
        broken = [at(Broken(why="cut", again=True), node) for node in (0, 1)]
        assert run.at(second + 0.1, *broken) == []
    assert [type(one) for one in run.at(61.1)] == [Leave]


def test_a_job_that_needs_its_notebook_or_has_begun_to_end_is_not_left():
    assert without_hosts().at(200.0) == []
    run = without_hosts(at(p.Detached(why="asked")))
    run.fold(2.0, at(Gone(), 0))
    assert run.at(200.0) == []
    assert decide.alive_elsewhere(run.state, Limits(away_s=60.0)) == frozenset()
    ended = Decider(at(p.Detached(why="asked")), at(Broken(why="cut"), 0))
    assert decide.alive_elsewhere(ended.state, Limits()) == {0, 1}


def test_a_node_that_nobody_has_met_keeps_no_job_from_being_left_and_may_be_given_up():
    run = growing_alone()
    assert decide.alive_elsewhere(run.state, run._limits) == {0, 1}
    run.fold(3.0, *(at(Broken(why="cut"), node) for node in (0, 1)))
    assert [type(one) for one in run.at(63.1)] == [Leave]


def test_an_elastic_job_goes_on_alone_without_a_member_that_has_lost_the_others():
    run = elastic(3)
    run._limits = Limits(away_s=60.0)
    run.state = on_terms(run.state, goes_on_alone=True)
    stopping = at(p.NodeStopping(reason="lost", culprit=0), 1)
    assert run.at(2.0, stopping, *end_of(1, -15, "lost")) == []
    run.fold(3.0, at(Broken(why="cut"), 0), at(Broken(why="cut"), 2))
    assert decide.alive_elsewhere(run.state, run._limits) == {0, 2}
    assert [type(one) for one in run.at(63.1)] == [Leave]


def test_a_detached_job_is_stopped_for_a_node_that_nobody_hears():
    """It has no gang: nobody else would end the others."""
    run = Decider(at(p.Detached(why="disconnected")))
    lost = at(Lost(why="its agent broke down"), 1)
    assert run.at(2.0, lost) == [stop("lost", 0)]


def test_a_detached_job_is_not_stopped_for_what_only_this_notebook_has_lost():
    run = Decider(JOINED, at(p.Detached(why="asked")))
    assert run.at(2.0, at(Lost(why="it takes no connection"), 1)) == []
    assert run.at(3.0, at(p.NodeStopping(reason="lost", culprit=1), 0)) == [
        stop("lost", 0)
    ]


def test_a_job_that_is_kept_is_not_stopped_for_what_only_this_notebook_has_lost():
    run = Decider(JOINED)
    run.state = on_terms(run.state, goes_on_alone=True)
    assert run.at(2.0, at(Lost(why="Stale file handle"), 1)) == []
    assert run.at(3.0, at(p.NodeStopping(reason="lost", culprit=1), 0)) == [
        stop("lost", 0)
    ]


@pytest.mark.parametrize("comes_first", [False, True])
def test_an_elastic_job_with_the_fewest_hosts_goes_on_with_another_in_place_of_the_one_that_it_lost(
    comes_first,
):
    """Which of the two is heard first decides nothing: neither the lead nor the member waits for the other's events."""
    run = elastic(2)
    run.state = on_terms(run.state, min_nodes=2)
    grown = [THIRD, THIRD_JOINED, at(p.PeerState(node_rank=1, state="lost"))]
    parted = [at(p.NodeStopping(reason="lost", culprit=0), 1), *end_of(1, -15, "lost")]
    both = [grown, parted] if comes_first else [parted, grown]
    for number, events in enumerate(both):
        assert run.at(2.0 + number, *events) == []
    assert (run.state.stopping, decide.answering(run.state)) == ("", (0, 2))


def test_an_agent_that_has_ended_is_heard_by_nobody_whatever_its_peers_said_before():
    """Its own host says so; the other one, which would miss it, is out of reach."""
    run = Decider(JOINED, at(p.Detached(why="asked")))
    run.fold(1.0, at(Broken(why="cut"), 0))
    killed = at(Lost(why="was it killed?", is_agent_gone=True), 1)
    assert run.at(2.0, killed) == [stop("lost", 0)]


@pytest.mark.parametrize("code", [0, 1])
def test_a_node_that_has_ended_well_does_not_end_a_job_that_goes_on_alone(code):
    run = Decider(JOINED)
    run._limits = Limits(away_s=60.0)
    run.state = on_terms(run.state, goes_on_alone=True)
    run.fold(1.0, *end_of(1, code), at(Broken(why="cut"), 0))
    alive = decide.alive_elsewhere(run.state, run._limits)
    left = [type(one) for one in run.at(61.1)]
    assert (alive, left) == (({0}, [Leave]) if code == 0 else (set(), [Stop]))


def test_a_node_that_the_gang_hears_and_nobody_here_has_met_is_looked_for_as_long_as_the_job_goes_on():
    run = growing_alone()
    run.fold(2.0, THIRD_JOINED)
    assert 2 in decide.alive_elsewhere(run.state, Limits(away_s=60.0))


def test_a_node_that_nobody_here_has_met_is_looked_for_no_longer_when_the_lead_has_ended():
    """What the lead has heard of it is no longer so."""
    run = growing_alone()
    run.fold(2.0, THIRD_JOINED)
    run.fold(3.0, *end_of(0), *end_of(1))
    assert decide.alive_elsewhere(run.state, run._limits) == frozenset()


def test_a_new_link_that_ends_at_once_is_the_first_break_of_a_node_that_was_just_met():
    run = elastic(2)
    run.fold(100.0, at(Broken(why="cut", again=True), 1))
    assert run.state.nodes[1].broken_at_s == 100.0


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_node_that_ends_when_it_is_found_again_has_stopped_ranks_in_any_order(
    comes_first,
):
    run = elastic(2)
    run.fold(2.0, at(p.PeerState(node_rank=1, state="lost")))
    back = [at(p.PeerState(node_rank=1, state="back"))]
    ends = [at(p.NodeStopping(reason="lost", culprit=0), 1), *end_of(1, -15, "lost")]
    run.fold(3.0, *(back + ends if comes_first else ends + back))
    assert run.state.workers[1].phase == "stopped"


def test_a_rank_of_a_node_that_has_left_the_others_may_be_anothers_in_the_same_round():
    """Some versions of torch don't tell the round."""
    run = elastic(3)
    run.fold(2.0, at(p.PeerState(node_rank=1, state="lost")))
    run.fold(3.0, at(p.PeerState(node_rank=1, state="back")))
    run.fold(4.0, at(p.NodeStopping(reason="lost", culprit=0), 1))
    run.fold(5.0, worker(0, 0, world=2), worker(1, 2, world=2))
    assert run.state.workers[1].node_rank == 2


def test_a_node_that_is_found_again_has_its_ranks_again():
    run = elastic(2)
    run.fold(2.0, at(Lost(why="cut"), 1))
    assert run.state.workers[1].phase == "lost"
    run.fold(3.0, at(p.PeerState(node_rank=1, state="joined")))
    assert (run.state.workers[1].phase, run.state.lost) == ("running", {})


def test_a_node_that_only_this_notebook_can_not_follow_counts_for_the_least_number():
    """Another notebook has brought it, from a host that is not known here."""
    run = elastic(3)
    run.state = on_terms(run.state, min_nodes=2)
    joined = at(p.PeerState(node_rank=2, state="joined"))
    assert run.at(2.0, joined, at(Lost(why="not among the hosts"), 2)) == []
    assert run.at(3.0, at(p.PeerState(node_rank=1, state="lost"))) == []
    assert run.at(4.0, at(p.PeerState(node_rank=2, state="lost"))) == [stop("lost", 0)]


def test_a_node_that_is_lost_is_not_asked_whether_it_is_silent():
    """An elastic job begins without a host that has died; the lead still says that it has never heard of it."""
    run = elastic(3)
    run.memory = replace(run.memory, wants_detach=True)
    silent = at(p.PeerState(node_rank=1, state="silent"))
    joined = at(p.PeerState(node_rank=2, state="joined"))
    assert run.at(2.0, at(Lost(why="switched off"), 1), silent, joined) == [Detach()]
    assert elastic(3).at(2.0, silent) == []


def test_a_run_that_is_over_stays_so():
    run = elastic(2)
    run.at(2.0, at(Lost(why="cut"), 0), at(Gone(), 1))
    assert run.state.is_over
    run.fold(3.0, at(p.PeerState(node_rank=0, state="back"), 1))
    assert run.state.is_over


def test_a_node_that_is_missed_and_cut_off_is_the_only_one_to_blame():
    """Another one, which the others hear, is not lost because this notebook can't reach it for the same time."""
    run = Decider(JOINED)
    third = replace(run.state.nodes[1], node_rank=2, host="c", gang="")
    run.state = replace(run.state, nodes=(*run.state.nodes, third))
    run.fold(1.0, at(Broken(why="cut"), 1), at(Broken(why="cut"), 2))
    missing = at(p.NodeStopping(reason="lost", culprit=2), 0)
    assert run.at(1.0 + NODE_LOST_S, missing)[0] == Lose(node_rank=2, why=UNHEARD)
    assert run.at(1.1 + NODE_LOST_S) == []


def test_a_node_that_is_missed_by_the_others_has_time_for_its_own_word():
    missing = at(p.NodeStopping(reason="lost", culprit=1), 0)
    run = Decider()
    # The other agents have told it themselves.
    assert run.at(2.0, missing) == [stop("lost", 0, 1)]
    assert run.at(2.0 + OWN_WORD_S) == []
    assert run.at(2.1 + OWN_WORD_S) == [Lose(node_rank=1, why=UNHEARD)]
    assert run.at(2.2 + OWN_WORD_S) == []


def test_a_node_that_is_out_of_reach_and_missed_is_lost_once():
    missing = at(p.NodeStopping(reason="lost", culprit=1), 0)
    run = Decider(at(Broken(why="cut"), 1))
    losses = run.at(20.0, missing)
    assert losses == [Lose(node_rank=1, why=AWAY), stop("lost", 0)]


def test_a_node_that_ended_in_the_meantime_is_not_lost():
    accused = at(p.PeerState(node_rank=1, state="lost"), 0)
    run = Decider()
    run.at(2.0, accused, *end_of(1, -15, "stopped"))
    assert not any(isinstance(one, Lose) for one in run.at(9.0))


def test_ranks_have_the_grace_of_their_job_unless_something_has_failed():
    run, failed = Decider(), Decider()
    for one in (run, failed):
        one.state = on_terms(one.state, grace_s=90.0)
    assert run.interrupted(2.0) == [stop("interrupted", 0, 1, grace_s=90.0)]
    assert run.memory.give_up_at_s == 92.0 + CONFIRM_S
    assert failed.at(2.0, raised(2, 1)) == [stop("failed", 0, 1, grace_s=GRACE_S)]


def test_sigterm_is_another_reason_than_an_interrupt():
    run = Decider()
    run.memory, decisions = decide.after_interrupt(
        run.state, run.memory, 2.0, "id1", "terminated"
    )
    assert decisions == (stop("terminated", 0, 1),)


def test_a_second_interrupt_does_not_wait_for_the_answers():
    run = Decider(*(progress(rank, rank // 2, step=1) for rank in range(4)))
    still_s = 1.1 + WORTH_ASKING_S
    assert run.interrupted(still_s) == [AskForStacks(request_id="id1")]
    assert run.interrupted(still_s) == [stop("interrupted", 0, 1)]
    assert run.interrupted(still_s) == [stop("interrupted", 0, 1, grace_s=0.0)]


def test_a_detached_job_is_left_by_an_interrupt_and_stopped_by_a_click():
    run = Decider(JOINED, at(p.Detached(why="asked")))
    assert not decide.is_left(run.state, run.memory)
    assert run.interrupted(2.0) == []
    assert decide.is_left(run.state, run.memory)
    assert run.clicked(3.0) == [stop("interrupted", 0, 1)]


def test_a_job_is_let_go_in_every_step_until_it_goes_on_alone():
    run = Decider()
    run.memory = replace(run.memory, wants_detach=True)
    assert run.at(2.0) == []
    assert run.at(3.0, JOINED) == run.at(4.0) == [Detach()]
    run.at(5.0, at(p.Detached(why="asked")))
    assert decide.is_left(run.state, run.memory)


def test_a_timeout_takes_over_the_question_of_a_hang():
    reports = [progress(rank, rank // 2, step=1) for rank in range(4)]
    run = Decider(*reports, limits=Limits(timeout_s=12.0, hang_timeout_s=9.0))
    assert run.at(10.1) == [AskForStacks(request_id="id1")]
    assert run.at(12.1) == [], "the answers are waited for"
    assert run.at(10.2 + STACKS_S) == [stop("timeout", 0, 1)]


def test_a_run_that_an_agent_has_stopped_is_stopped_everywhere():
    run = Decider()
    stopping = at(p.NodeStopping(reason="lease"), 1)
    assert run.at(2.0, stopping) == [stop("lease", 0, 1)]


def test_a_lost_node_of_an_elastic_job_stops_nothing():
    job = begin("j", ("gpu-a", "gpu-b", "gpu-c"), terms(3, min_nodes=1))
    run = Decider()
    run.state = fold(job, [worker(node, node, world=3) for node in range(3)])
    assert run.at(2.0, at(p.PeerState(node_rank=1, state="lost"))) == []
    assert run.state.lost == {1: UNHEARD}


@given(st.lists(EVENTS, max_size=8), st.integers(0, 8))
def test_whatever_hosts_say_only_nodes_that_are_there_are_lost_or_stopped(
    script, interrupted_at
):
    run = Decider()
    for step, events in enumerate(script):
        run.fold(float(step + 2), *events)
        there = set(decide.answering(run.state))
        decisions = run.at(float(step + 2))
        if step == interrupted_at:
            decisions += run.interrupted(float(step + 2))
        for one in decisions:
            if isinstance(one, (Stop, StopLate)):
                assert there.issuperset(one.node_ranks)
            if isinstance(one, Lose):
                there.remove(one.node_rank)

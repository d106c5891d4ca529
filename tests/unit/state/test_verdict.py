"""The exception that a run ends with: whose fault it was, in one sentence, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.errors import Cancelled, WorkerFailed
from distmagic.remote.agent import rank_process
from distmagic.remote.system import exit_codes, memory
from distmagic.remote.wire import protocol as p
from distmagic.state.decide import OWN_WORD_S, missed_by_peers
from distmagic.state.events import (
    NEVER_BEGAN,
    Broken,
    Event,
    Gone,
    Lost,
    Planned,
    StopRequested,
    Swept,
)
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.any_events import EVENTS
from tests.builders.events import (
    HOSTS,
    at,
    begun,
    ended,
    killed,
    output,
    raised,
    worker,
)
from tests.builders.terms import on_terms, terms

THREE = (*HOSTS, "gpu-c")
LOGS = "Its whole output: run.logs({rank}), on {host} under ~/.distmagic/jobs/j."


def ends_of(*nodes: int, code: int = 0, reason: str = "done") -> list[Event]:
    words = (p.EngineEnded(code=code), p.Final(reason=reason), Gone())
    return [at(what, node) for node in nodes for what in words]


def over(
    *events: Event, code: int = 0, reason: str = "done", restarts: int = 0
) -> RunState:
    """Return a run in which these events happened before both nodes ended."""
    ends = ends_of(0, 1, code=code, reason=reason)
    return begun(*events, *ends, restarts=restarts)


def said(state: RunState) -> tuple[type, str, str]:
    error = verdict(state)
    assert error is not None
    return type(error), error.message, error.hint


def test_a_run_that_went_well():
    assert verdict(over(*(ended(rank, rank // 2) for rank in range(4)))) is None


def test_a_rank_that_raised(golden):
    error = verdict(over(raised(3, 1, "shapes differ"), code=1))
    assert isinstance(error, WorkerFailed)
    golden(error)
    assert error.hint == LOGS.format(rank=3, host="gpu-b")
    assert error.remote_traceback == "Traceback"


def left(rank: int, *names: str, has_failed: bool = True) -> Event:
    """Return what a rank leaves of its calls, each as `all_reduce [4]`; the last one has failed, or it has ended well."""
    calls = []
    for number, name in enumerate(names, 1):
        word, _, sizes = name.partition(" ")
        is_over = not has_failed or number < len(names)
        call = p.CallRecord(number=number, name=word, sizes=sizes, is_over=is_over)
        calls.append(call)
    own = p.Frame(file="Cell In[3]", line=10 + rank, function="train", mine=True)
    torchs = p.Frame(
        file="torch/distributed/distributed_c10d.py", line=9, function="all_reduce"
    )
    one = p.Stacks(
        request_id=p.LEFT,
        rank=rank,
        local_rank=rank % 2,
        threads=(p.Thread(frames=(own, torchs)),) if has_failed else (),
        calls=(p.GroupRecord(backend="gloo", calls=tuple(calls)),),
    )
    return at(one, rank // 2)


def test_a_rank_that_gloo_aborts_is_named_with_both_sizes(golden):
    failed = [left(rank, "barrier", "all_reduce [4]") for rank in (0, 1)]
    odd = left(3, "barrier", "all_reduce [8]")
    golden(verdict(over(killed(0, 0, 6), *failed, odd, code=1)))
    # One that has sent all has gone on, and ended.
    well = left(3, "barrier", "all_reduce [8]", has_failed=False)
    golden(verdict(over(killed(0, 0, 6), *failed, ended(3, 1), well, code=1)))


def test_a_rank_that_ended_without_a_call_of_the_others_is_named(golden):
    lost = "Connection closed by peer [10.0.0.2]:40000"
    early = left(3, "barrier", has_failed=False)
    failed = left(0, "barrier", "all_reduce [4]")
    golden(verdict(over(ended(3, 1), early, raised(0, 0, lost), failed, code=1)))
    # Of one whose calls are not known nothing is said, nor of one that has lost another rank, as the others have.
    behind = left(1, "barrier", "all_reduce [4]", "all_reduce [4]")
    for first in (ended(3, 1), killed(3, 1)):
        error = verdict(over(first, raised(0, 0, lost), failed, behind, code=1))
        assert "all_reduce" not in str(error)
    # A call of before may have had other sizes rightly: what has failed is another one.
    uneven = [left(rank, f"all_gather [{rank}]", "barrier") for rank in (0, 1)]
    assert "all_gather" not in str(verdict(over(killed(3, 1), *uneven, code=1)))


def test_an_error_of_several_lines_is_told_in_full_only_by_its_traceback(golden):
    failure = p.Failure(
        type="RuntimeError",
        message="size mismatch:\n  fc.weight\n  fc.bias",
        traceback="Traceback\nall",
    )
    error = verdict(
        over(ended(3, 1, outcome="raised", code=1, failure=failure), code=1)
    )
    golden(error)
    bare = p.Failure(
        type="RuntimeError", message="size mismatch:\n  fc.weight", traceback=""
    )
    error = verdict(over(ended(3, 1, outcome="raised", code=1, failure=bare), code=1))
    golden(error)


@pytest.mark.parametrize(
    ("code", "out_of_memory"),
    [(3, ""), (137, ""), (-11, ""), (-9, ""), (-9, memory.HOST_WIDE), (-99, "")],
)
def test_a_rank_that_ended_without_an_exception(code, out_of_memory, golden):
    end = ended(
        0,
        outcome=exit_codes.outcome_of(code),
        code=code,
        meaning=exit_codes.meaning_of(code, out_of_memory=out_of_memory),
    )
    words = output("all is\r\n\nlost\n", stream="stderr")
    other = output("not this\n", 1, stream="stderr")
    golden(verdict(over(words, other, output("nor this\n"), end, code=1)))


def test_a_rank_whose_process_fails_after_its_return_while_another_one_still_works(
    golden,
):
    """SIGTERM of torchrun ends the other one, whose end arrives first: nobody has asked it to end from outside."""
    crashed = p.Exit(rank=0, local_rank=0, pid=1, code=-11)
    stopped = p.Exit(rank=1, local_rank=1, pid=2, code=-15)
    engine = at(p.EngineEnded(code=1, exits=(crashed, stopped)))
    state = over(
        ended(0),
        killed(1, number=15),
        at(StopRequested(reason="failed")),
        engine,
        code=1,
        reason="failed",
    )
    golden(verdict(state))
    assert (state.phase, state.workers[1].phase) == ("failed", "stopped")


def test_a_child_that_was_killed(golden):
    failure = p.Failure(
        type="RuntimeError",
        message="DataLoader worker (pid 7) is killed by signal: Killed.",
        traceback="T",
    )
    word = p.Ended(rank=0, restart=0, outcome="raised", code=1, failure=failure)
    assert rank_process.explained(word, lambda: "") == word
    other = replace(word, failure=replace(failure, message="no"))
    assert rank_process.explained(other, lambda: pytest.fail("nobody asked")) is other
    end = rank_process.explained(word, lambda: memory.HOST_WIDE)
    hint = said(over(at(end), code=1))[2]
    golden(hint)


def test_the_last_words_are_twelve_lines():
    text = "".join(f"line {i}\n" for i in range(100))
    hint = said(over(output(text, stream="stderr"), killed(0), code=1))[2]
    assert hint.splitlines()[1:13] == [f"    line {i}" for i in range(88, 100)]
    assert hint.splitlines()[13].startswith("Often the host")


def test_an_interrupt(golden):
    state = over(
        at(StopRequested(reason="interrupted")),
        killed(0, number=15),
        code=-15,
        reason="interrupted",
    )
    golden(verdict(state))
    assert isinstance(verdict(state), KeyboardInterrupt)


def test_an_interrupt_between_a_failure_and_its_restart():
    events = (raised(0), at(StopRequested(reason="interrupted")))
    assert said(over(*events, restarts=2))[0] is Cancelled
    assert said(over(*events))[0] is WorkerFailed


def lost(*more: Event) -> RunState:
    return begun(
        at(Lost(why="the connection ended."), 1),
        at(StopRequested(reason="lost")),
        *more,
    )


GONE = ends_of(0, code=-15, reason="lost")


def test_a_host_that_was_lost(golden):
    golden(verdict(lost(*GONE)))
    golden(verdict(lost(*GONE, at(Swept(survivors=()), 1))))
    golden(verdict(lost(*GONE, at(Swept(survivors=("python (pid 7, state D)",)), 1))))


UNHEARD = [
    at(what, 0)
    for what in (
        p.PeerState(node_rank=1, state="lost"),
        p.NodeStopping(reason="lost", culprit=1),
    )
]
UNHEARING = [
    at(what, 1)
    for what in (
        p.PeerState(node_rank=0, state="lost"),
        p.NodeStopping(reason="lost", culprit=0),
    )
]


@pytest.mark.parametrize(
    "words",
    [
        [*UNHEARD, *UNHEARING],
        [*UNHEARING, *UNHEARD],
        [*UNHEARD, at(p.NodeStopping(reason="lost"), 1)],
    ],
    ids=["the lead first", "the member first", "one side"],
)
def test_hosts_that_only_do_not_hear_each_other_are_not_lost(words, golden):
    state = begun(*words)
    assert (state.lost, missed_by_peers(state)) == ({}, ())
    golden(verdict(begun(*words, *ends_of(0, 1, code=-15, reason="lost"))))


def test_a_node_that_ended_as_lost_and_came_back_as_another_one_is_no_failure():
    added = p.NodeAdded(request_id="a1", hosts=("gpu-a", "gpu-b", "gpu-b"))
    ended_alone = ends_of(1, code=-15, reason="lost")
    events = [
        at(p.NodeStopping(reason="lost"), 1),
        *ended_alone,
        at(added),
        *ends_of(2, 0),
    ]
    state = fold(begin("j", ("gpu-a", "gpu-b"), terms(3, min_nodes=1)), events)
    assert (state.phase, verdict(state)) == ("done", None)


def test_a_host_that_its_gang_misses_has_a_moment_to_speak():
    accused = begun(*UNHEARD)
    assert missed_by_peers(accused) == ()
    assert missed_by_peers(replace(accused, at_s=accused.at_s + OWN_WORD_S + 0.1)) == (
        1,
    )
    assert missed_by_peers(begun(at(Broken(why="cut"), 1), *UNHEARD)) == (1,)
    assert missed_by_peers(replace(begun(*UNHEARD, *UNHEARING), at_s=60.0)) == ()


@pytest.mark.parametrize(
    "word",
    ["EADDRINUSE", "The server socket has failed to listen: Address already in use"],
)
@pytest.mark.parametrize("chose_port", [True, False])
def test_a_port_that_is_taken(word, chose_port, golden):
    plan = at(Planned(addresses=(), chose_port=chose_port))
    state = over(plan, output(f"[E] {word}\n", -1, 0, "stderr"), code=1)
    golden(verdict(state))


def test_torchrun_that_ended_first_speaks(golden):
    failed = at(p.EngineEnded(code=2), 1)
    words = output("usage: torchrun\nbad flag\n", -1, 1, "stderr")
    stop = at(StopRequested(reason="failed"))
    ends = [
        at(p.EngineEnded(code=-15), 0),
        *(at(what, n) for n in (0, 1) for what in (p.Final(reason="failed"), Gone())),
    ]
    golden(verdict(begun(words, failed, stop, *ends)))
    # Without any words of it there is still its log.
    golden(verdict(begun(failed, stop, *ends)))


def test_a_lost_host_that_failed_and_stopped_the_others_is_blamed_and_not_their_torchrun(
    golden,
):
    """They are told by the gang channel whose failure it is; this notebook can't follow that host any more."""
    stopping = p.NodeStopping(reason="failed", culprit=1)
    ends = [at(stopping, 0), at(p.EngineEnded(code=143), 0), at(p.Final(reason="failed"), 0), at(Gone(), 0)]  # fmt: skip
    two = begin("j", ("gpu-a", "gpu-b"), terms(1, min_nodes=1))
    lost = at(Lost(why="gpu-b: it has no files of job j."), 1)
    golden(verdict(fold(two, [lost, *ends])))
    raised = p.Ended(
        rank=1, restart=0, outcome="raised", code=1, failure=p.Failure(type="OSError", message="gone", traceback=""),
    )  # fmt: skip
    began = p.Worker(rank=1, local_rank=0, world_size=2, restart=0, pid=1)
    seen = [at(began, 1), at(raised, 1), lost]
    golden(verdict(fold(on_terms(two, max_restarts=1), [*seen, *ends])))


INTERRUPT = at(StopRequested(reason="interrupted"))
CRASHED = (p.Exit(rank=0, local_rank=0, pid=1, code=-15), p.Exit(rank=1, local_rank=1, pid=2, code=-6))  # fmt: skip
FAILED_FIRST = at(p.NodeStopping(reason="failed", culprit=2))
NO_ROUTE = p.Endpoint(state="unreached", detail="10.0.0.1 port 40001 (Connection refused)")  # fmt: skip
STILL_THERE = p.Final(reason="interrupted", survivors=("python (pid 7, state D)", "sh (pid 8, state D)"))  # fmt: skip
ALL_WELL = [ended(rank, rank // 2) for rank in range(4)]
# What happened, and in which words the run ends.
ENDS = {
    "a process that fails after its return": over(
        ended(0), ended(1), output("double free\n", 1, stream="stderr"), at(p.EngineEnded(code=1, exits=CRASHED))
    ),
    "sys.exit with words": over(ended(0, outcome="exited", code=1, meaning="no such data set"), code=1),
    "an interrupt while the results of a run that went well still come": begun(
        *ALL_WELL, *ends_of(0)[:2], *ends_of(1)[:2], INTERRUPT, at(Gone(), 0), at(Gone(), 1)
    ),
    "an interrupt when only one host has ended": begun(
        *ends_of(0)[:2], INTERRUPT, killed(2, 1, number=15), *ends_of(1, code=-15, reason="interrupted"), at(Gone(), 0)
    ),
    "an interrupt that a host did not confirm": begun(
        INTERRUPT, *GONE, at(Lost(why="it did not confirm its end"), 1)
    ),
    "an interrupt while a node has not begun": begun(
        INTERRUPT, *(at(p.Final(reason="interrupted"), node) for node in (0, 1)),
        at(p.NodeAdded(request_id="a1", hosts=(*HOSTS, "gpu-c"))), at(Lost(why=NEVER_BEGAN), 2), at(Gone(), 0), at(Gone(), 1),
    ),
    "what could not be ended": begun(INTERRUPT, at(STILL_THERE), *GONE[2:]),
    "a timeout": over(at(StopRequested(reason="timeout")), code=-15, reason="timeout"),
    "nodes that can't meet": over(
        at(NO_ROUTE, 1), at(StopRequested(reason="rendezvous")), code=-15, reason="rendezvous"
    ),
    "several lost hosts": begun(at(Lost(why="cut."), 1), at(Lost(why="silent."), 0), at(StopRequested(reason="lost"))),
    "a rank that failed because a host was lost": begun(
        raised(0, message="Connection closed by peer"), at(StopRequested(reason="failed")), *GONE, at(Lost(why="cut."), 1)
    ),
    "an elastic job whose ranks only lost each other": fold(
        begin("j", HOSTS, terms(3, min_nodes=1)),
        [worker(0, world=1), raised(0, message="Broken pipe"), *ends_of(0, 1, code=1, reason="failed")],
    ),
    # Its agent tells the others by the gang channel, and they end their own torchrun by SIGTERM.
    "an elastic job whose torchrun failed before any rank began": fold(
        begin("j", THREE, terms(1, min_nodes=2)),
        [FAILED_FIRST, *ends_of(0, 1, code=-15, reason="failed"), *ends_of(2, code=1, reason="failed")],
    ),
    "an elastic job that has no restart left": fold(
        begin("j", THREE, terms(1, min_nodes=2)),
        [at(Lost(why="switched off"), 2), *ends_of(0, 1, code=1, reason="failed")],
    ),
    "the lease": begun(*ends_of(1, code=-15, reason="lease"), *GONE),
    "an agent that was asked to end": over(reason="the agent was asked to end"),
    "a job that was stopped from elsewhere": over(reason="stopped"),
    "ranks that had no cell for too long": over(reason="idle"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_in_which_words_a_run_ends(end, golden):
    golden(verdict(ENDS[end]))


@settings(max_examples=2 * settings.default.max_examples)
@given(EVENTS, st.integers(0, 1))
def test_any_run_that_is_over_has_a_verdict(events, restarts):
    gone = [at(Gone(), node) for node in (0, 1)]
    state = fold(begin("j", HOSTS, terms(restarts)), [*events, *gone])
    error = verdict(state)
    assert error is None or (
        error.message and str(error) and error._render_traceback_()
    )
    assert state.is_over
    assert error is not None or state.phase == "done"


def test_no_run_looks_well_by_mistake(golden):
    silent = [
        at(what, node) for node in (0, 1) for what in (p.Final(reason="done"), Gone())
    ]
    golden(verdict(begun(*silent)))
    stopped = over(at(StopRequested(reason="lost")))
    golden(verdict(stopped))

"""The exception that a run ends with: whose fault it was, in one sentence, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.errors import (
    Cancelled,
    WorkerFailed,
)
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
from tests.builders.events import HOSTS, at, begun, ended, killed, output, raised
from tests.builders.terms import on_terms, terms

LOGS = "Its whole output: run.logs({rank}), on {host} under ~/.distmagic/jobs/j."


def over(
    *events: Event, code: int = 0, reason: str = "done", restarts: int = 0
) -> RunState:
    """Return a run in which these events happened before both nodes ended."""
    ends = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=code), p.Final(reason=reason), Gone())
    ]
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


def test_a_rank_whose_process_fails_after_its_return(golden):
    stopped = p.Exit(rank=0, local_rank=0, pid=1, code=-15)
    crashed = p.Exit(rank=1, local_rank=1, pid=2, code=-6)
    engine = at(p.EngineEnded(code=1, exits=(stopped, crashed)))
    golden(
        verdict(
            over(
                ended(0), ended(1), output("double free\n", 1, stream="stderr"), engine
            )
        )
    )


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


def test_sys_exit_with_words(golden):
    end = ended(0, outcome="exited", code=1, meaning="no such data set")
    golden(verdict(over(end, code=1)))


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


def test_an_interrupt_while_the_results_of_a_run_that_went_well_still_come(golden):
    ends = [ended(rank, rank // 2) for rank in range(4)]
    ends += [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=0), p.Final(reason="done"))
    ]
    state = begun(
        *ends, at(StopRequested(reason="interrupted")), at(Gone(), 0), at(Gone(), 1)
    )
    golden(verdict(state))


def test_an_interrupt_when_only_one_host_has_ended(golden):
    ends = [
        at(p.EngineEnded(code=0), 0),
        at(p.Final(reason="done"), 0),
        at(StopRequested(reason="interrupted")),
    ]
    ends += [
        killed(2, 1, number=15),
        at(p.EngineEnded(code=-15), 1),
        at(p.Final(reason="interrupted"), 1),
    ]
    state = begun(*ends, at(Gone(), 0), at(Gone(), 1))
    golden(verdict(state))


def test_an_interrupt_between_a_failure_and_its_restart():
    events = (raised(0), at(StopRequested(reason="interrupted")))
    assert said(over(*events, restarts=2))[0] is Cancelled
    assert said(over(*events))[0] is WorkerFailed


def test_a_timeout(golden):
    golden(
        verdict(over(at(StopRequested(reason="timeout")), code=-15, reason="timeout"))
    )


def test_nodes_that_can_not_meet(golden):
    unreached = at(
        p.Endpoint(
            state="unreached", detail="10.0.0.1 port 40001 (Connection refused)"
        ),
        1,
    )
    golden(
        verdict(
            over(
                unreached,
                at(StopRequested(reason="rendezvous")),
                code=-15,
                reason="rendezvous",
            )
        )
    )


def lost(*more: Event) -> RunState:
    return begun(
        at(Lost(why="the connection ended."), 1),
        at(StopRequested(reason="lost")),
        *more,
    )


GONE = [
    at(what, 0) for what in (p.EngineEnded(code=-15), p.Final(reason="lost"), Gone())
]


def test_a_host_that_was_lost(golden):
    golden(verdict(lost(*GONE)))
    golden(verdict(lost(*GONE, at(Swept(survivors=()), 1))))
    golden(verdict(lost(*GONE, at(Swept(survivors=("python (pid 7, state D)",)), 1))))


def test_several_hosts_that_were_lost_are_named_in_the_order_of_the_hosts(golden):
    state = begun(
        at(Lost(why="cut."), 1),
        at(Lost(why="silent."), 0),
        at(StopRequested(reason="lost")),
    )
    golden(verdict(state))


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
    assert (state.lost, missed_by_peers(state)) == ((), ())
    ends = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=-15), p.Final(reason="lost"), Gone())
    ]
    golden(verdict(begun(*words, *ends)))


def test_a_node_that_ended_as_lost_and_came_back_as_another_one_is_no_failure():
    events = [
        *(at(what, 1) for what in (p.NodeStopping(reason="lost"), p.EngineEnded(code=-15), p.Final(reason="lost"), Gone())),
        at(p.NodeAdded(request_id="a1", hosts=("gpu-a", "gpu-b", "gpu-b"))), *(at(what, 2) for what in (p.EngineEnded(code=0), p.Final(reason="done"), Gone())),
        *(at(what, 0) for what in (p.EngineEnded(code=0), p.Final(reason="done"), Gone())),
    ]  # fmt: skip
    state = fold(begin("j", ("gpu-a", "gpu-b"), terms(3, min_nodes=1)), events)
    assert (state.phase, verdict(state)) == ("done", None)


def test_an_elastic_job_whose_ranks_only_lost_each_other(golden):
    events = [
        at(p.Worker(rank=0, local_rank=0, world_size=1, restart=0, pid=1)),
        raised(0, message="Broken pipe"),
    ]
    ends = [
        at(what, n)
        for n in (0, 1)
        for what in (p.EngineEnded(code=1), p.Final(reason="failed"), Gone())
    ]
    state = fold(
        begin("j", ("gpu-a", "gpu-b"), terms(3, min_nodes=1)), [*events, *ends]
    )
    golden(verdict(state))


def test_a_host_that_its_gang_misses_has_a_moment_to_speak():
    accused = begun(*UNHEARD)
    assert missed_by_peers(accused) == ()
    assert missed_by_peers(replace(accused, at_s=accused.at_s + OWN_WORD_S + 0.1)) == (
        1,
    )
    assert missed_by_peers(begun(at(Broken(why="cut"), 1), *UNHEARD)) == (1,)
    assert missed_by_peers(replace(begun(*UNHEARD, *UNHEARING), at_s=60.0)) == ()


def test_an_interrupt_that_a_host_did_not_confirm(golden):
    state = begun(
        at(StopRequested(reason="interrupted")),
        *GONE,
        at(Lost(why="it did not confirm its end"), 1),
    )
    golden(verdict(state))


def test_a_rank_that_failed_because_a_host_was_lost(golden):
    state = begun(
        raised(0, message="Connection closed by peer"),
        at(StopRequested(reason="failed")),
        *GONE,
        at(Lost(why="cut."), 1),
    )
    golden(verdict(state))


@pytest.mark.parametrize(
    "word",
    ["EADDRINUSE", "The server socket has failed to listen: Address already in use"],
)
@pytest.mark.parametrize(
    "chose_port",
    [
        True,
        False,
    ],
)
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
    assert said(begun(failed, stop, *ends))[2] == ""


def test_in_an_elastic_job_the_torchrun_that_failed_before_any_rank_began_speaks(
    golden,
):
    """Its agent tells the others by the gang channel, and they end their own torchrun by SIGTERM."""
    stopping = p.NodeStopping(reason="failed", culprit=2)
    ends = [
        at(what, n)
        for n in (0, 1)
        for what in (
            stopping,
            p.EngineEnded(code=-15),
            p.Final(reason="failed"),
            Gone(),
        )
    ]
    ends += [
        at(what, 2)
        for what in (p.EngineEnded(code=1), stopping, p.Final(reason="failed"), Gone())
    ]
    three = begin("j", ("gpu-a", "gpu-b", "gpu-c"), terms(1, min_nodes=2))
    golden(verdict(fold(three, ends)))


def test_a_lost_host_that_failed_and_stopped_the_others_is_blamed_and_not_their_torchrun(
    golden,
):
    """They are told by the gang channel whose failure it is; this notebook can't follow that host any more."""
    stopping = p.NodeStopping(reason="failed", culprit=1)
    ends = [at(stopping, 0), at(p.EngineEnded(code=143), 0), at(p.Final(reason="failed"), 0), at(Gone(), 0)]  # fmt: skip
    two = begin("j", ("gpu-a", "gpu-b"), terms(1, min_nodes=1))
    lost = at(Lost(why="gpu-b: it has nothing of job j."), 1)
    golden(verdict(fold(two, [lost, *ends])))
    raised = p.Ended(
        rank=1, restart=0, outcome="raised", code=1, failure=p.Failure(type="OSError", message="gone", traceback=""),
    )  # fmt: skip
    began = p.Worker(rank=1, local_rank=0, world_size=2, restart=0, pid=1)
    seen = [at(began, 1), at(raised, 1), lost]
    golden(verdict(fold(on_terms(two, max_restarts=1), [*seen, *ends])))


def test_the_lease(golden):
    failed = at(p.EngineEnded(code=-15), 1)
    state = begun(failed, at(p.Final(reason="lease"), 1), at(Gone(), 1), *GONE)
    golden(verdict(state))


def test_an_agent_that_was_asked_to_end(golden):
    state = over(reason="the agent was asked to end")
    golden(verdict(state))


def test_a_job_that_was_stopped_from_elsewhere(golden):
    golden(verdict(over(reason="stopped")))


def test_an_elastic_job_that_has_no_restart_left_says_what_used_them_up(golden):
    ends = [
        at(what, n)
        for n in (0, 1)
        for what in (p.EngineEnded(code=1), p.Final(reason="failed"), Gone())
    ]
    three = begin("j", ("gpu-a", "gpu-b", "gpu-c"), terms(1, min_nodes=2))
    golden(verdict(fold(three, [at(Lost(why="switched off"), 2), *ends])))


def test_what_could_not_be_ended_is_named(golden):
    ends = [
        at(
            p.Final(
                reason="interrupted",
                survivors=("python (pid 7, state D)", "sh (pid 8, state D)"),
            )
        ),
        *GONE[2:],
    ]
    state = begun(at(StopRequested(reason="interrupted")), *ends)
    golden(verdict(state))


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


def test_a_node_that_never_began_leaves_nothing_that_could_not_be_stopped(golden):
    stopped = [
        at(StopRequested(reason="interrupted")),
        *(at(p.Final(reason="interrupted"), node) for node in (0, 1)),
    ]
    added = at(p.NodeAdded(request_id="a1", hosts=(*HOSTS, "gpu-c")))
    gone = [at(Gone(), 0), at(Gone(), 1)]
    error = verdict(begun(*stopped, added, at(Lost(why=NEVER_BEGAN), 2), *gone))
    golden(error)

"""Events folded into the state of a run: what each one does, in any order, and that nothing grows without bounds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.bounds import MOST_RANKS
from distmagic.state import fold_ranks as ranks_fold
from distmagic.state.builder import KEPT_LINE_CHARS, KEPT_LINES, KEPT_NOTICES
from distmagic.state.events import (
    Abandoned,
    Connected,
    Event,
    Gone,
    Lost,
    Sending,
    Starting,
    StopRequested,
    Swept,
    Unusable,
    Warned,
)
from distmagic.state.fold import begin, fold
from distmagic.state.fold_ranks import KEPT_METRICS, KEPT_POINTS
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.any_events import ECHO, EVENTS
from tests.builders.events import (
    HOSTS,
    at,
    begun,
    ended,
    hello,
    killed,
    output,
    progress,
    raised,
    texts,
    worker,
)
from tests.builders.states import hold
from tests.builders.terms import terms


def phases(state: RunState) -> list[str]:
    return [state.workers[rank].phase for rank in sorted(state.workers)]


# ---- the way of a run


def test_a_run_that_goes_well():
    state = begin("j", HOSTS, notices=("mind the gap",))
    assert (state.phase, [n.phase for n in state.nodes]) == (
        "connecting",
        ["connecting", "connecting"],
    )
    state = fold(state, [hello(0), hello(1)])
    assert state.phase == "starting"
    assert [(n.phase, n.hostname) for n in state.nodes] == [
        ("starting", "host0"),
        ("starting", "host1"),
    ]
    state = fold(state, [worker(0, 0), worker(3, 1, local=1)])
    assert (state.phase, state.world_size, state.workers[3].label) == (
        "running",
        4,
        "rank 3 (gpu-b, local_rank 1)",
    )
    state = fold(state, [ended(0, 0), ended(3, 1)])
    assert phases(state) == ["done", "done"]
    over = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=0), p.Final(reason="done"))
    ]
    state = fold(state, over)
    assert ([n.phase for n in state.nodes], state.is_over) == (
        ["clear", "clear"],
        False,
    )
    state = fold(state, [at(Gone(), 0), at(Gone(), 1)])
    assert (state.is_over, state.phase, state.notices) == (
        True,
        "done",
        ("mind the gap",),
    )


def test_hosts_are_reached_are_sent_what_they_lack_and_start():
    state, seen = begin("j", HOSTS), []
    for what in (
        Connected(),
        Sending(sent_bytes=0, total_bytes=9),
        Sending(sent_bytes=9, total_bytes=9),
        Starting(),
    ):
        for node in (0, 1):
            state = fold(state, [at(what, node, at_s=float(len(seen)))])
            seen.append((state.phase, state.nodes[node].phase))
    assert seen == [
        ("connecting", "connected"), ("connecting", "connected"), ("connecting", "sending"), ("sending", "sending"),
        ("sending", "sending"), ("sending", "sending"), ("sending", "starting"), ("starting", "starting"),
    ]  # fmt: skip
    assert [(n.sent_bytes, n.total_bytes) for n in state.nodes] == [(9, 9), (9, 9)]
    assert state.started_at_s == 6.0
    assert (
        fold(state, [at(Connected(), 0), at(Sending(sent_bytes=1, total_bytes=9), 0)])
        .nodes[0]
        .phase
        == "starting"
    )


def test_what_the_launcher_warns_of_is_told_once():
    state = fold(
        begin("j", HOSTS),
        [at(Warned(text="gpu-a: old torch")), at(p.Notice(text="old torch"), 0)],
    )
    assert state.notices == ("gpu-a: old torch",)


@pytest.mark.parametrize(
    ("is_wish", "phase", "kind"),
    [(True, "stopped", "Cancelled"), (False, "failed", "RunError")],
)
def test_a_run_that_ends_before_it_has_begun(is_wish, phase, kind):
    events = [
        at(Connected(), 0),
        at(Unusable(unusable="gpu-b: no"), 1),
        at(Abandoned(why="It ended.", is_wish=is_wish)),
    ]
    state = fold(begin("j", HOSTS), events)
    assert (state.is_over, state.phase, state.nodes[1].unusable) == (
        True,
        phase,
        "gpu-b: no",
    )
    error = verdict(state)
    assert (type(error).__name__, error.message) == (kind, "It ended.")


def test_time_goes_forward_only():
    state = fold(begun(), [at(None, at_s=5.0), at(None, at_s=3.0)])
    assert state.at_s == 5.0


def test_events_of_nodes_that_are_not_there_are_left_out():
    state = begun()
    assert (
        fold(state, [at(p.Final(reason="done"), node) for node in (-1, 2, 99)]) == state
    )


def test_a_state_that_somebody_holds_does_not_change():
    first = begun(
        progress(0, points=p.points_of([p.MetricRow(at_s=1.0, metrics={"loss": 1.0})])),
        output("a"),
    )
    kept = (
        dict(first.workers),
        dict(first.series),
        first.lines,
        dict(first.open_lines),
        list(first.series[0]["loss"]),
    )
    more = [
        progress(
            0,
            at_s=2.0,
            points=p.points_of(
                [p.MetricRow(at_s=2.0, metrics={"loss": 2.0, "acc": 1.0})]
            ),
        ),
        output("b\n"),
        raised(1),
    ]
    second = fold(first, more)
    third = fold(first, more)
    now = (
        dict(first.workers),
        dict(first.series),
        first.lines,
        dict(first.open_lines),
        list(first.series[0]["loss"]),
    )
    assert now == kept
    assert first.first_failure is None
    assert second == third


def test_one_event_at_a_time_or_all_at_once():
    events = [
        *(progress(r, r // 2, at_s=k / 2, step=float(k), points=p.points_of([p.MetricRow(at_s=k / 2, metrics={"x": k})])) for k in range(9) for r in range(4)),
        output("one\ntw"), output("o\n"), raised(1), at(StopRequested(reason="failed")), killed(0, number=15),
    ]  # fmt: skip
    whole, single = begun(*events), begun()
    for event in events:
        single = fold(single, [event])
    assert single == whole


# ---- progress


def test_progress_of_report():
    state = begun(progress(0, at_s=2.0, step=10.0, total=100.0, device="cuda:0"))
    one = state.workers[0]
    assert (one.progress, one.rate, one.device, one.eta_s) == (
        (10.0, 100.0),
        None,
        "cuda:0",
        None,
    )
    state = fold(state, [progress(0, at_s=4.0, step=20.0)])
    assert (state.workers[0].rate, state.workers[0].eta_s) == (
        pytest.approx(5.0),
        pytest.approx(16.0),
    )
    assert state.workers[0].total == 100.0
    state = fold(state, [progress(0, at_s=5.0, step=30.0)])
    assert state.workers[0].rate == pytest.approx(0.8 * 5 + 0.2 * 10)
    state = fold(state, [progress(0, at_s=5.0, step=30.0), progress(0, at_s=6.0)])
    assert state.workers[0].rate == pytest.approx(6.0)
    assert state.workers[0].at_s == 6.0


def test_the_rate_counts_from_the_first_step_that_was_told():
    """Training that goes on from a snapshot has not made 900 steps in its first second."""
    rows = tuple(
        p.MetricRow(at_s=9.0 + i / 2, step=900.0 + i, metrics={"loss": 1.0})
        for i in range(3)
    )
    state = begun(
        progress(0, at_s=10.0, step=902.0, total=1000.0, points=p.points_of(rows))
    )
    assert (state.workers[0].rate, state.workers[0].eta_s) == (2.0, 49.0)


def test_no_eta_without_rate_total_or_a_running_rank():
    state = begun(
        progress(0, at_s=0.0, step=1.0, total=2.0),
        progress(1, at_s=1.0, step=1.0),
        ended(2, 1),
    )
    assert [state.workers[rank].eta_s for rank in range(4)] == [None] * 4


def test_bars_are_in_order_and_the_outermost_speaks():
    outer, inner = (
        p.Bar(id=1, n=1.0, total=5.0, rate=0.5),
        p.Bar(id=2, n=3.0, total=9.0, rate=7.0),
    )
    state = begun(progress(0, bars=(inner,)), progress(0, bars=(outer,)))
    assert [bar.id for bar in state.workers[0].bars] == [1, 2]
    assert (state.workers[0].progress, state.workers[0].rate) == ((1.0, 5.0), 0.5)
    state = fold(
        state, [progress(0, bars=(p.Bar(id=2, n=9.0, total=9.0, closed=True),))]
    )
    assert [bar.id for bar in state.workers[0].bars] == [1]
    last = p.Bar(id=1, n=5.0, total=5.0, closed=True)
    state = fold(state, [progress(0, bars=(last,))])
    assert state.workers[0].bars == (last,)
    state = fold(state, [progress(0, bars=(p.Bar(id=3, n=0.0),))])
    assert [bar.id for bar in state.workers[0].bars] == [3]


def test_a_report_leaves_what_else_is_known_of_a_rank():
    """Progress is folded field by field: none may be left out."""
    state = begun()
    full = dataclasses.replace(
        state.workers[0], phase="stopped", round=3, pid=7, device="cuda:1", bars_before=2,
        total=9.0, has_printed=True, exit=p.Exit(rank=0, local_rank=0, pid=7, code=1), left=p.Stacks(request_id=p.LEFT, rank=0, local_rank=0),
        ended=ended(0).what,
    )  # fmt: skip
    before = dataclasses.replace(state, workers={**state.workers, 0: full})
    after = fold(before, [progress(0, step=1.0)]).workers[0]
    moved = {"step", "at_s", "advanced_at_s", "rate"}
    for field in dataclasses.fields(full):
        if field.name not in moved:
            assert getattr(after, field.name) == getattr(full, field.name), field.name


def test_a_bar_that_is_over_is_no_progress_of_a_rank_that_goes_on():
    """`Loading weights 41/41` of a preparation, or an epoch's bar before the next one begins."""
    loaded = p.Bar(id=1, desc="Loading weights", n=41.0, total=41.0, rate=90.0)
    over = dataclasses.replace(loaded, closed=True)
    state = begun(progress(0, bars=(loaded,)), progress(0, bars=(over,)))
    assert state.workers[0].progress == (None, None)
    assert state.workers[0].eta_s is None
    train = p.Bar(id=2, desc="train", n=10.0, total=40.0, rate=2.0)
    state = fold(state, [progress(0, bars=(train,))])
    rank = state.workers[0]
    assert (rank.progress, rank.eta_s, rank.bars_before) == ((10.0, 40.0), 15.0, 1)
    inner = p.Bar(id=3, desc="val", n=1.0, total=2.0)
    state = fold(state, [progress(0, bars=(inner,))])
    assert state.workers[0].bars_before == 1, "an inner bar is no other one"
    last = dataclasses.replace(train, n=40.0, closed=True)
    at_end = fold(state, [progress(0, bars=(dataclasses.replace(inner, closed=True), last)), ended(0)])  # fmt: skip
    assert at_end.workers[0].progress == (40.0, 40.0), "in the final table"


def test_bars_that_close_together_leave_the_outermost():
    nested = (p.Bar(id=1, n=4.0, total=5.0), p.Bar(id=2, n=8.0, total=9.0))
    state = begun(progress(0, bars=nested))
    state = fold(
        state,
        [
            progress(
                0, bars=tuple(dataclasses.replace(bar, closed=True) for bar in nested)
            )
        ],
    )
    assert [bar.id for bar in state.workers[0].bars] == [1]
    # The next one after it.
    state = fold(state, [progress(0, bars=(p.Bar(id=3, n=9.0, closed=True),))])
    assert [bar.id for bar in state.workers[0].bars] == [3]


def test_metrics_and_series():
    rows = (
        p.MetricRow(at_s=0.5, step=1.0, metrics={"loss": 2.0}),
        p.MetricRow(at_s=1.0, metrics={"loss": 1.0, "lr": 0.1}),
    )
    state = begun(progress(2, 1, points=p.points_of(rows)))
    assert dict(state.workers[2].metrics) == {"loss": 1.0, "lr": 0.1}
    assert [(x.at_s, x.step, x.value) for x in state.series[2]["loss"]] == [
        (0.5, 1.0, 2.0),
        (1.0, None, 1.0),
    ]


@pytest.mark.parametrize(
    "stray",
    [progress(0, 1, step=5.0), progress(0, restart=1, step=5.0), progress(9, step=5.0)],
)
def test_progress_of_another_node_restart_or_rank_is_left_out(stray):
    assert begun(stray) == begun()


# ---- output


def test_lines_are_labelled_and_wait_for_their_end():
    state = begun(
        output("hello\nwor"),
        output("to you\n", 2, 1, "stderr"),
        output("engine\n", -1, 1),
    )
    assert [(x.label, x.stream, x.text) for x in state.lines] == [
        ("rank 0 gpu-a", "stdout", "hello"),
        ("rank 2 gpu-b", "stderr", "to you"),
        ("torchrun gpu-b", "stdout", "engine"),
    ]
    assert dict(state.open_lines) == {(0, 0, "stdout"): "wor"}
    state = fold(state, [output("ld\n")])
    assert (texts(state)[-1], dict(state.open_lines), state.lines_seen) == (
        "world",
        {},
        4,
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\r\nb\r\n", ["a", "b"]),
        (" 10%\r 50%\r100%\n", ["100%"]),
        (" 10%\r 50%\r", [" 50%"]),
        ("a\r\r\nb", ["a", "b"]),
        ("\n\n", ["", ""]),
        ("old\rnew\rnewest", ["newest"]),
        ("x\r", ["x"]),
        ("50%\r   \r", []),
        ("\x1b[2K\r\x1b[2K\r", []),
    ],
)
def test_carriage_returns_in_any_cutting(text, lines):
    for cut in range(len(text) + 1):
        for again in range(cut, len(text) + 1):
            parts = (text[:cut], text[cut:again], text[again:])
            state = begun(*(output(part) for part in parts), ended(0))
            assert texts(state) == lines, parts


@given(
    st.text(alphabet="ab\r\n", max_size=40), st.lists(st.integers(0, 40), max_size=6)
)
def test_any_cutting_gives_the_same_lines(text, cuts):
    edges = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert texts(begun(*map(output, parts), ended(0))) == texts(
        begun(output(text), ended(0))
    )


def test_an_end_closes_the_open_lines():
    state = begun(
        output("last word"),
        output("cry", stream="stderr"),
        output("other", 1),
        killed(0),
    )
    assert (texts(state), dict(state.open_lines)) == (
        ["last word", "cry"],
        {(1, 0, "stdout"): "other"},
    )


def test_skipped_output_is_told(golden):
    state = begun(
        output("begun"), output("cry", stream="stderr"), output("end\n", skipped=123456)
    )
    golden(*texts(state))
    assert dict(state.open_lines) == {(0, 0, "stderr"): "cry"}


def test_memory_of_output_is_bounded():
    state = begun(*(output(f"{i}\n") for i in range(5 * KEPT_LINES)))
    assert (len(state.lines), state.lines_seen) == (KEPT_LINES, 5 * KEPT_LINES)
    assert texts(state)[-1] == str(5 * KEPT_LINES - 1)
    state = begun(output("\n".join(map(str, range(100_001)))))
    assert (len(state.lines), state.lines_seen, texts(state)[-1]) == (
        KEPT_LINES,
        100_000,
        "99999",
    )
    state = begun(*[output("x" * 10_000)] * 3, ended(0))
    assert texts(state) == ["x" * KEPT_LINE_CHARS]


def test_a_stream_that_is_none():
    assert begun(output("x\n", stream="../../etc/passwd")) == begun()


def test_a_rank_that_is_none_opens_no_line():
    assert begun(output("x", rank=MOST_RANKS), output("x", rank=-2)) == begun()


# ---- ends and blame


def test_the_first_rank_that_fails_speaks_for_all():
    state = begun(raised(2, 1), raised(0), killed(1, number=15))
    assert (state.first_failure, phases(state)) == (
        2,
        ["failed", "stopped", "failed", "running"],
    )
    assert state.workers[2].ended.failure.message == "no"


@pytest.mark.parametrize(
    ("end", "phase"),
    [
        ({"outcome": "returned"}, "done"),
        ({"outcome": "exited", "code": 0}, "done"),
        ({"outcome": "exited", "code": 3}, "failed"),
        ({"outcome": "raised", "code": 1}, "failed"),
        ({"outcome": "signalled", "code": -15}, "failed"),
        ({"outcome": "signalled", "code": -9}, "failed"),
        ({"outcome": "of a younger protocol"}, "failed"),
    ],
)
def test_what_is_a_failure(end, phase):
    assert begun(ended(0, **end)).workers[0].phase == phase


def test_ends_after_a_stop_are_no_failures():
    state = begun(
        at(StopRequested(reason="interrupted")),
        killed(0, number=15),
        killed(1),
        raised(2, 1),
        ended(3, 1),
    )
    assert (phases(state), state.first_failure) == (
        ["stopped", "stopped", "stopped", "done"],
        None,
    )


def test_blame_goes_from_the_rank_that_lost_its_peer_to_that_peer():
    state = begun(
        raised(0, message=ECHO, at_s=1.0),
        at(StopRequested(reason="failed")),
        killed(2, 1, at_s=1.2),
    )
    assert (state.first_failure, phases(state)[2]) == (2, "failed")


@pytest.mark.parametrize(
    "later",
    [
        [raised(2, 1, at_s=9.0)],
        [at(p.NodeStopping(reason="failed", culprit=0), 1), killed(2, 1, at_s=1.2)],
        [killed(2, 1, number=6, at_s=9.0)],
        [killed(2, 1, number=15, at_s=1.2)],
        [killed(2, 1, number=2, at_s=1.2)],
        [raised(2, 1, ECHO, at_s=1.2)],
        [ended(2, 1, at_s=1.2)],
    ],
    ids=[
        "too late",
        "by our SIGKILL",
        "by a watchdog",
        "by our SIGTERM",
        "by our SIGINT",
        "an echo too",
        "went well",
    ],
)
def test_blame_stays(later):
    failed = raised(0, message=ECHO, at_s=1.0)
    state = begun(failed, at(StopRequested(reason="failed")), *later)
    assert state.first_failure == 0


@pytest.mark.parametrize(
    "text",
    [
        ECHO,
        "Connection reset by peer",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Remote peer closed the connection.",
    ],
)
def test_a_death_gets_the_blame_however_late_it_is_known(text):
    """A busy host reports how its rank died long after another one has missed it."""
    failed = raised(0, message=text, at_s=1.0)
    state = begun(failed, at(StopRequested(reason="failed")), killed(2, 1, at_s=9.0))
    assert (state.first_failure, phases(state)[2]) == (2, "failed")


WATCHDOG = """\
[rank0]:[E1127 22:10:01.123 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5
terminate called after throwing an instance of 'c10::DistBackendError'
"""


@pytest.mark.parametrize(
    ("written", "culprit"), [(WATCHDOG, 2), ("free(): invalid pointer\n", 0)]
)
def test_a_rank_that_nccl_aborts_for_a_lost_peer_is_an_echo(written, culprit):
    aborted = [output(written, 0, stream="stderr"), killed(0, number=6)]
    assert begun(*aborted, killed(2, 1)).first_failure == culprit
    assert begun(killed(2, 1), *aborted).first_failure == 2
    assert begun(raised(1, message=ECHO), *aborted).first_failure == (
        1 if culprit else 0
    )


def test_a_death_that_torchrun_may_have_caused_is_blamed_at_once_or_never():
    """It ends the others of its node before it starts all again, by SIGKILL after 30 s."""
    for at_s, culprit in ((1.2, 2), (31.5, 0)):
        late = killed(2, 1, at_s=at_s)
        state = begun(raised(0, message=ECHO, at_s=1.0), late, restarts=1)
        assert state.first_failure == culprit


@pytest.mark.parametrize("dead", [1, 2])
def test_a_death_of_before_a_restart_has_no_blame_for_what_came_after_it(dead):
    """Torchrun counts restarts by node; all nodes agree on the round."""
    failure = p.Failure(type="RuntimeError", message=ECHO, traceback="")
    failed = ended(0, restart=1, outcome="raised", code=1, failure=failure)
    hello = worker(0, 0, restart=1).what
    node, round_ = (0, 0) if dead == 1 else (1, 2)
    again = at(dataclasses.replace(hello, round=round_))
    state = begun(again, failed, killed(dead, node), restarts=1)
    assert state.first_failure == 0
    met = at(dataclasses.replace(worker(dead, node).what, round=round_), node)
    state = begun(again, met, failed, killed(dead, node), restarts=1)
    assert state.first_failure == (0 if dead == 1 else 2)


def test_an_abort_is_no_echo_of_what_the_rank_wrote_before_a_restart():
    again = [worker(0, 0, restart=1), ended(0, restart=1, outcome="signalled", code=-6)]
    lost = output(WATCHDOG, 0, stream="stderr")
    assert begun(lost, *again, killed(2, 1), restarts=1).first_failure == 0
    flood = output("x\n" * KEPT_LINES)
    late = begun(again[0], lost, again[1], flood, killed(2, 1))
    assert late.first_failure == 2


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer", 2),
        ("    raise ValueError('gloo: Connection closed by peer')", 0),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", 0),
    ],
    ids=["a library's", "the user's source", "another connection"],
)  # fmt: skip
def test_an_exception_from_a_lost_connection_is_an_echo(text, culprit):
    chain = f"{text}\n\nThe above exception was the direct cause of the following exception:\n\nStepError: no"
    failure = p.Failure(type="StepError", message="no", traceback=chain)
    failed = ended(0, outcome="raised", code=1, failure=failure)
    assert begun(failed, killed(2, 1)).first_failure == culprit


def test_blame_stays_where_the_first_had_a_reason_of_its_own():
    assert begun(raised(0, message="out of patience"), killed(2, 1)).first_failure == 0


def test_a_restart_begins_anew():
    state = begun(progress(0, step=5.0), raised(0), restarts=1)
    state = fold(state, [worker(0, 0, restart=1)])
    one = state.workers[0]
    assert (state.first_failure, one.phase, one.restart, one.step, one.ended) == (
        None,
        "running",
        1,
        None,
        None,
    )
    assert fold(state, [ended(0, restart=0), progress(0, step=9.0)]) == state


def test_an_elastic_job_that_shrinks_forgets_the_ranks_it_lost():
    state = begun(raised(3, 1), worker(0, 0, restart=1, world=2), restarts=1)
    assert (sorted(state.workers), state.world_size, state.first_failure) == (
        [0, 1],
        2,
        None,
    )


@pytest.mark.parametrize(
    "end",
    [
        ended(0, outcome="replaced", code=-9),
        killed(0, number=15),
        raised(0, message=ECHO),
    ],
    ids=["by its agent", "by torchrun", "when its peer was gone"],
)
def test_ranks_that_end_because_an_elastic_job_forms_anew_have_not_failed(end):
    events = [
        hello(0),
        hello(1),
        worker(0, 0),
        worker(1, 0, local=1),
        at(Lost(why="cut"), 1),
        end,
    ]
    state = fold(begin("j", HOSTS, terms(3, min_nodes=1)), events)
    assert (phases(state)[0], state.first_failure) == ("stopped", None)
    assert begun(killed(0, number=15), restarts=3).first_failure == 0


def test_the_node_whose_torchrun_failed_first():
    state = begun(
        at(p.EngineEnded(code=1), 1),
        at(StopRequested(reason="failed")),
        at(p.EngineEnded(code=-15), 0),
    )
    assert (state.failed_node, [n.code for n in state.nodes]) == (1, [-15, 1])
    assert (
        begun(
            at(StopRequested(reason="interrupted")), at(p.EngineEnded(code=-15), 0)
        ).failed_node
        is None
    )


def test_exits_that_torchrun_saw():
    seen = p.Exit(rank=0, local_rank=0, pid=100, code=-9)
    state = begun(
        at(
            p.EngineEnded(
                code=1, exits=(seen, p.Exit(rank=2, local_rank=0, pid=1, code=1))
            )
        )
    )
    assert (state.workers[0].exit, state.workers[2].exit) == (seen, None)


def test_the_last_word_of_a_node_ends_its_ranks():
    state = begun(
        output("open"),
        ended(0),
        at(p.Final(reason="lease", survivors=("python (pid 7, state D)",))),
    )
    assert phases(state) == ["done", "stopped", "running", "running"]
    assert (state.nodes[0].reason, state.nodes[0].survivors) == (
        "lease",
        ("python (pid 7, state D)",),
    )
    assert texts(state) == ["open"]


def test_a_node_that_is_lost():
    state = begun(ended(2, 1), at(Lost(why="cut"), 1), at(Lost(why="cut again"), 1))
    assert (phases(state), state.lost, state.phase) == (
        ["running", "running", "done", "lost"],
        {1: "cut"},
        "running",
    )
    state = fold(
        state,
        [at(Swept(survivors=()), 1), at(p.Final(reason="stopped"), 0), at(Gone(), 0)],
    )
    assert (state.nodes[1].phase, state.is_over, state.phase) == ("clear", True, "lost")
    assert fold(state, [at(Lost(why="late"), 0)]) == state  # it was gone before


def test_phases_of_a_run():
    stopping = begun(at(StopRequested(reason="interrupted")))
    assert stopping.phase == "stopping"
    gone = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=-15), p.Final(reason="x"), Gone())
    ]
    assert fold(stopping, gone).phase == "stopped"
    assert fold(begun(raised(0)), gone).phase == "failed"
    assert fold(begun(), gone).phase == "failed"
    assert (
        fold(stopping, [at(StopRequested(reason="timeout"))]).stopping == "interrupted"
    )


# ---- what nodes say of themselves


def test_the_endpoint():
    state = begun(
        at(p.Endpoint(state="unreached", detail="refused"), 1),
        at(p.Endpoint(state="open"), 0, at_s=4.0),
    )
    assert (dict(state.unreached), state.endpoint_open_at_s) == ({1: "refused"}, 4.0)
    reached = at(p.Endpoint(state="reached"), 1)
    assert dict(fold(state, [reached]).unreached) == {}
    assert dict(
        fold(state, [at(StopRequested(reason="rendezvous")), reached]).unreached
    ) == {1: "refused"}


def test_notices_are_told_once_and_are_bounded():
    state = begun(*[at(p.Notice(text="full"), 1)] * 3)
    assert state.notices == ("gpu-b: full",)
    assert (
        len(begun(*(at(p.Notice(text=str(i))) for i in range(999))).notices)
        == KEPT_NOTICES
    )


def test_what_the_journal_no_longer_has_is_told_once_and_glues_no_lines(golden):
    skipped = at(p.Skipped(through=9))
    state = begun(
        worker(0),
        output("half a li", 0),
        skipped,
        output("after the gap\n", 0),
        skipped,
    )
    assert [line.text for line in state.lines] == ["half a li", "after the gap"]
    golden(*state.notices)


# ---- bounds and any order


def test_metrics_are_bounded():
    rows = tuple(
        p.MetricRow(at_s=float(i), metrics={"loss": float(i)})
        for i in range(3 * KEPT_POINTS)
    )
    loss = begun(progress(0, points=p.points_of(rows))).series[0]["loss"]
    assert len(loss) <= KEPT_POINTS
    assert loss[-1].value == 3 * KEPT_POINTS - 1
    many = p.MetricRow(at_s=1.0, metrics={f"m{i}": 1.0 for i in range(1000)})
    state = begun(progress(0, points=p.points_of([many])))
    assert len(state.series[0]) == len(state.workers[0].metrics) == KEPT_METRICS
    world = 4096  # with very many ranks each keeps less
    large = [worker(0, 0, world=world), progress(0, points=p.points_of([*rows, many]))]
    state = fold(begin("j", HOSTS), large)
    assert len(state.series[0]) == 24
    assert 50 / 4 < len(state.series[0]["loss"]) <= 50
    bars = tuple(p.Bar(id=i) for i in range(1000))
    assert len(begun(progress(0, bars=bars)).workers[0].bars) == ranks_fold.KEPT_BARS


@settings(max_examples=3 * settings.default.max_examples)
@given(EVENTS, st.integers(1, 10))
def test_any_events_in_any_order(events, batch):
    state = begin("j", HOSTS, terms(1))
    for i in range(0, len(events), batch):
        before = state
        state = fold(state, events[i : i + batch])
        assert state.at_s >= before.at_s
        assert state.lines_seen >= before.lines_seen
        hold(state)


# ---- which node has which ranks


def claim(rank: int, node: int, world: int = 4, number: int = 0) -> Event:
    return at(
        p.Worker(
            rank=rank, local_rank=0, world_size=world, restart=0, pid=7, round=number
        ),
        node,
    )


def owners(state: RunState) -> dict[int, int]:
    return {rank: worker.node_rank for rank, worker in state.workers.items()}


def test_in_a_later_round_ranks_may_change_places():
    """The end of an old rank may come after the start of its successor on another node."""
    hosts = ("gpu-a", "gpu-b", "gpu-c")
    first = [claim(node, node, 3) for node in range(3)]
    second = [
        claim(0, 0, 3, number=1),
        claim(2, 1, 3, number=1),
        claim(1, 2, 3, number=1),
    ]
    for order in itertools.permutations(second):
        late = [
            ended(1, 1, outcome="replaced", code=-15),
            ended(2, 2, outcome="replaced", code=-15),
        ]
        state = fold(begin("j", hosts, terms(3, min_nodes=1)), [*first, *order, *late])
        assert owners(state) == {0: 0, 1: 2, 2: 1}
        assert phases(state) == ["running"] * 3


def test_a_rank_that_did_not_end_well_may_come_back_elsewhere():
    """Some versions of torch don't tell the round."""
    state = fold(
        begin("j", HOSTS, terms(3)),
        [claim(0, 0), claim(1, 1), killed(1, 1), claim(1, 0)],
    )
    assert owners(state) == {0: 0, 1: 0}


def test_a_world_is_as_large_as_the_lead_says():
    state = fold(
        begin("j", HOSTS, terms(3, min_nodes=1)), [claim(0, 0, 2), claim(1, 1, 1)]
    )
    assert (owners(state), state.world_size) == ({0: 0}, 2)


def test_a_later_round_is_believed_from_any_node_and_its_smaller_world_counts():
    start = begin("j", HOSTS, terms(3, min_nodes=1))
    state = fold(
        start,
        [claim(0, 0, 2), claim(1, 1, 2), claim(0, 1, 1, number=1), claim(1, 0, 2)],
    )
    assert (owners(state), state.rdzv_round, state.world_size) == ({0: 1}, 1, 1)


def test_a_host_that_is_lost_is_named_once():
    state = fold(
        begin("j", HOSTS), [at(Lost(why=f"{HOSTS[1]}: it has no such job."), 1)]
    )
    assert state.lost == {1: "it has no such job."}


def test_what_a_node_tells_late_of_an_earlier_round_changes_nothing():
    """Each node's journal is in order, but that of one may be read before that of another."""

    def of_round(number: int, node: int, rank: int, world_size: int) -> Event:
        return at(
            p.Worker(
                rank=rank,
                local_rank=0,
                world_size=world_size,
                restart=0,
                pid=7,
                round=number,
            ),
            node,
        )

    first = [
        of_round(0, 0, 0, 1),
        at(p.Ended(rank=0, restart=0, outcome="signalled", code=-15), 0),
    ]
    second = [
        of_round(1, 0, 0, 2),
        at(p.Ended(rank=0, restart=0, outcome="returned", result_bytes=5), 0),
    ]
    other = [
        of_round(1, 1, 1, 2),
        at(p.Ended(rank=1, restart=0, outcome="returned", result_bytes=6), 1),
    ]
    start = begin("j", HOSTS, terms(3, min_nodes=1))
    states = [
        fold(start, events)
        for events in ([*first, *second, *other], [*other, *first, *second])
    ]
    for state in states:
        assert (state.world_size, state.rdzv_round) == (2, 1)
        assert {rank: (w.phase, w.node_rank) for rank, w in state.workers.items()} == {
            0: ("done", 0),
            1: ("done", 1),
        }


NOISE = """\
[W1125 14:19:41.13 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
W1125 14:19:40.97 412 torch/distributed/run.py:852]
W1125 14:19:40.97 412 torch/distributed/run.py:852] *****************************************
W1125 14:19:40.97 412 torch/distributed/run.py:852] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded
mine
"""


@pytest.mark.parametrize("cut", [None, 40])
def test_lines_that_torch_writes_in_every_run_are_in_the_logs_alone(cut):
    pieces = [NOISE] if cut is None else [NOISE[:cut], NOISE[cut:]]
    state = begin("j", ["gpu-a"], terms(0))
    state = fold(
        state, [worker(0, 0), *(output(text, stream="stderr") for text in pieces)]
    )
    assert [line.text for line in state.lines] == ["mine"]
    assert state.lines_seen == 1

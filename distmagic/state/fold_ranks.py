"""Folds the events of ranks: their start, progress, output and end, and which node has which ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from distmagic.failures import failure_kind
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_RANKS
from distmagic.state.builder import STREAMS, RunStateBuilder
from distmagic.state.events import Event
from distmagic.state.hangs import has_shown_progress, have_moved, is_of_a_wait
from distmagic.state.model import WorkerState
from distmagic.state.phases import RankPhase
from distmagic.state.series import Series

KEPT_METRICS = 50  # names of metrics a rank
_METRICS_OF_ALL = 100_000  # of all ranks together: with very many ranks each keeps fewer, but at least
_FEWEST_METRICS = 4
KEPT_BARS = 20  # bars a rank
_BARS_OF_ALL = 40_000  # of all ranks together
KEPT_POINTS = 2000  # points of one metric of one rank
_POINTS_OF_ALL = (
    128_000  # points of one metric of all ranks together, and at least of each:
)
_FEWEST_POINTS = 50
KEPT_OPEN_LINES = 2 * MOST_RANKS
_LATER_TRACEBACK_CHARS = 4000  # of the traceback of a rank that was not the first to fail; its log has all of it
_LATER_CHARS = 2000  # of each other text of its end
_LATER_CHARS_OF_ALL = 8_000_000  # of each text, of all ranks together: with very many ranks each keeps less
_BAR_CHARS = 200  # of each text of a bar
# How many events of one node wait for the lead, and the bytes of the lines in which they came: while there is room for
_HELD_REPORTS = (1000, 256 << 10)  # reports and output
_HELD_EVENTS = (4000, 512 << 10)  # others
_HELD_LAST_WORDS = (4100, 576 << 10)  # the end of its torchrun and of its agent
_ECHO_S = 2.0  # a cause arrives at most this long after its echo


# ---- which node has which ranks
#
# A host must not take a rank from another host: the result of a rank is fetched from the node that has it, and then
# unpickled. Where the plan numbers the ranks (rdzv_backend static), a node has those of the plan. Else the lead counts:
# it is part of every round of the rendezvous, and it holds the store by which the nodes meet, so a round begins with
# the lead's first rank in it. Its ranks say in which order the nodes have met, and which ranks torchrun has given each.
# Where that is not known a rank belongs to the first node that claims it in one round.
#
# Events of different nodes come in any order. A node is ahead while it is in a round of which the lead's events have
# not come: its events wait for those of the lead.


def is_ahead(builder: RunStateBuilder, event: Event) -> bool:
    """Whether an event is of a round that the lead has not begun, as far as its events have come, and may still begin."""
    if not isinstance(event.what, protocol.Worker) or event.node_rank == 0:
        return False
    if event.what.round <= builder.rdzv_round:
        return False
    lead = builder.nodes[0]
    is_lead_over = lead.code is not None or lead.phase in ("clear", "gone")
    return not is_lead_over and not builder.has_lost(0)


def must_wait(builder: RunStateBuilder, event: Event) -> bool:
    """Whether an event has to wait for the lead: its node is ahead, or events of its node wait already."""
    if event.node_rank in builder.held:
        return type(event.what) in _OF_RANKS
    return is_ahead(builder, event)


def hold(builder: RunStateBuilder, event: Event) -> None:
    """Keep an event until the lead is as far. Of very many, reports and output are left out, then all but its last words."""
    held = builder.held.get(event.node_rank, ())
    most, most_bytes = _HELD_EVENTS
    if isinstance(event.what, protocol.Progress | protocol.Output):
        most, most_bytes = _HELD_REPORTS
    elif isinstance(event.what, protocol.EngineEnded | protocol.Final):
        most, most_bytes = _HELD_LAST_WORDS
    held_bytes = sum(one.size_bytes for one in held)
    if len(held) < most and held_bytes + event.size_bytes <= most_bytes:
        builder.held[event.node_rank] = (*held, event)


def _agrees_with_plan(
    builder: RunStateBuilder, node: int, what: protocol.Worker
) -> bool:
    """Whether there can be such a rank on this node, in such a world."""
    if not 0 <= what.rank < what.world_size <= MOST_RANKS:
        return False
    if builder.planned_world_size not in (0, what.world_size):
        return False
    ranks = builder.nodes[node].ranks
    return ranks is None or what.rank in ranks


def _may_have(builder: RunStateBuilder, node: int, what: protocol.Worker) -> bool:
    """Whether a node may have the rank that it claims with this event."""
    if node != 0 and what.round > builder.rdzv_round:
        return False  # the lead is over and has never been in such a round
    if what.round != builder.rdzv_round:
        return True
    if not _fits_order(builder, node, what.rank):
        return False
    if node != 0 and what.world_size != builder.world_size:
        for worker in builder.workers.values():
            if worker.node_rank == 0 and worker.round == what.round:
                return False  # the lead has said how large the world of this round is
    owner = builder.workers.get(what.rank)
    if owner is None or owner.node_rank == node or owner.round != what.round:
        return True
    # Some versions of torch don't tell the round.
    has_parted = builder.nodes[owner.node_rank].stopping == "lost"
    return owner.phase != "done" and (owner.phase != "running" or has_parted)


def _fits_order(builder: RunStateBuilder, node: int, rank: int) -> bool:
    """Whether a node may have a rank by what the lead has told of this round; True where that is not known.

    A node that has come later, or whose address is another one here, may have those of nodes that nobody here is.
    """
    firsts = builder.firsts
    if not firsts or len(firsts) != len(builder.order):
        return True
    known = {one.address for one in builder.nodes} & set(builder.order)
    own = {one.address for one in builder.nodes if one.host == builder.nodes[node].host}
    ends = [*firsts[1:], builder.world_size]
    for address, first, end in zip(builder.order, firsts, ends, strict=True):
        if first <= rank < end:
            return address in own or not (own & known or address in known)
    return False


def _worker(builder: RunStateBuilder, node: int, what: protocol.Worker) -> None:
    if not _agrees_with_plan(builder, node, what) or not _may_have(builder, node, what):
        return
    builder.advance(node, "running")
    if what.round < builder.rdzv_round:
        return  # events of a later round came before this one, from other nodes
    builder.rdzv_round = what.round
    if node == 0:
        builder.order, builder.firsts = list(what.order), list(what.firsts)
        for rank in list(builder.workers):
            if rank >= what.world_size:  # an elastic job has shrunk
                del builder.workers[rank]
        builder.world_size = what.world_size
    else:  # no smaller world than the lead's, if that is known
        builder.world_size = max(builder.world_size, what.world_size)
    builder.resume(what.rank)
    builder.workers[what.rank] = WorkerState(
        rank=what.rank,
        local_rank=what.local_rank,
        node_rank=node,
        host=builder.nodes[node].host,
        phase="running",
        round=what.round,
        restart=what.restart,
        pid=what.pid,
        advanced_at_s=builder.at_s,
    )
    builder.note_advance()
    if (
        builder.first_failure == what.rank
        or builder.first_failure not in builder.workers
    ):
        builder.first_failure = (
            None  # torchrun started the rank again, or goes on without it
        )


def _progress(builder: RunStateBuilder, node: int, what: protocol.Progress) -> None:
    worker = builder.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    step = worker.step if what.step is None else what.step
    bars = (
        _merge_bars(worker.bars, what.bars, builder.world_size)
        if what.bars
        else worker.bars
    )
    bars_before = worker.bars_before
    if worker.bars and bars[0].id > worker.bars[0].id:
        bars_before += 1
    advanced_at_s = worker.advanced_at_s
    if what.rows or step != worker.step or have_moved(worker.bars, bars):
        builder.note_advance()
        advanced_at_s = builder.at_s
    # Spelled out: `replace` costs three times as much, and this is the event of which there are most.
    builder.workers[what.rank] = WorkerState(
        rank=worker.rank,
        local_rank=worker.local_rank,
        node_rank=node,
        host=worker.host,
        phase=worker.phase,
        round=worker.round,
        restart=worker.restart,
        pid=worker.pid,
        device=what.device or worker.device,
        step=step,
        total=worker.total if what.total is None else what.total,
        bars=bars,
        bars_before=bars_before,
        metrics=_add_rows(builder, worker, what.rows) if what.rows else worker.metrics,
        has_printed=what.is_printed if what.rows else worker.has_printed,
        at_s=what.at_s,
        advanced_at_s=advanced_at_s,
        rate=_rate(worker, step, what, bars),
        ended=worker.ended,
        exit=worker.exit,
    )


def _merge_bars(
    old: tuple[protocol.Bar, ...], new: tuple[protocol.Bar, ...], world_size: int
) -> tuple[protocol.Bar, ...]:
    """Return the open bars, outermost first; if all are closed, the outermost of those that closed just now."""
    new = tuple(_bounded_bar(bar) for bar in new)
    if len(old) == len(new) == 1 and old[0].id == new[0].id:
        return new
    by_id = {bar.id: bar for bar in (*old, *new)}
    # A bar inside another one is made later.
    merged = [by_id[key] for key in sorted(by_id)]
    still_open = [bar for bar in merged if not bar.closed]
    if still_open:
        most = max(1, min(KEPT_BARS, _BARS_OF_ALL // max(1, world_size)))
        return tuple(still_open[:most])
    were_closed = {bar.id for bar in old if bar.closed}
    just_closed = [bar for bar in merged if bar.id not in were_closed]
    return tuple(just_closed[:1] or merged[:1])


def _bounded_bar(bar: protocol.Bar) -> protocol.Bar:
    if max(len(bar.desc), len(bar.unit), len(bar.postfix)) <= _BAR_CHARS:
        return bar
    return replace(
        bar,
        desc=bar.desc[:_BAR_CHARS],
        unit=bar.unit[:_BAR_CHARS],
        postfix=bar.postfix[:_BAR_CHARS],
    )


def _rate(
    old: WorkerState,
    step: float | None,
    what: protocol.Progress,
    bars: tuple[protocol.Bar, ...],
) -> float | None:
    """Steps a second, smoothed over about 10 updates; the bar's own rate where there is no step.

    The first step says nothing yet: training may go on from a snapshot, and much came before it.
    """
    if step is None:
        return bars[0].rate if bars else None
    before, before_s = old.step, old.at_s
    # Before the first step it was that of a bar.
    rate = None if old.step is None else old.rate
    if before is None:
        before, before_s = step, what.at_s
        for row in what.rows:
            if row.step is not None:
                before, before_s = row.step, row.at_s
                break
    if step <= before or what.at_s <= before_s:
        return rate
    now = (step - before) / (what.at_s - before_s)
    if rate is None:
        return now
    return 0.8 * rate + 0.2 * now


def _add_rows(
    builder: RunStateBuilder, worker: WorkerState, rows: tuple[protocol.MetricRow, ...]
) -> dict[str, float]:
    """Add rows to the rank's series; return its latest value of each metric."""
    table = builder.series_of(worker.rank)
    world_size = max(1, builder.world_size)
    most = max(_FEWEST_METRICS, min(KEPT_METRICS, _METRICS_OF_ALL // world_size))
    limit = max(_FEWEST_POINTS, min(KEPT_POINTS, _POINTS_OF_ALL // world_size))
    # By metric first, so that each series is extended once. A point is three numbers, as `Series.extended` takes them.
    new: dict[str, list[float]] = {}
    for row in rows:
        step = math.nan if row.step is None else row.step
        for name, value in row.metrics.items():
            if name not in new:
                if name not in table and len(table.keys() | new.keys()) >= most:
                    continue
                new[name] = []
            new[name] += (row.at_s, step, value)
    latest = dict(worker.metrics)
    for name, numbers in new.items():
        series = table.get(name) or Series()
        table[name] = series.extended(numbers, limit=limit)
        latest[name] = numbers[-1]
    return latest


def _output(builder: RunStateBuilder, node: int, what: protocol.Output) -> None:
    if what.stream not in STREAMS:
        return
    if what.skipped_bytes:
        note = (
            f"... {what.skipped_bytes:,} bytes not shown; the run's log has all of them"
        )
        builder.close_lines(what.rank, node, (what.stream,))
        builder.add_line(what.rank, node, what.stream, note)
    builder.write(what.rank, node, what.stream, what.text)
    if len(builder.open_lines) > KEPT_OPEN_LINES:
        builder.close_lines(what.rank, node, (what.stream,))
    worker = builder.workers.get(what.rank)
    if (
        worker is not None
        and worker.node_rank == node
        and not has_shown_progress(worker)
        and not is_of_a_wait(what.text)
    ):
        builder.note_advance()  # output is its only sign of life


def _paused(builder: RunStateBuilder, node: int, what: protocol.Paused) -> None:
    worker = builder.workers.get(what.rank)
    if worker is not None and worker.node_rank == node:
        builder.paused[what.rank] = what


def _resumed(builder: RunStateBuilder, node: int, what: protocol.Resumed) -> None:
    worker = builder.workers.get(what.rank)
    if worker is not None and worker.node_rank == node:
        builder.resume(what.rank)


def _ended(builder: RunStateBuilder, node: int, what: protocol.Ended) -> None:
    worker = builder.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    builder.close_lines(what.rank, node)
    builder.note_advance()
    # Whether this end explains the first failure: that rank had only lost a peer. Then this rank is the first failure.
    first = (
        None
        if builder.first_failure is None
        else builder.workers[builder.first_failure].ended
    )
    moved = (
        first is not None
        and builder.at_s - builder.first_failure_at_s <= _ECHO_S
        and failure_kind.is_echo(first)
        and not (
            failure_kind.is_echo(what)
            or failure_kind.is_good(what)
            or failure_kind.is_by_sigterm(what)
        )
    )
    if moved:
        builder.first_failure = what.rank
    phase: RankPhase = "failed" if moved else _end_phase(builder, node, what)
    if builder.first_failure not in (None, what.rank) or phase != "failed":
        what = _shortened(what, builder.world_size, has_failed=phase != "done")
    builder.workers[what.rank] = replace(worker, phase=phase, ended=what)
    if phase == "failed" and builder.first_failure is None:
        builder.first_failure = what.rank
        builder.first_failure_at_s = builder.at_s


def _shortened(
    what: protocol.Ended, world_size: int, *, has_failed: bool
) -> protocol.Ended:
    """Return the end of a rank that is not the first to fail, with short texts."""
    of_each = _LATER_CHARS_OF_ALL // max(1, world_size)
    room = of_each  # why a result can't be had may be long
    if has_failed:
        room = min(_LATER_CHARS, of_each)
    failure = what.failure
    if failure is not None:
        of_traceback = min(_LATER_TRACEBACK_CHARS, of_each)
        failure = protocol.Failure(
            type=failure.type[:room],
            message=failure.message[:room],
            traceback=failure.traceback[-of_traceback:],
        )
    return replace(
        what, outcome=what.outcome[:room], meaning=what.meaning[:room], failure=failure
    )


def _end_phase(builder: RunStateBuilder, node: int, what: protocol.Ended) -> RankPhase:
    if failure_kind.is_good(what):
        return "done"
    # Whether a rank of an elastic job ended because the job forms anew, with a host less or more.
    if what.outcome == "replaced" or (
        builder.base.is_elastic
        and (failure_kind.is_by_sigterm(what) or failure_kind.is_echo(what))
    ):
        return "stopped"
    if builder.nodes[node].stopping or (builder.stopping and node != builder.culprit):
        return "stopped"  # by its agent
    has_torchrun_failed = builder.nodes[node].code not in (None, 0)
    if failure_kind.is_by_sigterm(what) and (
        has_torchrun_failed or builder.first_failure is not None
    ):
        return "stopped"  # by torchrun, because of another rank
    return "failed"


HANDLERS: dict[type, Callable[..., None]] = {
    protocol.Worker: _worker,
    protocol.Progress: _progress,
    protocol.Output: _output,
    protocol.Paused: _paused,
    protocol.Resumed: _resumed,
    protocol.Ended: _ended,
}
_OF_RANKS = (
    *HANDLERS,
    protocol.Picture,
    protocol.EngineEnded,
    protocol.Final,
    protocol.Stacks,
    protocol.StacksDone,
)

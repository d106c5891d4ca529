"""Folds the events of ranks: start, progress, output and end, and the node that has each rank.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmagic.failures import failure_kind
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_RANKS
from distmagic.state.builder import STREAMS, Handlers, RunStateBuilder
from distmagic.state.model import WorkerState
from distmagic.state.phases import RankPhase
from distmagic.state.progress import has_shown_progress, have_moved, is_of_a_wait
from distmagic.state.series import Series

KEPT_METRICS = 50  # metric names for each rank
_METRICS_OF_ALL = 100_000  # metric names of all ranks together
_FEWEST_METRICS = 4  # metric names that each rank keeps at least, with very many ranks
KEPT_BARS = 20  # bars for each rank
KEPT_POINTS = 2000  # points of one metric of one rank
_POINTS_OF_ALL = 128_000  # points of one metric of all ranks together
_FEWEST_POINTS = 50  # points of one metric that each rank keeps at least
# size limit of the traceback of a rank that was not the first to fail; its log has all of it
_LATER_TRACEBACK_CHARS = 4000
_LATER_CHARS = 2000  # size limit of its message
# The cause of a failure arrives at most so long after its consequence on another rank.
_ECHO_S = 2.0


# ---- which node has which ranks
#
# The nodes meet in rounds of the rendezvous, and all ranks report the round's number. A rank
# belongs to the node that reports it in the latest round. Events of different nodes come in any
# order, so an event of an earlier round may come after one of a later round from another node. It
# counts for ranks that the later round has not assigned.


def _worker(builder: RunStateBuilder, node: int, what: protocol.Worker) -> None:
    if not 0 <= what.rank < what.world_size <= MOST_RANKS:
        return
    builder.advance(node, "running")
    if what.round < builder.rdzv_round:
        owner = builder.workers.get(what.rank)
        if what.rank >= builder.world_size or (owner and owner.round > what.round):
            return
    elif what.round > builder.rdzv_round or node == 0:
        builder.rdzv_round, builder.world_size = what.round, what.world_size
        for rank in list(builder.workers):
            if rank >= what.world_size:  # an elastic job has shrunk
                del builder.workers[rank]
    else:
        # Some versions of torch don't report the round: then the lead's world is the smallest that
        # counts.
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
    first = builder.first_failure
    if first == what.rank or first not in builder.workers:
        # torchrun restarted the rank, or continues without it.
        builder.first_failure = None


def _progress(
    builder: RunStateBuilder, worker: WorkerState, what: protocol.Progress
) -> None:
    if worker.restart != what.restart:
        return
    step = worker.step if what.step is None else what.step
    bars = _merge_bars(worker.bars, what.bars) if what.bars else worker.bars
    bars_before = worker.bars_before
    if worker.bars and bars[0].id > worker.bars[0].id:
        bars_before += 1
    advanced_at_s = worker.advanced_at_s
    if what.points or step != worker.step or have_moved(worker.bars, bars):
        builder.note_advance()
        advanced_at_s = builder.at_s
    # Written out: `replace` takes three times as long, and this is the most frequent event.
    builder.workers[what.rank] = WorkerState(
        rank=worker.rank,
        local_rank=worker.local_rank,
        node_rank=worker.node_rank,
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
        metrics=_add_points(builder, worker, what.points)
        if what.points
        else worker.metrics,
        has_printed=what.is_printed if what.points else worker.has_printed,
        at_s=what.at_s,
        advanced_at_s=advanced_at_s,
        rate=_rate(worker, step, what, bars),
        is_idle=worker.is_idle,
        ended=worker.ended,
        exit=worker.exit,
        left=worker.left,
        has_lost_peer=worker.has_lost_peer,
    )


def _merge_bars(
    old: tuple[protocol.Bar, ...], new: tuple[protocol.Bar, ...]
) -> tuple[protocol.Bar, ...]:
    """Return the open bars, outermost first; if all are closed, the outermost of those that were
    just closed.
    """
    by_id = {bar.id: bar for bar in (*old, *new)}
    # An inner bar is created later.
    merged = [by_id[key] for key in sorted(by_id)]
    still_open = [bar for bar in merged if not bar.closed]
    if still_open:
        return tuple(still_open[:KEPT_BARS])
    were_closed = {bar.id for bar in old if bar.closed}
    just_closed = [bar for bar in merged if bar.id not in were_closed]
    return tuple(just_closed[:1] or merged[:1])


def _rate(
    old: WorkerState,
    step: float | None,
    what: protocol.Progress,
    bars: tuple[protocol.Bar, ...],
) -> float | None:
    """Return steps per second, smoothed over about 10 updates; without a step, the bar's own rate.

    The first reported step gives no rate: training may resume from a snapshot with many steps
    before it.
    """
    if step is None:
        return bars[0].rate if bars else None
    before, before_s = old.step, old.at_s
    # Before the first step it was the rate of a bar.
    rate = None if old.step is None else old.rate
    if before is None:
        before, before_s = step, what.at_s
        for one in what.points.values():
            if one and not math.isnan(one[1]):
                before_s, before = one[:2]
                break
    if step <= before or what.at_s <= before_s:
        return rate
    now = (step - before) / (what.at_s - before_s)
    if rate is None:
        return now
    return 0.8 * rate + 0.2 * now


def _add_points(
    builder: RunStateBuilder, worker: WorkerState, points: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Add points to the rank's series; return its latest value of each metric."""
    table = dict(builder.series.get(worker.rank, {}))
    world_size = max(1, builder.world_size)
    most = max(_FEWEST_METRICS, min(KEPT_METRICS, _METRICS_OF_ALL // world_size))
    limit = max(_FEWEST_POINTS, min(KEPT_POINTS, _POINTS_OF_ALL // world_size))
    latest = dict(worker.metrics)
    for name, numbers in points.items():
        series = table.get(name)
        if not numbers or (series is None and len(table) >= most):
            continue
        is_first = name not in worker.metrics  # since the rank's start
        table[name] = (series or Series()).extended(
            numbers, limit=limit, has_restarted=is_first
        )
        latest[name] = numbers[-1]
    builder.series[worker.rank] = table
    return latest


def _output(builder: RunStateBuilder, node: int, what: protocol.Output) -> None:
    if what.stream not in STREAMS or not -1 <= what.rank < MOST_RANKS:
        return
    if what.skipped_bytes:
        note = (
            f"... {what.skipped_bytes:,} bytes not shown; the run's log has all of them"
        )
        builder.close_lines(what.rank, node, (what.stream,))
        builder.add_line(what.rank, node, what.stream, note)
    builder.write(what.rank, node, what.stream, what.text)
    worker = builder.rank_of(node, what.rank)
    if (
        worker is not None
        and what.stream == "stderr"
        and failure_kind.writes_of_lost_peer(what.text)
    ):
        builder.change_rank(what.rank, has_lost_peer=True)
    if (
        worker is not None
        and not has_shown_progress(worker)
        and not is_of_a_wait(what.text)
    ):
        builder.note_advance()  # output is its only sign of progress


def _paused(builder: RunStateBuilder, _: WorkerState, what: protocol.Paused) -> None:
    builder.paused[what.rank] = what


def _resumed(builder: RunStateBuilder, _: WorkerState, what: protocol.Resumed) -> None:
    builder.resume(what.rank)


def _of_cell(
    builder: RunStateBuilder,
    _: WorkerState,
    what: protocol.CellBegan | protocol.CellEnded,
) -> None:
    builder.note_advance()
    is_idle = isinstance(what, protocol.CellEnded)
    builder.change_rank(what.rank, is_idle=is_idle, advanced_at_s=builder.at_s)


def _ended(builder: RunStateBuilder, worker: WorkerState, what: protocol.Ended) -> None:
    if worker.restart != what.restart:
        return
    node = worker.node_rank
    builder.close_lines(what.rank, node)
    builder.note_advance()
    moved = _explains_first(builder, worker, what)
    if moved:
        builder.first_failure = what.rank
    phase: RankPhase = "failed" if moved else _end_phase(builder, worker, what)
    is_first = phase == "failed" and builder.first_failure in (None, what.rank)
    if what.failure is not None and not is_first:
        short = replace(
            what.failure,
            message=what.failure.message[:_LATER_CHARS],
            traceback=what.failure.traceback[-_LATER_TRACEBACK_CHARS:],
        )
        what = replace(what, failure=short)
    builder.change_rank(what.rank, phase=phase, ended=what)
    if phase == "failed" and builder.first_failure is None:
        builder.first_failure = what.rank
        builder.first_failure_at_s = builder.at_s


def _explains_first(
    builder: RunStateBuilder, worker: WorkerState, what: protocol.Ended
) -> bool:
    """Whether this end explains the first failure: that rank had only lost a peer, or torchrun had
    asked it to end because of this one, whose end is known later.
    """
    if builder.first_failure is None:
        return False
    first = builder.workers[builder.first_failure]
    was_killed = failure_kind.is_by_sigkill(what)
    is_effect = (
        _is_echo(worker, what)
        or failure_kind.is_good(what)
        or failure_kind.is_by_sigterm(what)
        or failure_kind.is_by_sigint(what)
    )
    # A host without memory reports late. If torchrun restarts ranks, it also kills them itself.
    can_be_late = was_killed and not builder.terms.may_restart
    past_s = builder.at_s - builder.first_failure_at_s
    is_late = past_s > _ECHO_S and not can_be_late
    # torchrun counts the restarts of its own node.
    is_of_one_node = first.node_rank == worker.node_rank
    is_of_another_start = first.round != worker.round or (
        is_of_one_node and first.restart != worker.restart
    )
    if first.ended is None or is_of_another_start or is_late or is_effect:
        return False
    if is_of_one_node and failure_kind.is_by_sigterm(first.ended):
        builder.change_rank(first.rank, phase="stopped")
        return True
    # An agent journals that its node stops before it kills a rank.
    is_by_agent = was_killed and bool(builder.nodes[worker.node_rank].stopping)
    return _is_echo(first, first.ended) and not is_by_agent


def _is_echo(worker: WorkerState, what: protocol.Ended) -> bool:
    return failure_kind.is_echo(what, has_lost_peer=worker.has_lost_peer)


def _end_phase(
    builder: RunStateBuilder, worker: WorkerState, what: protocol.Ended
) -> RankPhase:
    node = worker.node_rank
    if failure_kind.is_good(what):
        return "done"
    # Whether a rank of an elastic job ended because the job restarts its ranks with fewer or more
    # hosts.
    if what.outcome == "replaced" or (
        builder.base.is_elastic
        and (failure_kind.is_by_sigterm(what) or _is_echo(worker, what))
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


# The handlers of events that only count if the node has their rank: they get the rank's state.
OF_A_RANK: Handlers = {
    protocol.Stacks: RunStateBuilder.take_stacks,
    protocol.Picture: RunStateBuilder.take_picture,
    protocol.Progress: _progress,
    protocol.Paused: _paused,
    protocol.Resumed: _resumed,
    protocol.CellBegan: _of_cell,
    protocol.CellEnded: _of_cell,
    protocol.Ended: _ended,
}
HANDLERS: Handlers = {
    protocol.Worker: _worker,
    protocol.Output: _output,
}

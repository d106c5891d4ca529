"""How the events of ranks change the state: who is there, how far, what it writes, how it ends. Pure; used by `fold`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from distmagic.remote.wire import protocol
from distmagic.state import failure_kind
from distmagic.state.builder import STREAMS, RunStateBuilder
from distmagic.state.hangs import has_shown_progress, have_moved
from distmagic.state.model import WorkerState
from distmagic.state.phases import RankPhase
from distmagic.state.series import Series

KEPT_METRICS = 50  # names of metrics a rank
KEPT_BARS = 20  # bars a rank
KEPT_POINTS = 2000  # points of one metric of one rank
_KEPT_BY_ALL = 128_000  # points of one metric of all ranks: with very many ranks each keeps fewer
KEPT_RANKS = 16_384
KEPT_OPEN_LINES = 2 * KEPT_RANKS
_LATER_CHARS = 4000  # of the traceback of a rank that was not the first to fail; its log has all of it
_ECHO_S = 2.0  # a cause arrives at most this long after its echo


def _worker(draft: RunStateBuilder, node: int, what: protocol.Worker) -> None:
    if not 0 <= what.rank < what.world_size <= KEPT_RANKS:
        return
    draft.advance(node, "running")
    if what.round < draft.rdzv_round:
        return  # what other nodes have told of a later round came before this
    draft.rdzv_round = what.round
    if what.world_size < draft.world_size:  # an elastic job has shrunk
        draft.workers = {rank: worker for rank, worker in draft.workers.items() if rank < what.world_size}
    draft.world_size = what.world_size
    draft.workers[what.rank] = WorkerState(
        rank=what.rank, local_rank=what.local_rank, node_rank=node, host=draft.nodes[node].host, phase="running",
        restart=what.restart, pid=what.pid,
    )  # fmt: skip
    draft.note_advance()
    if draft.first_failure == what.rank or draft.first_failure not in draft.workers:
        draft.first_failure = None  # torchrun started it again, or goes on without it


def _progress(draft: RunStateBuilder, node: int, what: protocol.Progress) -> None:
    worker = draft.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    step = worker.step if what.step is None else what.step
    bars = _merge_bars(worker.bars, what.bars) if what.bars else worker.bars
    if what.rows or step != worker.step or have_moved(worker.bars, bars):
        draft.note_advance()
    draft.workers[what.rank] = WorkerState(  # spelled out: `replace` costs three times as much
        rank=worker.rank, local_rank=worker.local_rank, node_rank=node, host=worker.host, phase=worker.phase,
        restart=worker.restart, pid=worker.pid, device=what.device or worker.device, step=step,
        total=worker.total if what.total is None else what.total, bars=bars,
        metrics=_add_rows(draft, worker, what.rows) if what.rows else worker.metrics, at_s=what.at_s,
        rate=_rate(worker, step, what, bars), ended=worker.ended, exit=worker.exit,
    )  # fmt: skip


def _merge_bars(old: tuple[protocol.Bar, ...], new: tuple[protocol.Bar, ...]) -> tuple[protocol.Bar, ...]:
    """Return the open bars, outermost first; if all are closed, the outermost of those that closed just now."""
    if len(old) == len(new) == 1 and old[0].id == new[0].id:
        return new
    table = {bar.id: bar for bar in (*old, *new)}
    merged = [table[key] for key in sorted(table)]
    was_closed = {bar.id for bar in old if bar.closed}
    alive = [bar for bar in merged if not bar.closed]
    just_closed = [bar for bar in merged if bar.id not in was_closed]
    return tuple(alive[:KEPT_BARS] or just_closed[:1] or merged[:1])


def _rate(
    old: WorkerState, step: float | None, what: protocol.Progress, bars: tuple[protocol.Bar, ...]
) -> float | None:
    """Steps a second, smoothed over about 10 updates; the bar's own rate where there is no step.

    The first step says nothing yet: training may go on from a snapshot, and much came before it.
    """
    if step is None:
        return bars[0].rate if bars else None
    before, before_s = old.step, old.at_s
    if before is None:
        before, before_s = next(((row.step, row.at_s) for row in what.rows if row.step is not None), (step, what.at_s))
    if step <= before or what.at_s <= before_s:
        return old.rate
    now = (step - before) / (what.at_s - before_s)
    return now if old.rate is None else 0.8 * old.rate + 0.2 * now


def _add_rows(draft: RunStateBuilder, worker: WorkerState, rows: tuple[protocol.MetricRow, ...]) -> dict[str, float]:
    """Add rows to the rank's series; return its latest value of each metric."""
    table, told = draft.series_of(worker.rank), dict[str, list[float]]()
    for row in rows:
        step = math.nan if row.step is None else row.step
        for name, value in row.metrics.items():
            if name not in told:
                if name not in table and len({**table, **told}) >= KEPT_METRICS:
                    continue
                told[name] = []
            told[name] += (row.at_s, step, value)
    limit = max(100, min(KEPT_POINTS, _KEPT_BY_ALL // max(1, draft.world_size)))
    for name, numbers in told.items():
        table[name] = (table.get(name) or Series()).extended(numbers, limit=limit)
    return {**worker.metrics, **{name: numbers[-1] for name, numbers in told.items()}}


def _output(draft: RunStateBuilder, node: int, what: protocol.Output) -> None:
    if what.stream not in STREAMS:
        return
    if what.skipped_bytes:
        note = f"... {what.skipped_bytes:,} bytes not shown; the whole log: run.logs({what.rank})"
        draft.close_lines(what.rank, node, (what.stream,))
        draft.add_line(what.rank, node, what.stream, note)
    draft.write(what.rank, node, what.stream, what.text)
    if len(draft.open_lines) > KEPT_OPEN_LINES:
        draft.close_lines(what.rank, node, (what.stream,))
    worker = draft.workers.get(what.rank)
    if worker is not None and worker.node_rank == node and not has_shown_progress(worker):
        draft.note_advance()  # it has no other way to show that it goes on


def _ended(draft: RunStateBuilder, node: int, what: protocol.Ended) -> None:
    worker = draft.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    draft.close_lines(what.rank, node)
    draft.note_advance()
    phase: RankPhase = "failed" if _explains_first_failure(draft, what) else _end_phase(draft, node, what)
    if what.failure is not None and draft.first_failure not in (None, what.rank):
        what = replace(what, failure=replace(what.failure, traceback=what.failure.traceback[-_LATER_CHARS:]))
    draft.workers[what.rank] = replace(worker, phase=phase, ended=what)
    if what.outcome == "returned" and what.meaning:
        draft.notice(f"{draft.nodes[node].host}: rank {what.rank} has returned, but {what.meaning}")
    if phase == "failed" and draft.first_failure is None:
        draft.first_failure, draft.first_failure_at_s = what.rank, draft.at_s


def _explains_first_failure(draft: RunStateBuilder, what: protocol.Ended) -> bool:
    """Move the blame to a rank that died when it was another one, which lost it as a peer, that could tell first."""
    first = None if draft.first_failure is None else draft.workers[draft.first_failure].ended
    moved = (
        first is not None
        and draft.at_s - draft.first_failure_at_s <= _ECHO_S
        and failure_kind.is_echo(first)
        and not (failure_kind.is_echo(what) or failure_kind.is_good(what) or failure_kind.is_by_sigterm(what))
    )
    if moved:
        draft.first_failure = what.rank
    return moved


def _end_phase(draft: RunStateBuilder, node: int, what: protocol.Ended) -> RankPhase:
    if failure_kind.is_good(what):
        return "done"
    if what.outcome == "replaced" or (draft.base.is_elastic and _has_lost_a_peer(what)):
        return "stopped"
    is_torchrun_over = draft.nodes[node].code not in (None, 0)
    by_torchrun = failure_kind.is_by_sigterm(what) and (is_torchrun_over or draft.first_failure is not None)
    by_notebook_or_gang = bool(draft.stopping) and node != draft.culprit
    return "stopped" if by_notebook_or_gang or draft.nodes[node].stopping or by_torchrun else "failed"


def _has_lost_a_peer(what: protocol.Ended) -> bool:
    """Whether a rank of an elastic job ended because the job forms anew, with a host less or more."""
    return failure_kind.is_by_sigterm(what) or failure_kind.is_echo(what)


HANDLERS: dict[type, Callable[..., None]] = {
    protocol.Worker: _worker,
    protocol.Progress: _progress,
    protocol.Output: _output,
    protocol.Ended: _ended,
}

"""Folds events into the state of a run. Pure: everything that changes what a user sees is in this file.

    Events  --fold-->  RunState  --render-->  text, HTML, widgets

`fold` takes a batch, so that a thousand ranks at 10 Hz cost one copy of the tables a batch and not one an event. Events
of different nodes come in any order, and nothing that a host says can make it raise or grow without bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from distmagic import blame
from distmagic.draft import STREAMS, Draft
from distmagic.hangs import has_shown_progress, have_moved
from distmagic.remote import protocol
from distmagic.series import Series
from distmagic.state import (
    ALIVE,
    Abandoned,
    Added,
    Broken,
    Connected,
    Event,
    Gone,
    Lost,
    Mended,
    NodeState,
    Planned,
    RunState,
    Sending,
    Starting,
    Stopping,
    Swept,
    Unusable,
    Warned,
    WorkerState,
)

KEPT_NOTICES = 100
KEPT_METRICS = 50  # names of metrics a rank
KEPT_BARS = 20  # bars a rank
KEPT_POINTS = 2000  # points of one metric of one rank
_KEPT_BY_ALL = 128_000  # points of one metric of all ranks: with very many ranks each keeps fewer
_GANG = {"joined": "joined", "back": "joined", "silent": "silent", "lost": "lost"}
SKIPPED = "some older reports and lines of output are left out: its journal no longer has them (run.logs may)"
KEPT_RANKS = 16_384
KEPT_OPEN_LINES = 2 * KEPT_RANKS
_LATER_CHARS = 4000  # of the traceback of a rank that was not the first to fail; its log has all of it
_MOST_NODES = 4096
_ECHO_S = 2.0  # a cause arrives at most this long after its echo


def begin(
    job: str, hosts: Iterable[str], max_restarts: int = 0, notices: tuple[str, ...] = (), min_nodes: int = 0,
    addresses: Sequence[str] = (),
) -> RunState:  # fmt: skip
    """Return the state of a run of which nothing is known but its hosts, and their addresses if these are given.

    `min_nodes` 0: it needs them all.
    """
    told = dict(enumerate(addresses))
    nodes = tuple(NodeState(node_rank=i, host=host, address=told.get(i, "")) for i, host in enumerate(hosts))
    return RunState(job=job, nodes=nodes, max_restarts=max_restarts, notices=notices, min_nodes=min_nodes or len(nodes))


def fold(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after `events`."""
    draft = Draft(state)
    for event in events:
        draft.at_s = max(draft.at_s, event.at_s)
        handler = _HANDLERS.get(type(event.what))
        if isinstance(event.what, Added) and event.node_rank == len(draft.nodes) < _MOST_NODES:
            draft.nodes.append(NodeState(node_rank=event.node_rank, host=event.what.host, phase="starting"))
        if handler is not None and 0 <= event.node_rank < len(draft.nodes):
            handler(draft, event.node_rank, event.what)
    return draft.freeze()


# ---- a node's own events


def _hello(draft: Draft, node: int, what: protocol.Hello) -> None:
    draft.advance(node, "starting", hostname=what.hostname)


def _endpoint(draft: Draft, node: int, what: protocol.Endpoint) -> None:
    if what.state == "open":
        draft.endpoint_open_at_s = draft.at_s
    elif what.state == "unreached":
        draft.unreached[node] = what.detail
    elif draft.stopping != "rendezvous":  # then it stays as the reason of the stop
        draft.unreached.pop(node, None)


def _notice(draft: Draft, node: int, what: protocol.Notice) -> None:
    _add_notice(draft, f"{draft.nodes[node].host}: {what.text}")


def _add_notice(draft: Draft, text: str) -> None:
    if text not in draft.notices and len(draft.notices) < KEPT_NOTICES:
        draft.notices.append(text)


def _skipped(draft: Draft, node: int, _: protocol.Skipped) -> None:
    for worker in list(draft.workers.values()):
        if worker.node_rank == node:
            draft.close_lines(worker.rank, node)  # what comes next does not go on with the line before the gap
    draft.close_lines(-1, node)
    _notice(draft, node, protocol.Notice(text=SKIPPED))


def _engine_ended(draft: Draft, node: int, what: protocol.Engineended) -> None:
    draft.advance(node, "ended", code=what.code)
    if (
        what.code != 0
        and draft.failed_node is None
        and draft.nodes[node].stopping in ("", "failed")
        and (not draft.stopping or node == draft.culprit)
    ):
        draft.failed_node = node
    for exit_ in what.exits:
        worker = draft.workers.get(exit_.rank)
        if worker is not None and worker.node_rank == node:
            draft.workers[exit_.rank] = replace(worker, exit=exit_)


def _member(draft: Draft, node: int, what: protocol.Member) -> None:
    """Take what a node knows of another: the lead of every member, a member of the lead."""
    if not 0 <= what.node_rank < len(draft.nodes) or 0 not in (node, what.node_rank) or what.state not in _GANG:
        return
    if draft.base.is_elastic and what.node_rank == 0:
        return  # a member that lost its own connection would say the same
    draft.nodes[what.node_rank] = replace(draft.nodes[what.node_rank], gang=_GANG[what.state])
    host = draft.nodes[what.node_rank].host
    if what.state == "lost":
        _lose(draft, what.node_rank, "the other hosts have not heard of it any more")
    elif what.state == "back":
        draft.lost = [(other, why) for other, why in draft.lost if other != what.node_rank]
    elif what.state == "silent":
        text = f"{host} and {draft.nodes[node].host} don't hear each other by UDP: each ends by itself if this notebook is gone"
        _add_notice(draft, text)


def _node_stopping(draft: Draft, node: int, what: protocol.Stopping) -> None:
    """Take why a node ends its ranks; the first reason of all is the run's."""
    draft.nodes[node] = replace(draft.nodes[node], stopping=what.reason or "stopped")
    if draft.base.is_elastic and what.reason == "lost" and node != 0:
        return  # only this node ends: it has lost the others, which go on
    if not draft.stopping:
        draft.stopping = what.reason or "stopped"
        draft.culprit = what.culprit if 0 <= what.culprit < len(draft.nodes) else None
    if what.reason == "lost" and 0 <= what.culprit < len(draft.nodes):
        _lose(draft, what.culprit, "the other hosts have not heard of it any more")


def _detached(draft: Draft, node: int, what: protocol.Detached) -> None:
    if node == 0:
        draft.detached_by = what.why or "asked"


def _final(draft: Draft, node: int, what: protocol.Final) -> None:
    draft.advance(node, "clear", reason=what.reason, survivors=what.survivors)
    draft.close_lines(-1, node)
    _end_all_on(draft, node, "stopped")


def _end_all_on(draft: Draft, node: int, phase: str) -> None:
    for rank, worker in draft.workers.items():
        if worker.node_rank == node:
            draft.close_lines(rank, node)
            if worker.phase in ALIVE:
                draft.workers[rank] = replace(worker, phase=phase)


# ---- ranks


def _worker(draft: Draft, node: int, what: protocol.Worker) -> None:
    if not 0 <= what.rank < what.world_size <= KEPT_RANKS:
        return
    draft.advance(node, "running")
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


def _progress(draft: Draft, node: int, what: protocol.Progress) -> None:
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
        rate=_rate(worker, step, what.at_s, bars), ended=worker.ended, exit=worker.exit,
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


def _rate(old: WorkerState, step: float | None, at_s: float, bars: tuple[protocol.Bar, ...]) -> float | None:
    """Steps a second, smoothed over about 10 updates; the bar's own rate where there is no step."""
    if step is None:
        return bars[0].rate if bars else None
    if old.step is None:
        return step / at_s if at_s > 0 else None
    if step <= old.step or at_s <= old.at_s:
        return old.rate
    now = (step - old.step) / (at_s - old.at_s)
    return now if old.rate is None else 0.8 * old.rate + 0.2 * now


def _add_rows(draft: Draft, worker: WorkerState, rows: tuple[protocol.Row, ...]) -> dict[str, float]:
    """Add rows to the rank's series; return its latest value of each metric."""
    metrics, table = dict(worker.metrics), draft.series_of(worker.rank)
    limit = max(100, min(KEPT_POINTS, _KEPT_BY_ALL // max(1, draft.world_size)))
    for row in rows:
        for name, value in row.metrics.items():
            series = table.get(name)
            if series is None and len(table) >= KEPT_METRICS:
                continue
            table[name] = (series or Series()).append(row.at_s, row.step, value, limit=limit)
            metrics[name] = value
    return metrics


def _output(draft: Draft, node: int, what: protocol.Output) -> None:
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


def _ended(draft: Draft, node: int, what: protocol.Ended) -> None:
    worker = draft.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    draft.close_lines(what.rank, node)
    draft.note_advance()
    phase = "failed" if _explains_first_failure(draft, what) else _end_phase(draft, node, what)
    if what.failure is not None and draft.first_failure not in (None, what.rank):
        what = replace(what, failure=replace(what.failure, traceback=what.failure.traceback[-_LATER_CHARS:]))
    draft.workers[what.rank] = replace(worker, phase=phase, ended=what)
    if what.outcome == "returned" and what.meaning:
        _notice(draft, node, protocol.Notice(text=f"rank {what.rank} has returned, but {what.meaning}"))
    if phase == "failed" and draft.first_failure is None:
        draft.first_failure, draft.first_failure_at_s = what.rank, draft.at_s


def _explains_first_failure(draft: Draft, what: protocol.Ended) -> bool:
    """Move the blame to a rank that died when it was another one, which lost it as a peer, that could tell first."""
    first = None if draft.first_failure is None else draft.workers[draft.first_failure].ended
    moved = (
        first is not None
        and draft.at_s - draft.first_failure_at_s <= _ECHO_S
        and blame.is_echo(first)
        and not (blame.is_echo(what) or blame.is_good(what) or blame.is_by_sigterm(what))
    )
    if moved:
        draft.first_failure = what.rank
    return moved


def _end_phase(draft: Draft, node: int, what: protocol.Ended) -> str:
    if blame.is_good(what):
        return "done"
    is_torchrun_over = draft.nodes[node].code not in (None, 0)
    by_torchrun = blame.is_by_sigterm(what) and (is_torchrun_over or draft.first_failure is not None)
    by_notebook_or_gang = bool(draft.stopping) and node != draft.culprit
    return "stopped" if by_notebook_or_gang or draft.nodes[node].stopping or by_torchrun else "failed"


# ---- what the launcher tells: at first


def _connected(draft: Draft, node: int, _: Connected) -> None:
    draft.advance(node, "connected")


def _unusable(draft: Draft, node: int, what: Unusable) -> None:
    draft.nodes[node] = replace(draft.nodes[node], unusable=what.why)


def _warned(draft: Draft, _: int, what: Warned) -> None:
    _add_notice(draft, what.text)


def _planned(draft: Draft, _: int, what: Planned) -> None:
    draft.min_nodes = what.min_nodes or len(draft.nodes)
    for node, address in enumerate(what.addresses[: len(draft.nodes)]):
        draft.nodes[node] = replace(draft.nodes[node], address=address)


def _sending(draft: Draft, node: int, what: Sending) -> None:
    draft.advance(node, "sending", sent_bytes=what.sent_bytes, total_bytes=what.total_bytes)


def _starting(draft: Draft, node: int, _: Starting) -> None:
    draft.advance(node, "starting")
    if draft.started_at_s is None:
        draft.started_at_s = draft.at_s


def _abandoned(draft: Draft, _: int, what: Abandoned) -> None:
    draft.abandoned = what.why
    draft.stopping = draft.stopping or ("interrupted" if what.is_wish else "")


# ---- what the launcher tells: later


def _broken(draft: Draft, node: int, what: Broken) -> None:
    draft.nodes[node] = replace(draft.nodes[node], broken=what.why, broken_at_s=draft.at_s)


def _mended(draft: Draft, node: int, _: Mended) -> None:
    draft.nodes[node] = replace(draft.nodes[node], broken="")
    draft.note_advance()  # it may have, and what it said meanwhile is only coming


def _gone(draft: Draft, node: int, _: Gone) -> None:
    draft.advance(node, "gone")


def _lost(draft: Draft, node: int, what: Lost) -> None:
    _lose(draft, node, what.why)


def _lose(draft: Draft, node: int, why: str) -> None:
    if draft.nodes[node].phase == "gone" or any(node == other for other, _ in draft.lost):
        return
    draft.lost.append((node, why))
    _end_all_on(draft, node, "lost")


def _swept(draft: Draft, node: int, what: Swept) -> None:
    draft.advance(node, "clear", survivors=what.survivors)


def _stopping(draft: Draft, _: int, what: Stopping) -> None:
    draft.stopping = draft.stopping or what.reason


_HANDLERS: dict[type, Callable[..., None]] = {
    protocol.Hello: _hello,
    protocol.Worker: _worker,
    protocol.Progress: _progress,
    protocol.Output: _output,
    protocol.Ended: _ended,
    protocol.Engineended: _engine_ended,
    protocol.Stacks: Draft.take_stacks,
    protocol.Dumped: Draft.take_dumped,
    protocol.Endpoint: _endpoint,
    protocol.Notice: _notice,
    protocol.Skipped: _skipped,
    protocol.Final: _final,
    protocol.Member: _member,
    protocol.Stopping: _node_stopping,
    protocol.Detached: _detached,
    Connected: _connected,
    Unusable: _unusable,
    Warned: _warned,
    Planned: _planned,
    Sending: _sending,
    Starting: _starting,
    Abandoned: _abandoned,
    Gone: _gone,
    Broken: _broken,
    Mended: _mended,
    Lost: _lost,
    Swept: _swept,
    Stopping: _stopping,
}

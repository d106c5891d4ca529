"""The table: a row for each rank; from 17 ranks on, important ranks, a row for each host, and all
ranks collapsed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.protocol import Bar
from distmagic.render import quantities as q
from distmagic.render.row_choice import (
    PHASES,
    UNFOLDED,
    ShownPhase,
    most_urgent,
    picked_ranks,
    urgency,
)
from distmagic.render.table import NUMBER, Column
from distmagic.render.text_width import cut, cut_middle, one_line, plain
from distmagic.state.model import NodeState, RunState, WorkerState
from distmagic.state.phases import ALIVE, OPENING, meaning_of

MAX_METRICS = 6  # columns; all metrics have a curve
ALL_RANKS = 16  # up to this number the table has one row for each rank only
MAX_HOSTS = 64  # rows of hosts; the others are counted
_NAME = 24  # characters of a bar's name, and of a host's
_BAR = 10  # characters of a bar as text
NOT_TOLD = "-"
_PATIENCE_S = 3.0  # after this time without an answer it is shown


@frozen
class Row:
    """One rank, or all ranks of one host."""

    name: str
    host: str
    phase: ShownPhase
    rank: int | None = None
    device: str = ""
    gpu: str = ""
    fraction: float | None = None  # 0 to 1, None without a known total
    count: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rate: str = ""
    left: str = ""
    slow: bool = False  # it is behind the others
    still: bool = False  # it has not advanced for unusually long
    # further information: inner bars (`batch 30/100`), the failure, a restart
    note: str = ""
    stands_out: bool = False  # it is the one to look at first


@dataclass(frozen=True)
class Group:
    """Rows under a title, "" for the only group.

    A group that `is_folded` is collapsed in HTML and left out in text.
    """

    title: str
    rows: Sequence[Row]
    is_folded: bool = False


def fraction_of(worker: WorkerState) -> float | None:
    """Return the fraction of a rank's work that is done, 0 to 1; None if unknown."""
    done, total = worker.progress
    if done is None:
        return 1.0 if worker.phase == "done" else None
    if not total or total < 0:
        return None
    if worker.phase == "done" and total - done <= 1:
        return 1.0  # it counts its steps from 0
    fraction = done / total
    return None if math.isnan(fraction) else min(1.0, max(0.0, fraction))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def groups(
    state: RunState, workers: Sequence[WorkerState], slow: set[int], still: Mapping[int, float],
    standing_out: Mapping[int, str],
) -> Iterable[Group]:  # fmt: skip
    """Return the table's rows: of every rank, or in a large run of the most important ranks, then
    of every host.

    `slow` are ranks that are behind, `still` those that stand still, with their seconds, and
    `standing_out` those to look at first, with the reason.
    """
    by_node: dict[int, list[WorkerState]] = {}
    for worker in workers:
        by_node.setdefault(worker.node_rank, []).append(worker)
    waiting = []
    for node in state.nodes:
        # On ranks that stay, perhaps only some nodes take part in a cell.
        if not (state.cell or node.node_rank in by_node or _has_come_back(state, node)):
            waiting.append(_waiting_row(state, node))

    def of_ranks(some: Iterable[WorkerState]) -> list[Row]:
        return [_rank_row(state, one, slow, still, standing_out) for one in some]

    if len(workers) <= ALL_RANKS:
        hosts = fitting(waiting, MAX_HOSTS, noun="hosts")
        yield Group("", of_ranks(workers) + hosts)
        return
    picked = picked_ranks(workers, slow, still)
    if picked:
        title = f"failed and slowest: {len(picked)} of {len(workers)} ranks"
        yield Group(title, of_ranks(picked))
    rows = [
        _host_row(state, node, by_node[node.node_rank], still)
        for node in state.nodes
        if node.node_rank in by_node
    ]
    by_host = fitting(rows + waiting, MAX_HOSTS, noun="hosts")
    yield Group("by host, means of their ranks", by_host)

    def order(worker: WorkerState) -> tuple[int, bool]:
        is_behind = worker.rank in slow or worker.rank in still
        return urgency(worker.phase), not is_behind

    shown = most_urgent(workers, order, UNFOLDED)
    title = f"all {len(workers)} ranks"
    if len(shown) < len(workers):
        title = f"{len(shown)} of {len(workers):,} ranks, among them those with trouble"
    yield Group(title, of_ranks(shown), is_folded=True)


def _has_come_back(state: RunState, node: NodeState) -> bool:
    """Whether a node has ended, and its host has joined the elastic job again as another node."""
    is_over = node.phase == "gone" or node.node_rank in state.lost
    later_hosts = [other.host for other in state.nodes[node.node_rank + 1 :]]
    return is_over and node.host in later_hosts


def fitting(rows: Sequence[Row], room: int, *, noun: str) -> list[Row]:
    """Return at most `room` rows: the most important ones, in their order, and one with the number
    of the others.
    """
    if len(rows) <= room:
        return list(rows)

    def order(row: Row) -> tuple[int, bool, float]:
        return urgency(row.phase), not (row.slow or row.still), row.fraction or 0.0

    kept = most_urgent(rows, order, room - 1)
    phases = Counter(row.phase for row in rows)
    phases.subtract(row.phase for row in kept)
    counts = {phase: count for phase, count in phases.items() if count}
    note = ", ".join(f"{count} {phase}" for phase, count in counts.items())
    host = f"{len(rows) - len(kept)} more {noun}"
    return [*kept, Row(name="", host=host, phase=min(counts, key=urgency), note=note)]


def state_word(row: Row) -> str:
    """Return the word in the state column."""
    if row.still:
        return "stalled"
    if row.phase in ("clear", "gone"):
        return "ended"
    return "slow" if row.slow else row.phase


def _waiting_row(state: RunState, node: NodeState) -> Row:
    """Return the row of a host without ranks: its progress, and what it waits for."""
    phase: ShownPhase = node.phase
    note = _waits_for(state, node)
    if node.unusable:
        phase = "failed"
        note = node.unusable.removeprefix(f"{node.host}: ")
    if state.is_over and phase in OPENING and phase != "connected":
        phase = "stopped"
    if node.waits_for and not state.is_over:
        phase, note = "waiting", ""  # an alert has the reason
    if phase == "sending" and node.total_bytes and node.sent_bytes >= node.total_bytes:
        phase = "sent"
    fraction = None
    if node.total_bytes and phase in ("sending", "sent"):
        fraction = node.sent_bytes / node.total_bytes
    return Row(
        name="",
        host=plain(node.host),
        phase=phase,
        fraction=fraction,
        note=one_line(note),
    )


def _waits_for(state: RunState, node: NodeState) -> str:
    if node.phase not in OPENING:
        return meaning_of(node.reason).in_row
    if state.is_over:
        return "not reached" if node.phase == "connecting" else ""
    if node.phase == "connecting":
        return "no answer yet" if state.at_s > _PATIENCE_S else ""
    if node.phase == "sending" and node.sent_bytes < node.total_bytes:
        return q.size(node.sent_bytes, node.total_bytes)
    if node.phase != "starting":
        return "waits for the others" if len(state.nodes) > 1 else ""
    return "loading torch" if node.hostname else "starting Python"


def _row(
    state: RunState, node: NodeState, workers: Sequence[WorkerState], still: Mapping[int, float]
) -> Row:  # fmt: skip
    """Return the row data of one rank, or of all ranks of a host: means, and the most important
    phase.
    """
    moving = [] if state.seen_unix_s else [w for w in workers if w.rank not in still]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for w in workers for name in w.metrics):
        metrics[name] = mean(w.metrics.get(name) for w in workers) or 0.0
    rates = [w.rate for w in moving if w.rate and w.progress[0] is not None]
    left = [w.eta_s for w in moving if w.eta_s is not None]
    first = workers[0]
    unit = "step" if _has_steps(first) else plain(first.bars[0].unit)[:8] or "it"
    return Row(
        name="",
        host=plain(node.host),
        phase=min((_phase_of(state, w) for w in workers), key=urgency),
        fraction=mean(fraction_of(w) for w in workers),
        count=_range_of_counts(workers),
        metrics=metrics,
        rate=q.rate(mean(rates) or 0.0, unit),
        left=q.eta(max(left)) if left else "",
        still=not moving and any(w.rank in still for w in workers),
    )


def _rank_row(
    state: RunState, w: WorkerState, slow: set[int], still: Mapping[int, float], standing_out: Mapping[int, str]
) -> Row:  # fmt: skip
    row = _row(state, state.nodes[w.node_rank], [w], still)
    name = "" if _has_steps(w) or not row.count else bar_name(w.bars[0])
    notes = [standing_out.get(w.rank, "")]
    if w.phase in ALIVE:
        notes += _inner_bars(w)
    notes += _rank_notes(state, w, still)
    is_seen = w.phase in ALIVE and not _is_out_of_sight(state, w)
    return replace(
        row,
        name=str(w.rank),
        rank=w.rank,
        device=plain(w.device),
        gpu=_gpu_words(state, w),
        count=f"{name} {row.count}".lstrip(),
        slow=w.rank in slow and is_seen and not row.still,
        note=", ".join(filter(None, notes)),
        stands_out=w.rank in standing_out,
    )


def _gpu_words(state: RunState, w: WorkerState) -> str:
    """Return the load of the rank's GPU; after the run, its peak memory. "" if unknown."""
    node = state.nodes[w.node_rank]
    if w.gpu is None or node.hardware is None or w.gpu >= len(node.hardware.gpus):
        return ""
    told = node.hardware.gpus[w.gpu]
    if not state.is_over:
        return q.gpus([told])
    if not told.total_bytes:
        return ""
    return f"at most {q.used(node.gpu_peaks[w.gpu], told.total_bytes)}"


def _inner_bars(w: WorkerState) -> list[str]:
    """Return the bars that are not in the column of the count.

    For a rank that reports steps, these are in that column.
    """
    words = []
    inner = list(w.bars)
    if not _has_steps(w):
        outer, *inner = w.bars
        words.append(f"{_bar_words(w, outer)} is over" if outer.closed else _postfix(w, outer))  # fmt: skip
    for bar in inner[-2:]:
        if not bar.closed:
            words.append(_bar_words(w, bar))
    return words


def _has_steps(w: WorkerState) -> bool:
    """Whether the column of the count has the rank's reported steps, not its outermost bar."""
    return w.step is not None or not w.bars


def _is_out_of_sight(state: RunState, w: WorkerState) -> bool:
    """Whether the connection to its host is broken now: it runs on, and nothing about it is
    received.
    """
    return (
        w.phase in ALIVE and bool(state.nodes[w.node_rank].broken) and not state.is_over
    )


def _phase_of(state: RunState, w: WorkerState) -> ShownPhase:
    if state.seen_unix_s and w.phase in ALIVE:
        return last_seen_word(state)
    return "reconnecting" if _is_out_of_sight(state, w) else w.phase


def last_seen_word(state: RunState) -> Literal["detached", "last seen"]:
    """Return the state word for a run, or a rank, that this notebook no longer follows."""
    return "detached" if state.detached_by else "last seen"


def _bar_words(w: WorkerState, bar: Bar) -> str:
    name = bar_name(bar)
    words = q.count(bar.n)
    if bar.total is not None:
        words += f"/{q.count(bar.total)}"
    if name:
        words = f"{name} {words}"
    else:
        words = f"{words} {plain(bar.unit)}".strip()
    return f"{words} {_postfix(w, bar)}".strip()


def _postfix(w: WorkerState, bar: Bar) -> str:
    """Return the text after a bar, without numbers that have their own columns."""
    parts = [part.strip() for part in plain(bar.postfix).split(",")]
    kept = [part for part in parts if part.partition("=")[0] not in w.metrics]
    return ", ".join(kept)[:48]


def bar_name(bar: Bar) -> str:
    """Return the text of a bar, without the text after it; only the part before a colon if it is
    long.
    """
    name = plain(bar.desc).strip().rstrip(":").strip()
    if len(name) > _NAME and ":" in name[:_NAME]:
        name, _, _ = name.partition(":")
    return name[:_NAME]


def _rank_notes(
    state: RunState, w: WorkerState, still: Mapping[int, float]
) -> list[str]:
    notes = [f"restart {w.restart}"] if w.restart else []
    if w.rank in still:
        thing = "step" if w.progress[0] is not None else "report"
        notes.append(f"no {thing} for {q.duration(still[w.rank])}")
    if _is_out_of_sight(state, w):
        silent_s = state.at_s - state.nodes[w.node_rank].broken_at_s
        notes.append(f"not heard of for {q.duration(silent_s)}")
    if w.phase == "failed":
        if w.ended is None:
            how_it_failed = _code_words(w.exit.code) if w.exit else ""
        elif w.ended.failure is not None:
            failure = w.ended.failure
            how_it_failed = one_line(
                f"{failure.type}: {failure.message}".removesuffix(": ")
            )
        else:
            meaning = f" ({one_line(w.ended.meaning)})" if w.ended.meaning else ""
            how_it_failed = _code_words(w.ended.code) + meaning
        notes.append(how_it_failed)
    return notes


def _code_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _host_row(
    state: RunState, node: NodeState, workers: Sequence[WorkerState], still: Mapping[int, float]
) -> Row:  # fmt: skip
    """Return the row of all ranks of a host."""
    first, last = workers[0].rank, workers[-1].rank
    phases: Counter[ShownPhase] = Counter(_phase_of(state, w) for w in workers)
    notes = [counts_by_phase(phases)] if len(phases) > 1 else []
    still_s = [still[w.rank] for w in workers if w.rank in still]
    if still_s:
        ranks = q.plural(len(still_s), "rank")
        notes.append(f"{ranks} without a step for {q.duration(max(still_s))}")
    return replace(
        _row(state, node, workers, still),
        name=str(first) if first == last else f"{first}-{last}",
        gpu="" if state.is_over or not node.hardware else q.gpus(node.hardware.gpus),
        note=", ".join(notes),
    )


def counts_by_phase(phases: Counter[ShownPhase]) -> str:
    """Return `1 failed, 3 running`, the most important phase first."""
    return ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])


def _range_of_counts(workers: Sequence[WorkerState]) -> str:
    progress = [w.progress for w in workers]
    done = [steps for steps, _ in progress if steps is not None]
    if not done:
        return ""
    low, high = q.count(min(done)), q.count(max(done))
    counts = low if low == high else f"{low}-{high}"
    totals = [total for _, total in progress if total is not None]
    return f"{counts}/{q.count(totals[0])}" if totals else counts


# ---- the columns


def columns(groups: Sequence[Group], metrics: Sequence[str]) -> list[Column]:
    """Return the columns that have any content, with the rows of all groups; the last one, the
    notes, has no fixed width.

    A large run, which has several groups, has no column of devices.
    """
    rows = [row for group in groups for row in group.rows]
    values = []
    for spare, name in enumerate(metrics[:MAX_METRICS], start=3):
        cells = [q.number(row.metrics[name]) if name in row.metrics else "" for row in rows]  # fmt: skip
        title = cut_middle(plain(name), 16)
        values.append(Column(title, cells, kind=NUMBER, spare=spare))
    hosts = [cut_middle(row.host, _NAME) for row in rows]
    devices = [row.device[:12] if len(groups) == 1 else "" for row in rows]
    states = list(map(state_word, rows))
    progress = list(map(_progress, rows))
    counts = [cut(row.count, 24) for row in rows]
    gpus = [row.gpu for row in rows]
    if any(gpus):
        gpus = [text or NOT_TOLD for text in gpus]
    found = [
        Column("rank", [row.name for row in rows], key="rank", kind=NUMBER),
        Column("host", hosts),
        Column("device", devices, spare=10),
        Column("state", states, key="state", kind="dm-state"),
        Column("progress", progress, key="progress", spare=1),
        Column("step", counts, kind=NUMBER, spare=2),
        *values,
        Column("rate", [row.rate for row in rows], kind=NUMBER, spare=4),
        Column("left", [row.left for row in rows], kind=NUMBER, spare=3),
        Column("GPU", gpus, spare=9),
        Column("note", [row.note for row in rows], key="note", kind="dm-note"),
    ]
    return [one for one in found if one.key == "state" or any(one.cells)]


def _progress(row: Row) -> str:
    if row.fraction is None:
        return ""
    full = int(row.fraction * _BAR)
    bar = "█" * full + "░" * (_BAR - full)
    return f"{bar} {q.percent(row.fraction):>4}"


def under_titles(
    groups: Sequence[Group], lines: Sequence[str], title: Callable[[str], str]
) -> list[str]:
    """Return the lines of a table, starting with its titles, with each group's own title above its
    rows.
    """
    found, rows = [*lines[:1]], iter(lines[1:])
    for group in groups:
        if group.title:
            found.append(title(group.title))
        found += islice(rows, len(group.rows))
    return found

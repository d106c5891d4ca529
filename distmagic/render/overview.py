"""Decides what to show of a run, and in which order: the common model of text and HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distmagic.errors import Cancelled
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.vocabulary import POLITE_REASONS
from distmagic.render import quantities as q
from distmagic.render.notes import notes
from distmagic.render.row_choice import ShownPhase, slow_ranks
from distmagic.render.rows import (
    Group,
    bar_name,
    counts_by_phase,
    fraction_of,
    groups,
    last_seen_word,
    mean,
)
from distmagic.render.text_width import one_line, plain
from distmagic.state.explanation import Explanation, stacks_text
from distmagic.state.hangs import explain_dump, explain_last
from distmagic.state.model import RunState, WorkerState
from distmagic.state.phases import ALIVE, RunPhase, meaning_of
from distmagic.state.standstill import all_still_s, is_worth_saying, still_ranks
from distmagic.state.verdict import verdict

_MAX_ALERTS = 8
_LINES_SAID = 12  # for a rank that waits for input
_PART = re.compile(r"([^\W\d]*)[\s:#=(\[]*(\d{1,6})\s*(?:/|of)\s*(\d{1,6})\b")
_MAX_NAMES = 4  # host names in the head


@dataclass(frozen=True)
class Alert:
    """A message: level "error", "warning" or "info", one line, and an expandable detail."""

    level: str
    text: str
    detail: str = ""


@frozen
class Overview:
    """Everything except curves and output."""

    phase: RunPhase | Literal["detached", "last seen"]
    fraction: float | None
    facts: tuple[str, ...]  # the head's short phrases after the phase
    # the head's text about ranks that stand still or are behind, "" for none
    concern: str
    alerts: tuple[Alert, ...]
    groups: tuple[Group, ...]
    metrics: tuple[str, ...]


def overview(state: RunState) -> Overview:
    """Return the parts of a run that the overview shows."""
    workers = [state.workers[rank] for rank in sorted(state.workers)]
    is_seen_last = bool(state.seen_unix_s)
    slow = set() if is_seen_last else slow_ranks(workers)
    still = {} if is_seen_last else still_ranks(state)
    return Overview(
        phase=last_seen_word(state) if is_seen_last else state.phase,
        fraction=_fraction(state, workers),
        facts=tuple(_facts(state, workers, still)),
        concern=_concern(state, still, slow),
        alerts=tuple(_alerts(state)),
        groups=tuple(groups(state, workers, slow, still, _standing_out(state))),
        metrics=tuple(dict.fromkeys(name for w in workers for name in w.metrics)),
    )


# ---- the head


def _fraction(state: RunState, workers: Sequence[WorkerState]) -> float | None:
    """Return the fraction of all ranks' work that is done; None if no running rank reports its
    progress.

    Before there are ranks: the fraction of the payload that was sent, if it is being sent.
    """
    if not workers:
        total = sum(node.total_bytes for node in state.nodes)
        if not total or state.phase != "sending":
            return None
        return sum(node.sent_bytes for node in state.nodes) / total
    alive = [fraction_of(w) for w in workers if w.phase in ALIVE]
    if alive and mean(alive) is None:
        return None
    return mean(fraction_of(w) for w in workers)


def _facts(
    state: RunState, workers: Sequence[WorkerState], still: Mapping[int, float]
) -> Iterable[str]:
    if state.seen_unix_s:
        yield q.clock(state.seen_unix_s)
    yield size(state)
    took = q.duration(state.before_s + state.at_s)
    yield f"took {took}" if state.is_over else took
    if state.phase == "connecting" and len(state.nodes) > 1:
        connected = sum(node.phase != "connecting" for node in state.nodes)
        yield f"{connected} of {len(state.nodes)} connected"
    slowest = max(workers, key=lambda w: -1 if w.eta_s is None else w.eta_s, default=None)  # fmt: skip
    goes_on = state.phase == "running" and not state.seen_unix_s
    if slowest is not None and goes_on:
        part = _part_of_run(slowest)
        if part:
            yield part
        if slowest.eta_s is not None and not still:
            is_part = part or (slowest.step is None and slowest.bars_before)
            yield f"{q.eta(slowest.eta_s)} left{' in this bar' if is_part else ''}"
    yield from _why_it_stops(state)
    running = sum(w.phase == "running" for w in workers)
    if state.phase == "stopping" and state.stopping in POLITE_REASONS and running:
        limit = q.duration(state.terms.grace_s)
        yield f"waits up to {limit} for {q.plural(running, 'rank')}; stop again to end them now"
    phases: Counter[ShownPhase] = Counter(w.phase for w in workers)
    unborn = state.world_size - len(workers)
    if state.is_over and workers and unborn > 0 and not state.cell:
        yield f"{counts_by_phase(phases)}, {unborn} never started"
    elif len(phases) > 1:
        yield counts_by_phase(phases)


def _why_it_stops(state: RunState) -> Iterable[str]:
    if state.is_over and isinstance(verdict(state), Cancelled):
        yield "interrupted"
    elif not meaning_of(state.stopping).is_explained and not state.is_over:
        yield one_line(state.stopping)


def _part_of_run(worker: WorkerState) -> str:
    """Return `epoch 2 of 4` if the text of a rank's bar has such a count: `epoch 2/4`, `Fold
    [2/4]`.
    """
    if worker.step is not None or not worker.bars or worker.bars[0].closed:
        return ""
    found = _PART.match(bar_name(worker.bars[0]))
    if found is None or int(found[2]) > int(found[3]):
        return ""
    return f"{found[1].strip().lower()} {found[2]} of {found[3]}".strip()


def _standing_out(state: RunState) -> Mapping[int, str]:
    """Return the ranks to look at first, with the reason, as far as their last answers show it."""
    last = explain_last(state)
    if last is None or state.phase == "done":
        return {}
    was_wanted = state.last_dump is state.stack_dumps.get(state.wanted_stacks)
    is_known = state.is_over or was_wanted or is_worth_saying(state, last)
    return last.standing_out if is_known else {}


def _concern(state: RunState, still: Mapping[int, float], slow: set[int]) -> str:
    """Return the head's text about ranks that stand still, are behind, or run on after most have
    ended.
    """
    all_still = all_still_s(state, still)
    if all_still is not None:
        return f"no rank has advanced for {q.duration(all_still)}"
    if still:
        longest = max(still, key=still.__getitem__)
        words = f"{plain(state.workers[longest].label)} has not advanced for {q.duration(still[longest])}"
        return _and_more(words, ", nor have", len(still))
    if slow:
        behind = [state.workers[rank] for rank in slow]
        slowest = min(behind, key=lambda w: (w.progress[0] or 0.0, -w.at_s))
        return _and_more(f"slow: {plain(slowest.label)}", " and", len(slow))
    alive = state.running
    done = [w for w in state.workers.values() if w.phase == "done"]
    if state.phase != "running" or not alive or len(done) < len(alive):
        return ""
    first = min(alive, key=lambda w: w.rank)
    return _and_more(f"{plain(first.label)} still runs", ", and", len(alive))


def _and_more(words: str, conjunction: str, count: int) -> str:
    return f"{words}{conjunction} {count - 1} more" if count > 1 else words


def size(state: RunState) -> str:
    """Return `4 ranks on gpu-a, gpu-b`."""
    lost = state.lost
    there = set()
    at_cell = {worker.node_rank for worker in state.workers.values()}
    for node in state.nodes:
        if state.cell and node.node_rank not in at_cell:
            continue
        if not state.is_elastic or (
            node.node_rank not in lost and node.stopping != "lost"
        ):
            there.add(node.host)
    # Each host once: in an elastic job it may have been several nodes.
    all_hosts = dict.fromkeys(node.host for node in state.nodes)
    names = [plain(host) for host in all_hosts if host in there]
    hosts = ", ".join(names)
    if len(names) > _MAX_NAMES:
        hosts = f"{len(names)} hosts"
    ranks = 0 if state.cell else state.world_size
    ranks = ranks or len(state.workers)
    return f"{q.plural(ranks, 'rank')} on {hosts}" if ranks else hosts


# ---- alerts


def _alerts(state: RunState) -> Iterable[Alert]:
    urgent = [*_failure(state)]
    if not state.seen_unix_s:  # a finished run, or one seen last, waits for nothing
        for rank in state.paused:
            urgent.append(Alert("info", f"{waits_at(state, rank)}."))
    for node in state.nodes:
        if node.waits_for and not state.is_over:
            text = f"{plain(node.host)}: waiting for {one_line(node.waits_for)}"
            urgent.append(Alert("info", text))
    urgent += _hosts_in_trouble(state)
    for alert in _where_ranks_are(state):
        if alert.detail not in [one.detail for one in urgent if one.detail]:
            urgent.append(alert)
    notices = [Alert("warning", text) for text in notes(state)]
    room = max(0, _MAX_ALERTS - len(urgent))
    newest = notices[-room:] if room else []
    yield from urgent[:_MAX_ALERTS]
    yield from newest  # an old notice has been seen; a new one may be about a full disk
    more = len(urgent[_MAX_ALERTS:]) + len(notices) - len(newest)
    if more:
        yield Alert("warning", f"and {q.plural(more, 'more notice')}")


def _failure(state: RunState) -> Iterable[Alert]:
    if state.abandoned:
        # Otherwise the hosts' own rows show it.
        if not state.stopping and not any(node.unusable for node in state.nodes):
            yield Alert("error", one_line(state.abandoned))
        return
    if state.first_failure is None and not state.is_over:
        return
    if state.first_failure is not None and state.first_failure not in state.workers:
        return
    error = verdict(state)
    # The user has requested an interrupt: the head and the cell's error already show it.
    if error is not None and not isinstance(error, Cancelled):
        detail = getattr(error, "remote_traceback", "") or getattr(error, "stacks", "")
        yield Alert("error", one_line(error.message), detail)


def waits_at(state: RunState, rank: int) -> str:
    """Return `rank 1 (gpu-b, local_rank 0) waits for a line at Cell In[3], line 4`."""
    paused = state.paused[rank]
    label, file = plain(state.workers[rank].label), one_line(paused.file)
    return f"{label} waits for a line at {file}, line {paused.line}"


def question(state: RunState) -> str:
    """Return the question for the rank that has waited longest: where it waits, and its prompt."""
    rank, paused = next(iter(state.paused.items()))
    place = f"{one_line(paused.file)}, line {paused.line}"
    return f"rank {rank} at {place}: {one_line(paused.asks)} "


def prompts(state: RunState) -> list[dict[str, object]]:
    """Return the texts next to each input line of a page: where the rank waits, and its last
    output.
    """
    found = []
    for rank, paused in list(state.paused.items())[:_MAX_ALERTS]:
        said = [plain(line.text) for line in state.lines if line.rank == rank]
        found.append({
            "rank": rank,
            "prompt": paused.prompt,
            "where": waits_at(state, rank),
            "said": "\n".join(said[-_LINES_SAID:]),
            "asks": one_line(paused.asks),
        })  # fmt: skip
    return found


def _where_ranks_are(state: RunState) -> Iterable[Alert]:
    """Yield where ranks that stand still are, or were at the user's request; at the end, at the
    last request.
    """
    last = None if state.seen_unix_s else explain_last(state)
    if last is not None and not state.is_over and is_worth_saying(state, last):
        yield _places("warning", "", last)
    dump = state.stack_dumps.get(state.wanted_stacks)
    if state.is_over:
        if state.phase == "done":
            return
        dump = dump if last is None else state.last_dump
    if dump is not None:
        when = f"at {q.duration(dump.at_s)}: "
        yield _places("info", when, explain_dump(state, dump))
    elif state.wanted_stacks and not state.is_over:
        yield Alert("info", "asking every rank where it is")


def _places(level: str, when: str, found: Explanation) -> Alert:
    words = one_line(f"{when}{found.sentence}. {found.advice}".rstrip())
    return Alert(level, words, stacks_text(found))


def _hosts_in_trouble(state: RunState) -> Iterable[Alert]:
    if not state.is_over:
        for lost, why in state.lost.items():
            host = plain(state.nodes[lost].host)
            yield Alert("error", f"{host}: {one_line(why)}")
        for node in state.nodes:
            if node.broken and node.phase != "gone":
                why = node.broken.removeprefix(f"{node.host}: ")
                why = one_line(why).rstrip(".")
                text = f"{plain(node.host)}: reconnecting ({why}); unless that host is down, its ranks continue"
                yield Alert("warning", text)
        lead = plain(state.nodes[0].host)
        for node in state.nodes[1:]:
            # Otherwise it may only start slowly.
            if node.gang == "silent" and node.phase == "running":
                pair = f"{plain(node.host)} and {lead}"
                text = f"{pair} don't hear each other by UDP: each ends by itself if this notebook is gone"
                yield Alert("warning", text)
        # Before the lead listens, no node can connect.
        is_open = state.endpoint_open_at_s is not None
        for i, why in sorted(state.unreached.items()) if is_open else ():
            host = plain(state.nodes[i].host)
            yield Alert("warning", f"{host} can't dial {lead} yet: {one_line(why)}")
    for node in state.nodes:
        if node.survivors:
            names = one_line(", ".join(node.survivors))
            yield Alert(
                "error",
                f"did not end on {plain(node.host)}, even after SIGKILL: {names}",
            )

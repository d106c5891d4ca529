"""What is true of every state of a run, and what of a state is the same in whichever order events came."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from distmagic.state.builder import KEPT_LINES, KEPT_NOTICES
from distmagic.state.events import Event
from distmagic.state.model import RunState
from distmagic.state.phases import NODE_PHASES
from tests.builders.events import texts


def hold(state: RunState) -> None:
    """Assert what is true of every state, and that all that is derived from it can be asked for."""
    assert [n.node_rank for n in state.nodes] == [0, 1]
    assert all(
        rank == w.rank and 0 <= rank < state.world_size
        for rank, w in state.workers.items()
    )
    assert all(
        w.phase in ("running", "done", "failed", "stopped", "lost")
        for w in state.workers.values()
    )
    assert all(
        (w.ended is not None) or w.phase in ("running", "stopped", "lost")
        for w in state.workers.values()
    )
    assert all(n.phase in NODE_PHASES for n in state.nodes)
    if state.first_failure is not None:
        assert state.workers[state.first_failure].phase == "failed"
    assert len(state.lines) <= KEPT_LINES
    assert len(state.notices) <= KEPT_NOTICES
    assert all("\n" not in text for text in (*texts(state), *state.open_lines.values()))
    assert state.phase in (
        "connecting",
        "sending",
        "starting",
        "running",
        "stopping",
        "done",
        "failed",
        "stopped",
        "lost",
    )
    for one in state.workers.values():
        assert (
            (one.label and one.eta_s is None) or math.isnan(one.eta_s) or one.eta_s >= 0
        )


def mixed(dice: random.Random, *queues: deque[Event]) -> Iterator[Event]:
    """Yield all events, those of each queue in their order."""
    left = [deque(queue) for queue in queues]
    while left := [queue for queue in left if queue]:
        yield dice.choice(left).popleft()


def what_matters(state: RunState) -> dict[str, object]:
    """Return all of a state but the order in which lines of different ranks, and notices of different nodes, came."""
    lines: dict[tuple[int, str, str], list[str]] = {}
    for line in state.lines:
        lines.setdefault((line.rank, line.label, line.stream), []).append(line.text)
    # When a rank advanced is told by the clock of who receives its events.
    workers = {
        rank: replace(worker, advanced_at_s=0.0)
        for rank, worker in state.workers.items()
    }
    return {
        "nodes": state.nodes, "workers": workers, "world": state.world_size, "series": dict(state.series),
        "lines": lines, "open": dict(state.open_lines), "seen": state.lines_seen, "notices": set(state.notices),
        "lost": dict(state.lost), "unreached": dict(state.unreached), "failed": state.failed_node, "phase": state.phase,
        "over": state.is_over,
    }  # fmt: skip

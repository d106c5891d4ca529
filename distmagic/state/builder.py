"""A state of a run that can be changed, alive within one call of `fold`: so that a batch of events costs one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from distmagic.remote.wire import protocol
from distmagic.state.model import ALIVE, NODE_PHASES, OutputLine, RunState, StackDump
from distmagic.state.series import Series

KEPT_NOTICES = 100
KEPT_LINES = 400  # lines of output kept in memory, of all ranks together
KEPT_LINE_CHARS = 2000
KEPT_ROLLS = 4  # roll calls
STREAMS = ("stdout", "stderr")


class RunStateBuilder:
    """A mutable copy of a state, alive within one call of `fold`."""

    def __init__(self, state: RunState) -> None:
        self.base = state
        self.at_s = state.at_s
        self.nodes = list(state.nodes)
        self.workers = dict(state.workers)
        self.world_size, self.rdzv_round = state.world_size, state.rdzv_round
        self.series: dict[int, Mapping[str, Series]] = dict(state.series)
        self.own_series: set[int] = set()  # ranks whose table of series is a copy of ours already
        self.lines = list(state.lines)
        self.lines_seen = state.lines_seen
        self.open_lines = dict(state.open_lines)
        self.first_failure = state.first_failure
        self.first_failure_at_s = state.first_failure_at_s
        self.failed_node = state.failed_node
        self.notices = list(state.notices)
        self.stopping = state.stopping
        self.abandoned = state.abandoned
        self.started_at_s = state.started_at_s
        self.lost = list(state.lost)
        self.unreached = dict(state.unreached)
        self.endpoint_open_at_s = state.endpoint_open_at_s
        self.culprit, self.detached_by, self.min_nodes = state.culprit, state.detached_by, state.min_nodes
        self.advanced_at_s = state.advanced_at_s
        self.stack_dumps = {roll.request_id: roll for roll in state.stack_dumps}

    def freeze(self) -> RunState:
        """Return the state that it has become."""
        return replace(
            self.base, at_s=self.at_s, nodes=tuple(self.nodes), workers=self.workers, world_size=self.world_size,
            rdzv_round=self.rdzv_round,
            series=self.series, lines=tuple(self.lines[-KEPT_LINES:]), lines_seen=self.lines_seen,
            open_lines=self.open_lines, first_failure=self.first_failure,
            first_failure_at_s=self.first_failure_at_s, failed_node=self.failed_node, notices=tuple(self.notices),
            stopping=self.stopping, abandoned=self.abandoned, started_at_s=self.started_at_s, lost=tuple(self.lost),
            unreached=self.unreached, endpoint_open_at_s=self.endpoint_open_at_s, culprit=self.culprit,
            detached_by=self.detached_by, min_nodes=self.min_nodes, advanced_at_s=self.advanced_at_s,
            stack_dumps=tuple(self.stack_dumps.values())[-KEPT_ROLLS:],
        )  # fmt: skip

    def advance(self, node: int, phase: str, **more: Any) -> None:
        """Bring a node to a phase, unless it is beyond it already."""
        old = self.nodes[node]
        self.nodes[node] = replace(old, phase=max(old.phase, phase, key=NODE_PHASES.index), **more)

    def note_advance(self) -> None:
        """Note that a rank has advanced; ranks that end because they are stopped don't count."""
        if not self.stopping:
            self.advanced_at_s = self.at_s

    def take_stacks(self, node_rank: int, what: protocol.Stacks) -> None:
        """Keep where a rank is, as answer to one roll call."""
        worker = self.workers.get(what.rank)
        if worker is not None and worker.node_rank == node_rank:
            roll = self._roll(what.request_id)
            self.stack_dumps[what.request_id] = replace(roll, stacks={**roll.stacks, what.rank: what})

    def take_dumped(self, node_rank: int, what: protocol.StacksDone) -> None:
        """Note that a node has told of all its ranks."""
        roll = self._roll(what.request_id)
        if node_rank not in roll.nodes:
            self.stack_dumps[what.request_id] = replace(roll, nodes=(*roll.nodes, node_rank))

    def _roll(self, request_id: str) -> StackDump:
        return self.stack_dumps.get(request_id) or StackDump(request_id=request_id, at_s=self.at_s)

    # ---- what several events have in common

    def notice(self, text: str) -> None:
        """Tell something once, unless too much was told already."""
        if text not in self.notices and len(self.notices) < KEPT_NOTICES:
            self.notices.append(text)

    def lose(self, node: int, why: str) -> None:
        """Count a node as lost, with its ranks."""
        if self.nodes[node].phase == "gone" or any(node == other for other, _ in self.lost):
            return
        self.lost.append((node, why))
        self.end_all_on(node, "lost")

    def end_all_on(self, node: int, phase: str) -> None:
        """Bring a node's ranks that still run to this phase."""
        for rank, worker in self.workers.items():
            if worker.node_rank == node:
                self.close_lines(rank, node)
                if worker.phase in ALIVE:
                    self.workers[rank] = replace(worker, phase=phase)

    # ---- output

    def write(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        """Fold carriage returns and keep whole lines; the rest waits in `open_lines`."""
        key = (rank, node_rank, stream)
        *whole, rest = (self.open_lines.pop(key, "") + text.replace("\r\n", "\n")).split("\n")
        self.lines_seen += len(whole[:-KEPT_LINES])
        for line in whole[-KEPT_LINES:]:
            self.add_line(rank, node_rank, stream, line)
        if rest:
            end = "\r" if rest.endswith("\r") else ""  # what comes next overwrites it, unless that is a newline
            self.open_lines[key] = _last_drawn(rest) + end
        if len(self.lines) > 4 * KEPT_LINES:
            del self.lines[:-KEPT_LINES]

    def add_line(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        """Keep a finished line."""
        host = self.nodes[node_rank].host
        label = f"rank {rank} {host}" if rank >= 0 else f"torchrun {host}"
        self.lines.append(OutputLine(rank=rank, label=label, stream=stream, text=_last_drawn(text)))
        self.lines_seen += 1

    def close_lines(self, rank: int, node_rank: int, streams: tuple[str, ...] = STREAMS) -> None:
        """Count unfinished lines as finished."""
        for stream in streams:
            text = self.open_lines.pop((rank, node_rank, stream), None)
            if text is not None:
                self.add_line(rank, node_rank, stream, text)

    # ---- metrics

    def series_of(self, rank: int) -> dict[str, Series]:
        """Return a rank's table of series, to be changed."""
        if rank not in self.own_series:
            self.own_series.add(rank)
            self.series[rank] = dict(self.series.get(rank, {}))
        return cast(dict[str, Series], self.series[rank])


def _last_drawn(text: str) -> str:
    """Return what a terminal would show of a line with carriage returns in it."""
    return text.rstrip("\r").rpartition("\r")[2][:KEPT_LINE_CHARS]

"""A mutable state of a run.

It exists only within one call of `fold`, so that a batch of events costs one copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from distmagic import sanitize
from distmagic.failures import detailed_logs
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.model import (
    NodeState,
    OutputLine,
    RunState,
    ShownPicture,
    StackDump,
    WorkerState,
)
from distmagic.state.phases import ALIVE, NODE_PHASES, NodePhase, RankPhase
from distmagic.state.series import Series

KEPT_NOTICES = 100
KEPT_LINES = 1000  # lines of output kept in memory for all ranks together: as many as a page shows
KEPT_LINE_CHARS = 2000
KEPT_PICTURES = 4
# Total size of all pictures in base64, which a saved notebook contains.
_PICTURE_CHARS = 400_000
KEPT_DUMPS = 4  # requests for stacks, with their answers
STREAMS = ("stdout", "stderr")
# Lines that torch prints in every run, which only the logs keep: about a host without a reverse DNS
# name, and about torchrun's default number of threads.
_NOISE = re.compile(
    r"\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|torch/distributed/run\.py:\d+\] *(\**$|Setting OMP_NUM_THREADS environment variable for each process)"
)


class RunStateBuilder:
    """A mutable copy of a state. It exists only within one call of `fold`.

    Its fields are those of `RunState`, with lists instead of tuples, and tables that may be
    changed. `__init__` and `freeze` copy all of them. `base` is the state before the batch.
    """

    nodes: list[NodeState]
    workers: dict[int, WorkerState]
    world_size: int
    series: dict[int, Mapping[str, Series]]
    lines: list[OutputLine]
    lines_seen: int
    pictures: list[ShownPicture]
    open_lines: dict[tuple[int, int, str], str]
    first_failure: int | None
    first_failure_at_s: float
    failed_node: int | None
    notices: list[str]
    stopping: StopReason | Literal[""]
    abandoned: str
    started_at_s: float | None
    lost: dict[int, str]
    unreached: dict[int, str]
    endpoint_open_at_s: float | None
    at_s: float
    terms: JobTerms
    rdzv_round: int
    culprit: int | None
    detached_by: str
    advanced_at_s: float
    reaching_since_s: float
    stack_dumps: dict[str, StackDump]
    chose_port: bool
    paused: dict[int, protocol.Paused]
    paused_s: float
    resumed_at_s: float
    wanted_stacks: str
    logged: dict[tuple[int, str], str]

    def __init__(self, state: RunState) -> None:
        self.base = state
        for name in _FIELDS:
            value = getattr(state, name)
            if isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            setattr(self, name, value)

    def freeze(self) -> RunState:
        """Return the resulting `RunState`."""
        del self.lines[:-KEPT_LINES]
        for rank in list(self.paused):
            worker = self.workers.get(rank)
            if worker is None or worker.phase != "running":
                self.resume(rank)
        fields: dict[str, Any] = {}
        for name in _FIELDS:
            value = getattr(self, name)
            fields[name] = tuple(value) if isinstance(value, list) else value
        return replace(self.base, **fields)

    def change_node(self, node: int, **fields: Any) -> None:
        """Replace fields of the state of a node."""
        self.nodes[node] = replace(self.nodes[node], **fields)

    def change_rank(self, rank: int, **fields: Any) -> None:
        """Replace fields of the state of a rank."""
        self.workers[rank] = replace(self.workers[rank], **fields)

    def rank_of(self, node: int, rank: int) -> WorkerState | None:
        """Return the state of a rank; None if this node does not have it."""
        worker = self.workers.get(rank)
        return worker if worker is not None and worker.node_rank == node else None

    def let_pass(self, at_s: float) -> None:
        """Advance the clock to this time, unless it is later already."""
        past_s = max(0.0, at_s - self.at_s)
        self.at_s += past_s
        if self.paused:
            self.paused_s += past_s

    def resume(self, rank: int) -> None:
        """Mark a rank as no longer waiting for the user's input."""
        if self.paused.pop(rank, None) is not None:
            self.resumed_at_s = self.at_s
            self.note_advance()

    def advance(self, node: int, phase: NodePhase, **more: Any) -> None:
        """Move a node to a phase, unless it is already in a later one."""
        later = max(self.nodes[node].phase, phase, key=NODE_PHASES.index)
        self.change_node(node, phase=later, **more)

    def note_reached(self) -> None:
        """Record the time at which the notebook reaches a node after it had reached none."""
        there = (
            node
            for node in self.nodes
            if node.phase != "gone" and node.node_rank not in self.lost
        )
        if not any(node.is_reached for node in there):
            self.reaching_since_s = self.at_s

    def note_advance(self) -> None:
        """Record that a rank has advanced. A rank that ends because of a stop does not count."""
        if not self.stopping:
            self.advanced_at_s = self.at_s

    def take_stacks(self, _: WorkerState, what: protocol.Stacks) -> None:
        """Keep the stacks of a rank as an answer to a request."""
        if what.request_id == protocol.LEFT:
            self.change_rank(what.rank, left=what)
            return
        dump = self._dump_of(what.request_id)
        stacks = {**dump.stacks, what.rank: what}
        self.stack_dumps[what.request_id] = replace(dump, stacks=stacks)

    def take_picture(self, worker: WorkerState, what: protocol.Picture) -> None:
        """Keep a picture of a rank if a page can draw it; drop the oldest ones."""
        png = sanitize.png(what.data)
        if not png:
            return
        picture = ShownPicture(
            rank=what.rank, host=worker.host, step=what.step, png=png
        )
        self.pictures.append(picture)
        del self.pictures[:-KEPT_PICTURES]
        while sum(len(one.png) for one in self.pictures) > _PICTURE_CHARS:
            del self.pictures[0]

    def take_dumped(self, node_rank: int, what: protocol.StacksDone) -> None:
        """Record that a node has sent the stacks of all its ranks for a request."""
        dump = self._dump_of(what.request_id)
        nodes = frozenset((*dump.nodes, node_rank))
        self.stack_dumps[what.request_id] = replace(dump, nodes=nodes)

    def _dump_of(self, request_id: str) -> StackDump:
        """Return the answers to a request; the first answer adds an entry, and drops the oldest."""
        dump = self.stack_dumps.setdefault(request_id, StackDump(at_s=self.at_s))
        if len(self.stack_dumps) > KEPT_DUMPS:
            del self.stack_dumps[next(iter(self.stack_dumps))]
        return dump

    # ---- shared by several events

    def notice(self, text: str) -> None:
        """Add a notice unless it exists; drop the oldest ones."""
        if text not in self.notices:
            self.notices.append(text)
            del self.notices[:-KEPT_NOTICES]

    def lose(self, node: int, why: str) -> None:
        """Mark a node and its ranks as lost."""
        if self.nodes[node].phase == "gone" or node in self.lost:
            return
        self.lost[node] = why
        self.end_all_on(node, "lost")

    def find_again(self, node: int) -> None:
        """Undo the loss of a node and its ranks.

        If the node has ended meanwhile, its ranks count as stopped by its agent.
        """
        if self.lost.pop(node, None) is None:
            return
        has_ended = self.nodes[node].phase in ("clear", "gone")
        for rank, worker in self.workers.items():
            if worker.node_rank == node and worker.phase == "lost":
                self.change_rank(rank, phase="stopped" if has_ended else "running")

    def end_all_on(self, node: int, phase: RankPhase) -> None:
        """Move the ranks of a node that still run to this phase."""
        for rank, worker in self.workers.items():
            if worker.node_rank == node:
                self.close_lines(rank, node)
                if worker.phase in ALIVE:
                    self.change_rank(rank, phase=phase)

    # ---- output

    def write(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        """Keep the complete lines of a text as a terminal would show them; an incomplete line goes
        to `open_lines`.
        """
        key = (rank, node_rank, stream)
        text = self.open_lines.pop(key, "") + text.replace("\r\n", "\n")
        *whole, rest = text.split("\n")
        for line in whole:
            self.add_line(rank, node_rank, stream, line)
        if rest:
            # After a \r the next text overwrites the line, unless it starts with a newline.
            end = "\r" if rest.endswith("\r") else ""
            self.open_lines[key] = _last_drawn(rest) + end

    def add_line(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        """Keep a complete line, unless torch prints it in every run, or it is a detail that only
        the log keeps.
        """
        if _NOISE.search(text):
            return
        if self.terms.debug:  # it made a library write most of these lines
            if (found := detailed_logs.fact(text)) is not None:
                kind, value = found
                self.logged[node_rank, kind] = value
            if detailed_logs.is_detail(text):
                return
        host = self.nodes[node_rank].host
        self.lines.append(output_line(rank, host, stream, text))
        self.lines_seen += 1

    def close_lines(
        self, rank: int, node_rank: int, streams: tuple[str, ...] = STREAMS
    ) -> None:
        """Complete the open lines.

        A line that was erased, as bars and `clear_output` do, is dropped.
        """
        for stream in streams:
            text = self.open_lines.pop((rank, node_rank, stream), "")
            if sanitize.line(text).strip():
                self.add_line(rank, node_rank, stream, text)


_FIELDS = tuple(RunStateBuilder.__annotations__)
# Functions that change a builder, by the type of their event.
Handlers = dict[type, Callable[..., None]]


def output_line(rank: int, host: str, stream: str, text: str) -> OutputLine:
    """Return a line of a rank, or of torchrun (-1), as a terminal would show it."""
    label = f"rank {rank} {host}" if rank >= 0 else f"torchrun {host}"
    return OutputLine(rank=rank, label=label, stream=stream, text=_last_drawn(text))


def _last_drawn(text: str) -> str:
    """Return a line with carriage returns as a terminal would show it."""
    return text.rstrip("\r").rpartition("\r")[2][:KEPT_LINE_CHARS]

"""The state of one cell on ranks that stay: the session's events go in, the cell's `RunState` comes
out. Pure.
"""

from __future__ import annotations

import ast
import base64
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.system.gc_pause import parsed
from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges
from distmagic.request.cells.shell_commands import command_in
from distmagic.state.events import Event, Gone, StopRequested, Warned
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState, WorkerState
from distmagic.state.phases import ALIVE

# time for the other ranks to end a cell by themselves after one has failed
PEERS_S = 1.0


# The stages of the user's interrupt: "ask" ranks for their steps, "asked", "stopping" at a common
# step, "go there" (interrupt them where they are), "where they are" (interrupted), "end" the ranks.
Stage = Literal["", "ask", "asked", "stopping", "go there", "where they are", "end"]


@frozen
class CellState:
    """The state of a cell."""

    run: RunState  # the cell's state in the form of a run's
    began_s: float  # start time, in seconds of the session
    # the message with which each rank ended the cell
    ends: Mapping[int, protocol.CellEnded] = field(default_factory=dict)
    asked: frozenset[int] = frozenset()  # the interrupted ranks
    stage: Stage = ""  # the stage of the user's interrupt
    until_s: float = 0.0  # this stage lasts at most until then
    # steps of ranks
    counts: Mapping[int, protocol.StepCount] = field(default_factory=dict)
    # the step at which ranks were asked to stop
    stop: protocol.StopAtStep | None = None
    ended_s: float = 0.0  # when the last rank ended the cell
    told: frozenset[int] = frozenset()  # the ranks whose ends were sent to the others

    @property
    def at_work(self) -> tuple[int, ...]:
        """The ranks that still run the cell."""
        workers = self.run.workers.items()
        return tuple(rank for rank, worker in workers if worker.phase in ALIVE)

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks themselves have ended or are about to: by the last interrupt, or before
        they finished the cell.
        """
        if self.stage == "end":
            return True
        return self.run.is_over and self.ends.keys() != self.run.workers.keys()


def begin_cell(
    session: RunState, cell: int, ranks: Iterable[int], began_unix_s: float
) -> CellState:
    """Return the initial state of a cell on these ranks."""
    fresh = begin(session.job, [node.host for node in session.nodes], session.terms)
    nodes = tuple(
        replace(node, sent_bytes=0, total_bytes=0, broken_at_s=0.0, accused_at_s=None)
        for node in session.nodes
    )
    workers = {}
    for rank in ranks:
        old = session.workers[rank]
        workers[rank] = WorkerState(
            rank=rank, local_rank=old.local_rank, node_rank=old.node_rank, host=old.host,
            phase="running", round=old.round, restart=old.restart, pid=old.pid, device=old.device,
        )  # fmt: skip
    run = replace(
        fresh, nodes=nodes, workers=workers, world_size=session.world_size,
        rdzv_round=session.rdzv_round, started_at_s=0.0, name=session.name, variable=session.variable,
        began_unix_s=began_unix_s, cell=cell,
    )  # fmt: skip
    return CellState(run=run, began_s=session.at_s)


def title(text: str) -> str:
    """Return what the last statement of a cell computes, by which views and comparisons tell cells
    of the same ranks apart; "" for a cell without statements.
    """
    statements = parsed(text).body
    if not statements:
        return ""
    last = statements[-1]
    shown = last.value if isinstance(last, ast.Expr | ast.Assign) else last
    return (command_in(shown) or ast.unparse(shown)).partition("\n")[0]


def take(state: CellState, events: Iterable[Event]) -> CellState:
    """Return the state after some events of the session."""
    ends = dict(state.ends)
    counts = dict(state.counts)
    own = []
    for event in events:
        what = event.what
        rank = getattr(what, "rank", -1)
        worker = state.run.workers.get(rank)
        is_here = worker is not None and worker.node_rank == event.node_rank
        is_elsewhere = rank >= 0 and not is_here
        if is_elsewhere or getattr(what, "cell", state.run.cell) != state.run.cell:
            continue
        has_raised = rank in ends and ends[rank].ended.outcome == "raised"
        if has_raised and isinstance(what, protocol.Ended):
            continue  # how its process ended later must not hide why it failed
        if isinstance(what, protocol.StepCount):
            counts[rank] = what
        elif isinstance(what, protocol.CellEnded):
            ends[rank] = what
            # An unused process group is not worth a notice: the next cell may create one.
            what = replace(what.ended, group_use="")
        at_s = max(0.0, event.at_s - state.began_s)
        own.append(replace(event, at_s=at_s, what=what))
    run = fold(state.run, own)
    if not run.is_over and ends.keys() == run.workers.keys():
        # In this state only, its nodes end: they run on for the next cell.
        last = (protocol.EngineEnded(code=0), protocol.Final(reason="done"), Gone())
        events = [
            Event(node_rank=node, at_s=run.at_s, what=what)
            for node in range(len(run.nodes))
            for what in last
        ]
        run = fold(run, events)
    ended_s = state.ended_s if ends.keys() == state.ends.keys() else run.at_s
    return replace(state, run=run, ends=ends, counts=counts, ended_s=ended_s)


def peers_to_interrupt(state: CellState) -> tuple[int, ...]:
    """Return the ranks that still run a while after another one has failed, and were not
    interrupted yet.
    """
    run = state.run
    if run.first_failure is None or run.at_s - run.first_failure_at_s < PEERS_S:
        return ()
    return tuple(rank for rank in state.at_work if rank not in state.asked)


def of_ends(
    state: CellState,
) -> tuple[CellState, tuple[protocol.OthersEnded, ...]]:
    """Return what to report to ranks that run on a while after others have ended the cell, and the
    state after it.
    """
    new = state.ends.keys() - state.told
    if not new or not state.at_work or state.run.at_s - state.ended_s < PEERS_S:
        return state, ()
    by_groups: dict[tuple[protocol.GroupCalls, ...], list[int]] = {}
    for rank in sorted(new):
        by_groups.setdefault(state.ends[rank].groups, []).append(rank)
    found = [
        protocol.OthersEnded(
            cell=state.run.cell, ranks=state.at_work, ended=tuple(ranks), groups=groups
        )
        for groups, ranks in by_groups.items()
    ]
    return replace(state, told=frozenset(state.ends)), tuple(found)


def interrupted(
    state: CellState, ranks: Iterable[int], *, by_user: bool, notice: str = ""
) -> CellState:
    """Return the state after an interrupt of these ranks: by the user, or because another rank has
    failed.
    """
    run = state.run
    events: list[Event] = []
    if not run.stopping:
        reason = StopRequested(reason="interrupted" if by_user else "failed")
        events.append(Event(node_rank=0, at_s=run.at_s, what=reason))
    if notice:
        events.append(Event(node_rank=0, at_s=run.at_s, what=Warned(text=notice)))
    run = fold(run, events)
    return replace(state, run=run, asked=state.asked.union(ranks))


def values(ends: Mapping[int, protocol.CellEnded]) -> dict[int, bytes]:
    """Return the parcels of the values that came with the ends of a cell, by rank."""
    found = {}
    for rank, end in ends.items():
        with contextlib.suppress(ValueError):  # a host that sends anything
            found[rank] = base64.b64decode(end.value)
    return {rank: data for rank, data in found.items() if data}


def shown(ends: Mapping[int, protocol.CellEnded]) -> list[str]:
    """Return the values of the ranks' last expressions as lines; equal ones share a line: `ranks
    0-7: 0.69`.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(ends):
        if ends[rank].shown:
            by_text.setdefault(ends[rank].shown, []).append(rank)
    found = []
    for text, ranks in by_text.items():
        word = "rank" if len(ranks) == 1 else "ranks"
        gap = "\n" if "\n" in text else " "
        found.append(f"{word} {','.join(ranges(ranks))}:{gap}{text}")
    return found

"""The state of a run, of its nodes and of its ranks. Nouns only: fold.py makes them from events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distmagic.remote.wire import protocol
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.phases import NODE_PHASES, GangState, NodePhase, RankPhase, RunPhase
from distmagic.state.series import Point as Point  # noqa: PLC0414 - one of the state's nouns
from distmagic.state.series import Series as Series  # noqa: PLC0414


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One host in this run. `phase` is one of `NODE_PHASES`; ended: torchrun is over, clear: no process is left.

    `hostname` is the host's own name for itself ("" before its agent runs), `host` what the user typed, `address` what
    the others dial. `unusable`: why the host can't take part, "" if it can. `sent_bytes` of `total_bytes` of the payload
    have been sent there, both 0 where nothing needed sending. `code` is torchrun's exit code.
    `survivors`: processes that could not be ended. `gang`: what the other nodes know of it, "joined", "silent" (never
    heard), "lost" or ""; `stopping`: why its agent ends its ranks, "" while it doesn't. `broken`: why there is no
    connection just now, "" with one;
    `broken_at_s`: since when. `accused_at_s`: since when others say that they don't hear it, while it says nothing.
    """

    node_rank: int
    host: str
    phase: NodePhase = "connecting"
    hostname: str = ""
    address: str = ""
    unusable: str = ""
    sent_bytes: int = 0
    total_bytes: int = 0
    code: int | None = None
    reason: str = ""
    survivors: tuple[str, ...] = ()
    broken: str = ""
    broken_at_s: float = 0.0
    gang: GangState = ""
    stopping: StopReason | Literal[""] = ""
    accused_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One rank. `phase`: starting, running, done, failed, stopped (ended by us) or lost (with its node).

    `rate` is in steps a second (of `report`, else of the outermost bar), `eta_s` in seconds; None where unknown.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    phase: RankPhase = "starting"
    restart: int = 0
    pid: int = 0
    device: str = ""
    step: float | None = None
    total: float | None = None
    bars: tuple[protocol.Bar, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    at_s: float = 0.0
    rate: float | None = None
    ended: protocol.Ended | None = None
    exit: protocol.Exit | None = None

    @property
    def label(self) -> str:
        """`rank 3 (gpu-b, local_rank 1)`, as every message writes a rank."""
        return f"rank {self.rank} ({self.host}, local_rank {self.local_rank})"

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate."""
        step, total = self.progress
        if self.phase != "running" or not self.rate or step is None or total is None:
            return None
        return max(0.0, (total - step) / self.rate)

    @property
    def progress(self) -> tuple[float | None, float | None]:
        """(done, total) of `report`, else of the outermost bar; None where unknown."""
        if self.step is not None:
            return self.step, self.total
        return (self.bars[0].n, self.bars[0].total) if self.bars else (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line of output. `rank` -1 is torchrun's own; `label` is as shown: `rank 3 gpu-b`."""

    rank: int
    label: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """Where the ranks said they are when they were asked, by rank; since `at_s`. `nodes` have told of all their ranks."""

    request_id: str
    at_s: float
    stacks: Mapping[int, protocol.Stacks] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All that is known of a run.

    `workers` and `series` are keyed by rank, `series` then by metric. `lines` are the last `KEPT_LINES` of output,
    `open_lines` the unfinished ones, keyed by (rank, node_rank, stream); `lines_seen` counts all lines ever.
    `first_failure` is the rank that failed first, by arrival (one that only lost its peer gives way to that peer),
    `failed_node` the node whose torchrun did, before any stop. `stopping` is the reason of a stop, "" before one.
    `culprit` is the node because of which the nodes stop, where they found out among themselves. `detached_by`: why
    the job needs no notebook any more, "asked" or "disconnected", "" where it does. An elastic job goes on with
    `min_nodes` nodes. `abandoned` says why it ended before it had begun, "" if it did not. `started_at_s`: when the first
    node was told to start, None before. `lost` are (node_rank, why), `unreached` the nodes that can't dial the endpoint,
    with the endpoint and why. `advanced_at_s`: when a rank advanced last (see `hangs.is_hung`), before any stop;
    `stack_dumps`: the last few roll calls. It had run for `before_s` when this kernel began to follow it.
    `rdzv_round` is the last round of the rendezvous of which a rank has been heard.
    """

    job: str
    nodes: tuple[NodeState, ...]
    workers: Mapping[int, WorkerState] = field(default_factory=dict)
    world_size: int = 0
    series: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    lines: tuple[OutputLine, ...] = ()
    lines_seen: int = 0
    open_lines: Mapping[tuple[int, int, str], str] = field(default_factory=dict)
    first_failure: int | None = None
    first_failure_at_s: float = 0.0
    failed_node: int | None = None
    notices: tuple[str, ...] = ()
    stopping: StopReason | Literal[""] = ""
    abandoned: str = ""
    started_at_s: float | None = None
    lost: tuple[tuple[int, str], ...] = ()
    unreached: Mapping[int, str] = field(default_factory=dict)
    endpoint_open_at_s: float | None = None
    at_s: float = 0.0
    max_restarts: int = 0
    min_nodes: int = 0
    rdzv_round: int = 0
    culprit: int | None = None
    detached_by: str = ""
    advanced_at_s: float = 0.0
    stack_dumps: tuple[StackDump, ...] = ()
    before_s: float = 0.0

    @property
    def lost_nodes(self) -> frozenset[int]:
        """The nodes that are lost."""
        return frozenset(node for node, _ in self.lost)

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on when a node is lost."""
        return 0 < self.min_nodes < len(self.nodes)

    @property
    def essential(self) -> tuple[NodeState, ...]:
        """The nodes that decide how the run ends: all, or in an elastic one those that were not lost. The lead always.

        Nor one that came too late to have a rank: its torchrun fails when the others have ended.
        """
        if not self.is_elastic:
            return self.nodes
        lost = self.lost_nodes
        there = [n for n in self.nodes if n.node_rank == 0 or (n.node_rank not in lost and n.stopping != "lost")]
        at_work = [n for n in there if n.node_rank == 0 or n.code in (None, 0) or n.node_rank in self.at_work]
        return tuple(at_work if len(at_work) >= self.min_nodes else there)

    @property
    def at_work(self) -> set[int]:
        """The nodes that have, or had, a rank."""
        return {worker.node_rank for worker in self.workers.values()}

    @property
    def is_lost(self) -> bool:
        """Whether so many nodes are lost that there is no job without them."""
        lost = self.lost_nodes
        return bool(lost) and (not self.is_elastic or 0 in lost or len(self.essential) < self.min_nodes)

    @property
    def is_over(self) -> bool:
        """Whether every node is gone, or lost for good, or nothing was ever started."""
        if self.abandoned:
            return True
        lost = self.lost_nodes
        return all(node.phase == "gone" or node.node_rank in lost for node in self.nodes)

    @property
    def phase(self) -> RunPhase:
        """The run in one word."""
        if not self.is_over:
            if self.stopping:
                return "stopping"
            return "running" if any(w.phase != "starting" for w in self.workers.values()) else self._opening
        if self.first_failure is not None:
            return "failed"
        if self.is_lost or self.stopping == "lost":
            return "lost"
        if self.stopping:
            return "failed" if self.stopping == "failed" else "stopped"
        return "done" if all(node.code == 0 for node in self.essential) else "failed"

    @property
    def _opening(self) -> Literal["connecting", "sending", "starting"]:
        """What the node that is least far does, while no node has a rank."""
        last = min((node.phase for node in self.nodes), key=NODE_PHASES.index, default="starting")
        if last in ("connecting", "connected"):
            return "connecting"
        return "sending" if last == "sending" else "starting"

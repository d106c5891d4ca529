"""The state of a run, of its nodes and of its ranks: data only. fold.py makes them from events."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms
from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.phases import (
    NODE_PHASES,
    GangState,
    NodePhase,
    RankPhase,
    RunPhase,
)
from distmagic.state.series import Point as Point  # noqa: PLC0414 - one of the state's nouns
from distmagic.state.series import Series as Series  # noqa: PLC0414

ANY_TERMS = JobTerms(lease_s=60.0)  # the terms of a run that is not planned yet


@frozen
class NodeState:
    """One host in this run. The package's docstring has the phases, and the events that cause them.

    host          its name as the user typed it
    hostname      its own hostname, "" before its agent runs
    address       the address to which the other nodes connect
    unusable      why the host can't take part, "" if it can
    waits_for     the devices that the run waits for, and the job that has them; "" while it waits
                  for none
    sent_bytes    how many of the `total_bytes` of the payload were sent; both 0 if the host lacked
                  nothing
    code          torchrun's exit code, None before its end
    reason        why the agent ended, in its own words; "done" after a successful run, "" before
    survivors     processes that could not be ended
    broken        why the connection is broken, since `broken_at_s`; "" while it is not
    gang          its state at the other nodes, by heartbeats
    is_agent_gone whether its host reported that its agent ended without a last event
    stopping      why its agent ends its ranks, "" while it doesn't; `culprit` is the node that
                  caused it, or None
    accused_at_s  since when the other nodes receive no heartbeat, while it sends no event either;
                  else None
    hardware      the last measurement of the host's load, None before the first one
    gpu_peaks     peak memory use of each GPU, in the order of local ranks' GPU numbers; 0 if
                  unknown
    gpus_idle_s   for how long all GPUs of its ranks have been idle, up to the last measurement at
                  `looked_at_s`

    All times are seconds since the start of the run, by the notebook's clock.
    """

    node_rank: int
    host: str
    phase: NodePhase = "connecting"
    hostname: str = ""
    address: str = ""
    unusable: str = ""
    waits_for: str = ""
    sent_bytes: int = 0
    total_bytes: int = 0
    code: int | None = None
    reason: str = ""
    survivors: tuple[str, ...] = ()
    broken: str = ""
    broken_at_s: float = 0.0
    gang: GangState = ""
    stopping: StopReason | Literal[""] = ""
    culprit: int | None = None
    accused_at_s: float | None = None
    hardware: protocol.Hardware | None = None
    gpu_peaks: tuple[int, ...] = ()
    gpus_idle_s: float = 0.0
    looked_at_s: float = 0.0
    is_agent_gone: bool = False

    @property
    def is_heard(self) -> bool:
        """Whether the other nodes receive its heartbeats, as far as known: it runs, even if the
        notebook lost it.
        """
        return self.gang == "joined" and not self.is_agent_gone

    @property
    def is_reached(self) -> bool:
        """Whether this notebook has received an event of the node's agent, and has a connection to
        it now.
        """
        return bool(self.hostname) and not self.broken

    @property
    def was_met(self) -> bool:
        """Whether this notebook has, or has had, a connection to its agent; False if the node was
        never started.
        """
        return bool(self.hostname or self.broken)


@frozen
class WorkerState:
    """One rank, as the latest events of its node describe it.

    round         the round of the rendezvous in which the rank was started
    restart       how often torchrun had restarted the rank
    step, total   as the rank reported them; None if it didn't
    bars          open progress bars, outermost first; if all are closed, the last one, after
                  `bars_before` others
    metrics       the latest value of each metric; `has_printed`: they were read from printed lines
    at_s          time of its last report, in seconds since the start of the rank
    advanced_at_s when its step or a bar last moved, by the notebook's clock; before that, its start
    rate          steps per second (of `report`, else of the outermost bar); None if unknown
    is_idle       it stays, and waits for the next cell
    ended         how the rank ended, as itself or its agent saw it
    exit          how its process ended, as torchrun saw it
    left          its calls and stacks, if one of its collective calls failed
    has_lost_peer a library wrote to its stderr that a peer was gone
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    phase: RankPhase = "starting"
    round: int = 0
    restart: int = 0
    pid: int = 0
    device: str = ""
    step: float | None = None
    total: float | None = None
    bars: tuple[protocol.Bar, ...] = ()
    bars_before: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_printed: bool = False
    at_s: float = 0.0
    advanced_at_s: float = 0.0
    rate: float | None = None
    is_idle: bool = False
    ended: protocol.Ended | None = None
    exit: protocol.Exit | None = None
    left: protocol.Stacks | None = None
    has_lost_peer: bool = False

    @property
    def gpu(self) -> int | None:
        """The CUDA index of the rank's GPU among the GPUs that ranks of its host can use; None
        without a GPU.
        """
        kind, _, number = self.device.partition(":")
        return int(number) if kind == "cuda" and number.isdecimal() else None

    @property
    def label(self) -> str:
        """`rank 3 (gpu-b, local_rank 1)`, the form in all messages."""
        return f"rank {self.rank} ({self.host}, local_rank {self.local_rank})"

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end at the current rate."""
        step, total = self.progress
        if self.phase != "running" or not self.rate or step is None or total is None:
            return None
        return max(0.0, (total - step) / self.rate)

    @property
    def progress(self) -> tuple[float | None, float | None]:
        """(done, total) of `report`, else of the outermost bar; None if unknown.

        A closed bar says nothing about a rank that is still running: it may have been for
        preparation.
        """
        if self.step is not None:
            return self.step, self.total
        if self.bars and (self.phase == "done" or not self.bars[0].closed):
            return self.bars[0].n, self.bars[0].total
        return None, None


@frozen
class OutputLine:
    """One line of output.

    `rank` -1 is torchrun itself; `label` is the label shown with it: `rank 3 gpu-b`.
    """

    rank: int
    label: str
    stream: str
    text: str


@frozen
class ShownPicture:
    """A picture that a rank showed at `step`: `png` is the base64 of a PNG that a page can draw."""

    rank: int
    host: str
    step: float | None
    png: str


@frozen
class StackDump:
    """The answers to one request for stacks."""

    at_s: float  # when the first answer came
    stacks: Mapping[int, protocol.Stacks] = field(default_factory=dict)  # by rank
    nodes: Collection[int] = ()  # those that have answered for all their ranks


@frozen
class RunState:
    """All data about a run. The package's docstring lists the fields that only occur together.

    workers             by rank
    series              points of metrics, by rank and then by name of the metric
    lines               the last lines of output of all ranks; `lines_seen` counts all lines so far
    pictures            the last pictures that ranks showed
    open_lines          unfinished lines, by (rank, node_rank, stream); rank -1 is torchrun
    first_failure       the rank whose failure arrived first, at `first_failure_at_s`
    failed_node         the node whose torchrun failed first, before any stop; None for none
    notices             messages for the user that are no failures, one line each
    stopping            the reason of the stop, "" until the run is stopped
    culprit             the node that made the other nodes stop, if they decided it among themselves
    abandoned           why the run ended before it had started on all hosts, "" for any other run
    started_at_s        when the first node's agent was started, None before
    lost                the reason of each lost node, by node_rank
    unreached           nodes that can't connect to the rendezvous endpoint; endpoint and reason
    endpoint_open_at_s  when the lead opened the endpoint of the rendezvous, None before
    terms               the settings of the job; the requested settings until the plan is made
    rdzv_round          the last round of the rendezvous
    chose_port          whether the plan chose the port of the rendezvous; unknown after `attach`
    detached_by         why the job no longer needs a notebook: "asked" or "disconnected"; "" while
                        it needs one
    advanced_at_s       when a rank last advanced (see `progress.is_hung`); a stop freezes this time
    reaching_since_s    when a node was last reached while no other one was; 0 before the first
    stack_dumps         the answers to the last few requests for stacks, by the ID of the request
    paused              the ranks that wait for the user's input
    paused_s            the total time during which any rank waited so
    resumed_at_s        when a rank last resumed after such a wait; 0 before the first
    wanted_stacks       the ID of the user's last request for stacks, "" before the first
    name                the user's name for the run (--name), "" if it has none
    began_unix_s        start of the run, in seconds since 1970 by the notebook's clock; 0 if
                        unknown
    began_up_s          start of the run in seconds since boot (`processes.up_s`), a clock that
                        nobody can set
    before_s            age of the job in seconds when this kernel started to follow it
    variable            name of the notebook's variable for the run, for messages
    cell                number of the cell whose state this is, on ranks that stay; 0 for any other
                        run
    logged              what detailed logs show of a node's network, by (node_rank, kind); only with
                        --debug
    seen_unix_s         when this notebook stopped following the run, in seconds since 1970; 0 while
                        it follows

    Times are seconds since the start of the run, or since this kernel started to follow it, by the
    notebook's clock.
    """

    job: str
    nodes: tuple[NodeState, ...]
    workers: Mapping[int, WorkerState] = field(default_factory=dict)
    world_size: int = 0
    series: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    lines: tuple[OutputLine, ...] = ()
    lines_seen: int = 0
    pictures: tuple[ShownPicture, ...] = ()
    open_lines: Mapping[tuple[int, int, str], str] = field(default_factory=dict)
    first_failure: int | None = None
    first_failure_at_s: float = 0.0
    failed_node: int | None = None
    notices: tuple[str, ...] = ()
    stopping: StopReason | Literal[""] = ""
    abandoned: str = ""
    started_at_s: float | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    unreached: Mapping[int, str] = field(default_factory=dict)
    endpoint_open_at_s: float | None = None
    at_s: float = 0.0
    terms: JobTerms = ANY_TERMS
    rdzv_round: int = 0
    culprit: int | None = None
    detached_by: str = ""
    advanced_at_s: float = 0.0
    reaching_since_s: float = 0.0
    stack_dumps: Mapping[str, StackDump] = field(default_factory=dict)
    before_s: float = 0.0
    chose_port: bool = False
    paused: Mapping[int, protocol.Paused] = field(default_factory=dict)
    paused_s: float = 0.0
    resumed_at_s: float = 0.0
    wanted_stacks: str = ""
    name: str = ""
    began_unix_s: float = 0.0
    began_up_s: float = 0.0
    variable: str = "run"
    seen_unix_s: float = 0.0
    cell: int = 0
    logged: Mapping[tuple[int, str], str] = field(default_factory=dict)

    @property
    def host_names(self) -> dict[str, str]:
        """The user's name of each host, by all names and addresses of the host."""
        return {
            name: node.host
            for node in self.nodes
            for name in (node.host, node.hostname, node.address)
            if name
        }

    @property
    def there(self) -> tuple[NodeState, ...]:
        """The nodes that are neither gone nor lost."""
        lost = self.lost
        return tuple(
            node
            for node in self.nodes
            if node.phase != "gone" and node.node_rank not in lost
        )

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go during the run, even while it has only as many as it
        needs.
        """
        return self.terms.is_elastic

    @property
    def essential(self) -> tuple[NodeState, ...]:
        """The nodes that decide how the run ends: all nodes, or some of an elastic run.

        The lead is always one. In an elastic run a lost node does not count. Neither does one that
        joined too late to have a rank: its torchrun fails when the others have ended.
        """
        if not self.is_elastic:
            return self.nodes
        lost = self.lost
        had_ranks = self.at_work
        lead, *members = self.nodes
        there = [lead]
        at_work = [lead]
        for node in members:
            if node.node_rank not in lost and node.stopping != "lost":
                there.append(node)
                if node.code in (None, 0) or node.node_rank in had_ranks:
                    at_work.append(node)
        return tuple(at_work if len(at_work) >= self.terms.min_nodes else there)

    @property
    def at_work(self) -> set[int]:
        """The nodes that have, or had, a rank."""
        return {worker.node_rank for worker in self.workers.values()}

    @property
    def last_dump(self) -> StackDump | None:
        """The answers to the last request for stacks; None if there are none."""
        return next(reversed([*self.stack_dumps.values()]), None)

    @property
    def running(self) -> list[WorkerState]:
        """The ranks that run."""
        return [one for one in self.workers.values() if one.phase == "running"]

    @property
    def is_lost(self) -> bool:
        """Whether so many nodes are lost that the job can't continue."""
        lost = self.lost
        if not lost:
            return False
        # Nodes that only this notebook can't reach run on.
        heard = [node for node in lost if self.nodes[node].is_heard]
        there = len(self.essential) + len(heard)
        return not self.is_elastic or 0 in lost or there < self.terms.min_nodes

    @property
    def is_over(self) -> bool:
        """Whether every node is gone or lost for good, or nothing was ever started."""
        return bool(self.abandoned) or not self.there

    @property
    def phase(self) -> RunPhase:
        """The phase of the run."""
        if not self.is_over:
            if self.stopping:
                return "stopping"
            if any(worker.phase != "starting" for worker in self.workers.values()):
                return "running"
            return self._phase_before_ranks
        if self.first_failure is not None:
            return "failed"
        if self.is_lost or self.stopping == "lost":
            return "lost"
        if self.stopping:
            return "failed" if self.stopping == "failed" else "stopped"
        return "done" if all(node.code == 0 for node in self.essential) else "failed"

    @property
    def _phase_before_ranks(self) -> RunPhase:
        if any(node.waits_for for node in self.nodes):
            return "waiting"
        # The phase of the slowest node.
        least = min(
            (node.phase for node in self.nodes),
            key=NODE_PHASES.index,
            default="starting",
        )
        if least in ("connecting", "connected"):
            return "connecting"
        return "sending" if least == "sending" else "starting"

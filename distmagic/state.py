"""The state of a run, folded from events. Pure: everything that changes what a user sees is in this file.

    Events  --fold-->  RunState  --render-->  text, HTML, widgets

`fold` takes a batch, so that a thousand ranks at 10 Hz cost one copy of the tables a batch and not one an event.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from distmagic.remote import protocol

KEPT_LINES = 400  # lines of output kept in memory, of all ranks together
KEPT_POINTS = 2000  # points of one metric of one rank; every second one is dropped when it is full
KEPT_LINE_CHARS = 2000

ALIVE = ("starting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One host in this run. `phase`: connecting, starting, running, ended (torchrun is over), clear (no process is left), gone.

    `hostname` is the host's own name for itself, `host` what the user typed. `code` is torchrun's exit code.
    `survivors`: processes that could not be ended.
    """

    node_rank: int
    host: str
    phase: str = "connecting"
    hostname: str = ""
    code: int | None = None
    reason: str = ""
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One rank. `phase`: starting, running, done, failed or stopped (ended by us).

    `rate` is in steps a second (of `report`, else of the outermost bar), `eta_s` in seconds; None where unknown.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    phase: str = "starting"
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
class Line:
    """One line of output. `rank` -1 is torchrun's own; `label` is as shown: `rank 3 gpu-b`."""

    rank: int
    label: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric: seconds since the rank started, the step if it was told, the value."""

    at_s: float
    step: float | None
    value: float


Series = tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Event of the launcher: the connection to a node, or its agent, is gone."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Event of the launcher: a node's agent has said all and is gone, and what is wanted of it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Event of the launcher: what a lost agent had left running on a node was ended, but for `survivors`."""

    survivors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Event of the launcher: the job is being stopped; `reason` is "interrupted", "failed", "timeout" or words."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: on which node, when by the notebook's clock (seconds since the run began), what.

    None is the clock's own: nothing happened, but time has passed.
    """

    node_rank: int
    at_s: float
    what: protocol.Message | Lost | Swept | Gone | Stopping | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All that is known of a run.

    `workers` and `series` are keyed by rank, `series` then by metric. `lines` are the last `KEPT_LINES` of output,
    `open_lines` the unfinished ones, keyed by (rank, node_rank, stream). `first_failure` is the rank that failed
    first, by arrival. `stopping` is the reason of a stop, "" before one. `lines_seen` counts all lines ever.
    """

    job: str
    nodes: tuple[NodeState, ...]
    workers: Mapping[int, WorkerState] = field(default_factory=dict)
    world_size: int = 0
    series: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    lines: tuple[Line, ...] = ()
    lines_seen: int = 0
    open_lines: Mapping[tuple[int, int, str], str] = field(default_factory=dict)
    first_failure: int | None = None
    notices: tuple[str, ...] = ()
    stopping: str = ""
    lost: tuple[tuple[int, str], ...] = ()
    unreached: Mapping[int, str] = field(default_factory=dict)
    endpoint_open_at_s: float | None = None
    at_s: float = 0.0
    max_restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Whether every node is gone, or lost for good."""
        lost = {node for node, _ in self.lost}
        return all(node.phase == "gone" or node.node_rank in lost for node in self.nodes)

    @property
    def phase(self) -> str:
        """starting, running, stopping, done, failed, stopped or lost: the run in one word."""
        if not self.is_over:
            if self.stopping:
                return "stopping"
            return "running" if any(w.phase == "running" for w in self.workers.values()) else "starting"
        if self.first_failure is not None:
            return "failed"
        if self.lost:
            return "lost"
        if self.stopping:
            return "stopped"
        return "done" if all(node.code == 0 for node in self.nodes) else "failed"


def begin(job: str, hosts: Iterable[str], max_restarts: int = 0, notices: tuple[str, ...] = ()) -> RunState:
    """Return the state of a run of which nothing is known but its hosts."""
    nodes = tuple(NodeState(node_rank=i, host=host) for i, host in enumerate(hosts))
    return RunState(job=job, nodes=nodes, max_restarts=max_restarts, notices=notices)


def fold(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after `events`."""
    draft = _Draft(state)
    for event in events:
        draft.at_s = max(draft.at_s, event.at_s)
        handler = _HANDLERS.get(type(event.what))
        if handler is not None and 0 <= event.node_rank < len(draft.nodes):
            handler(draft, event.node_rank, event.what)
    return draft.freeze()


class _Draft:
    """A mutable copy of a state, alive within one call of `fold`."""

    def __init__(self, state: RunState) -> None:
        self.base = state
        self.at_s = state.at_s
        self.nodes = list(state.nodes)
        self.workers = dict(state.workers)
        self.world_size = state.world_size
        self.series = {rank: dict(table) for rank, table in state.series.items()}
        self.lines = list(state.lines)
        self.lines_seen = state.lines_seen
        self.open_lines = dict(state.open_lines)
        self.first_failure = state.first_failure
        self.notices = list(state.notices)
        self.stopping = state.stopping
        self.lost = list(state.lost)
        self.unreached = dict(state.unreached)
        self.endpoint_open_at_s = state.endpoint_open_at_s

    def freeze(self) -> RunState:
        return replace(
            self.base, at_s=self.at_s, nodes=tuple(self.nodes), workers=self.workers, world_size=self.world_size,
            series=self.series, lines=tuple(self.lines[-KEPT_LINES:]), lines_seen=self.lines_seen,
            open_lines=self.open_lines, first_failure=self.first_failure, notices=tuple(self.notices),
            stopping=self.stopping, lost=tuple(self.lost), unreached=self.unreached,
            endpoint_open_at_s=self.endpoint_open_at_s,
        )  # fmt: skip

    def label(self, rank: int, node_rank: int) -> str:
        host = self.nodes[node_rank].host
        return f"rank {rank} {host}" if rank >= 0 else f"torchrun {host}"

    def write(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        """Fold carriage returns and keep whole lines; the rest waits in `open_lines`."""
        key = (rank, node_rank, stream)
        *whole, rest = (self.open_lines.pop(key, "") + text.replace("\r\n", "\n")).split("\n")
        for line in whole:
            self.add_line(rank, node_rank, stream, line)
        rest = rest if rest.endswith("\r") else rest.rpartition("\r")[2]
        if rest:
            self.open_lines[key] = rest[-KEPT_LINE_CHARS:]
        if len(self.lines) > 4 * KEPT_LINES:
            del self.lines[:-KEPT_LINES]

    def add_line(self, rank: int, node_rank: int, stream: str, text: str) -> None:
        shown = text.rstrip("\r").rpartition("\r")[2][:KEPT_LINE_CHARS]
        self.lines.append(Line(rank=rank, label=self.label(rank, node_rank), stream=stream, text=shown))
        self.lines_seen += 1

    def close_lines(self, rank: int, node_rank: int) -> None:
        for key in [key for key in self.open_lines if key[:2] == (rank, node_rank)]:
            self.add_line(rank, node_rank, key[2], self.open_lines.pop(key))


def _hello(draft: _Draft, node: int, what: protocol.Hello) -> None:
    draft.nodes[node] = replace(draft.nodes[node], phase="starting", hostname=what.hostname)


def _worker(draft: _Draft, node: int, what: protocol.Worker) -> None:
    draft.nodes[node] = replace(draft.nodes[node], phase="running")
    draft.world_size = what.world_size
    for rank in [rank for rank in draft.workers if rank >= what.world_size]:
        del draft.workers[rank]  # an elastic job has shrunk
    draft.workers[what.rank] = WorkerState(
        rank=what.rank, local_rank=what.local_rank, node_rank=node, host=draft.nodes[node].host, phase="running",
        restart=what.restart, pid=what.pid, device=what.device,
    )  # fmt: skip
    if draft.first_failure == what.rank:
        draft.first_failure = None  # torchrun started it again


def _progress(draft: _Draft, node: int, what: protocol.Progress) -> None:
    worker = draft.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    bars = _merge_bars(worker.bars, what.bars)
    metrics = worker.metrics
    for row in what.rows:
        metrics = {**metrics, **row.metrics}
        _add_points(draft.series.setdefault(what.rank, {}), row)
    new = replace(
        worker, at_s=what.at_s, bars=bars, metrics=metrics, device=what.device or worker.device,
        step=worker.step if what.step is None else what.step,
        total=worker.total if what.total is None else what.total,
    )  # fmt: skip
    draft.workers[what.rank] = replace(new, rate=_rate(worker, new))


def _merge_bars(old: tuple[protocol.Bar, ...], new: tuple[protocol.Bar, ...]) -> tuple[protocol.Bar, ...]:
    """Return the open bars, outermost first; if all are closed, the last one of them."""
    table = {bar.id: bar for bar in (*old, *new)}
    merged = tuple(table[key] for key in sorted(table))
    return tuple(bar for bar in merged if not bar.closed) or merged[-1:]


def _rate(old: WorkerState, new: WorkerState) -> float | None:
    """Steps a second, smoothed over about 10 updates; the bar's own rate where there is no step."""
    if new.step is None:
        return new.bars[0].rate if new.bars else None
    if old.step is None or new.step <= old.step or new.at_s <= old.at_s:
        return new.step / new.at_s if old.step is None and new.at_s > 0 else old.rate
    now = (new.step - old.step) / (new.at_s - old.at_s)
    return now if old.rate is None else 0.8 * old.rate + 0.2 * now


def _add_points(table: dict[str, Series], row: protocol.Row) -> None:
    for name, value in row.metrics.items():
        series = (*table.get(name, ()), Point(at_s=row.at_s, step=row.step, value=value))
        table[name] = series[::2] + series[-1:] if len(series) > KEPT_POINTS else series


def _output(draft: _Draft, node: int, what: protocol.Output) -> None:
    if what.skipped_bytes:
        note = f"... {what.skipped_bytes:,} bytes not shown; the whole log: run.logs({what.rank})"
        draft.close_lines(what.rank, node)
        draft.add_line(what.rank, node, what.stream, note)
    draft.write(what.rank, node, what.stream, what.text)


def _ended(draft: _Draft, node: int, what: protocol.Ended) -> None:
    worker = draft.workers.get(what.rank)
    if worker is None or worker.node_rank != node or worker.restart != what.restart:
        return
    draft.close_lines(what.rank, node)
    phase = _end_phase(draft, what)
    draft.workers[what.rank] = replace(worker, phase=phase, ended=what)
    if phase == "failed" and draft.first_failure is None:
        draft.first_failure = what.rank


def _end_phase(draft: _Draft, what: protocol.Ended) -> str:
    if what.outcome == "returned" or (what.outcome == "exited" and what.code == 0):
        return "done"
    by_torchrun = draft.first_failure is not None and what.outcome == "signalled" and what.code == -signal.SIGTERM
    return "stopped" if draft.stopping or by_torchrun else "failed"


def _engine_ended(draft: _Draft, node: int, what: protocol.Engineended) -> None:
    draft.nodes[node] = replace(draft.nodes[node], phase="ended", code=what.code)
    for exit_ in what.exits:
        worker = draft.workers.get(exit_.rank)
        if worker is not None and worker.node_rank == node:
            draft.workers[exit_.rank] = replace(worker, exit=exit_)


def _endpoint(draft: _Draft, node: int, what: protocol.Endpoint) -> None:
    if what.state == "open":
        draft.endpoint_open_at_s = draft.at_s
    elif what.state == "unreached":
        draft.unreached[node] = what.detail
    else:
        draft.unreached.pop(node, None)


def _notice(draft: _Draft, node: int, what: protocol.Notice) -> None:
    draft.notices.append(f"{draft.nodes[node].host}: {what.text}")


def _final(draft: _Draft, node: int, what: protocol.Final) -> None:
    old = draft.nodes[node]
    draft.nodes[node] = replace(old, phase="clear", reason=what.reason, survivors=what.survivors)
    draft.close_lines(-1, node)
    for rank, worker in draft.workers.items():
        if worker.node_rank == node:
            draft.close_lines(rank, node)
            if worker.phase in ALIVE:
                draft.workers[rank] = replace(worker, phase="stopped")


def _gone(draft: _Draft, node: int, what: Gone) -> None:
    draft.nodes[node] = replace(draft.nodes[node], phase="gone")


def _lost(draft: _Draft, node: int, what: Lost) -> None:
    draft.lost.append((node, what.why))
    for rank, worker in draft.workers.items():
        if worker.node_rank == node and worker.phase in ALIVE:
            draft.workers[rank] = replace(worker, phase="lost")


def _swept(draft: _Draft, node: int, what: Swept) -> None:
    draft.nodes[node] = replace(draft.nodes[node], phase="clear", survivors=what.survivors)


def _stopping(draft: _Draft, node: int, what: Stopping) -> None:
    draft.stopping = draft.stopping or what.reason


_HANDLERS = {
    protocol.Hello: _hello,
    protocol.Worker: _worker,
    protocol.Progress: _progress,
    protocol.Output: _output,
    protocol.Ended: _ended,
    protocol.Engineended: _engine_ended,
    protocol.Endpoint: _endpoint,
    protocol.Notice: _notice,
    protocol.Final: _final,
    Gone: _gone,
    Lost: _lost,
    Swept: _swept,
    Stopping: _stopping,
}

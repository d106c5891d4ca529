"""Evaluates a profile of all ranks: one merged trace, where their time goes, and how long they wait
for each other.

Times in a trace are microseconds since a date in the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distmagic.remote.frozen import frozen
from distmagic.render import quantities as q
from distmagic.render.table import aligned
from distmagic.render.text_width import cut_middle, plain

TraceEvent = Mapping[str, Any]
Trace = Mapping[str, Any]

_MOST_OPS = 10
_MOST_RANKS = 16
_NAME = 60  # columns
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_FLOWS = 10**10  # limit of flow IDs of one rank
_STREAMS = 10**9  # larger than IDs of threads


@frozen
class Op:
    """One kind of operation: its own time and number of calls, per rank and step; and its slowest
    rank.
    """

    name: str
    ms: float
    calls: float
    slowest: int
    slowest_ms: float


@frozen
class RankWait:
    """How long a rank is in collective calls in one step, and how much of that it waits for later
    ranks.

    `last` is the number of calls in which it is the last one.
    """

    rank: int
    calls_ms: float
    waits_ms: float
    last: int


@frozen
class Profile:
    """A profile of running ranks.

    `path` is the trace, for https://ui.perfetto.dev; `notes` list what it lacks.
    """

    path: Path
    steps: int
    ops: tuple[Op, ...]
    waits: tuple[RankWait, ...]
    hosts: Mapping[int, str]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [["operation", "ms", "calls", "slowest"]]
        for op in self.ops:
            slowest = f"rank {op.slowest} ({op.slowest_ms:.2f} ms)"
            name = cut_middle(plain(op.name), _NAME)
            rows.append([name, f"{op.ms:.2f}", f"{op.calls:g}", slowest])
        lines = [
            f"The longest operations in one step, the mean of all ranks and of {q.plural(self.steps, 'step')}:",
            aligned(rows),
        ]
        if self.waits:
            rows = [
                [
                    "rank",
                    "host",
                    "ms in calls",
                    "ms of waiting",
                    "calls to which it came last",
                ]
            ]
            for one in self.waits[:_MOST_RANKS]:
                rows.append(
                    [
                        str(one.rank),
                        plain(self.hosts.get(one.rank, "")),
                        f"{one.calls_ms:.2f}",
                        f"{one.waits_ms:.2f}",
                        str(one.last),
                    ]
                )
            lines += [
                "",
                "Ranks in the collective calls of one step, those first that the others wait for:",
                aligned(rows),
            ]
        return "\n".join(
            [*lines, "", *self.notes, f"https://ui.perfetto.dev opens {self.path}."]
        )


def merged(traces: Mapping[int, Trace], hosts: Mapping[int, str]) -> dict[str, Any]:
    """Return one trace of all ranks: one process for each, whose pid is its rank, with its threads
    and streams.
    """
    bases = {rank: _base_us(trace) for rank, trace in traces.items()}
    first = min(bases.values(), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        name = f"rank {rank} ({hosts.get(rank, '')})"
        for kind, value in (("name", name), ("sort_index", rank)):
            about = {"name": f"process_{kind}", "args": {kind: value}}
            events.append({"ph": "M", "pid": rank, **about})
        events += _of_rank(rank, trace, bases[rank] - first)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _base_us(trace: Trace) -> float:
    return float(trace.get("baseTimeNanoseconds", 0)) / 1000


def _of_rank(rank: int, trace: Trace, later_us: float) -> Iterator[dict[str, Any]]:
    found = trace["traceEvents"]
    own = next((one["pid"] for one in found if one.get("cat") == "cpu_op"), None)
    for one in found:
        about = str(one.get("name", "")).startswith("process_")
        # An event whose pid is a word belongs to no thread: the recorded window.
        if about or not isinstance(one.get("pid"), int):
            continue
        event = {**one, "pid": rank}
        if one["pid"] != own and isinstance(one.get("tid"), int):
            event["tid"] = one["tid"] + _STREAMS + 1000 * one["pid"]
        if "ts" in one:
            event["ts"] = one["ts"] + later_us
        if isinstance(one.get("id"), int):
            event["id"] = one["id"] + rank * _FLOWS
        yield event


def longest(traces: Mapping[int, Trace], steps: int) -> tuple[Op, ...]:
    """Return the ten slowest kinds of operations, without nested calls; on GPUs if there are
    any.
    """
    us: dict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    calls: Counter[str] = Counter()
    events = [one for trace in traces.values() for one in trace["traceEvents"]]
    on_gpu = any(one.get("cat") in _ON_GPU for one in events)
    kinds = _ON_GPU if on_gpu else ("cpu_op",)
    for rank, trace in traces.items():
        found = [one for one in trace["traceEvents"] if one.get("cat") in kinds and "dur" in one]  # fmt: skip
        # The unfinished operations of each thread or stream, innermost last.
        unfinished: dict[tuple[Any, Any], list[TraceEvent]] = defaultdict(list)
        for one in sorted(found, key=lambda one: (one["ts"], -one["dur"])):
            outer = unfinished[one["pid"], one["tid"]]
            while outer and outer[-1]["ts"] + outer[-1]["dur"] <= one["ts"]:
                outer.pop()
            if outer:
                # Kernels of one stream may overlap: the second one ends later then.
                left_us = outer[-1]["ts"] + outer[-1]["dur"] - one["ts"]
                us[outer[-1]["name"]][rank] -= min(one["dur"], left_us)
            us[one["name"]][rank] += one["dur"]
            calls[one["name"]] += 1
            outer.append(one)
    ops = []
    for name, own_us in us.items():
        by_rank = {rank: max(0.0, one) for rank, one in own_us.items()}
        slowest = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
        ops.append(
            Op(
                name=name,
                ms=sum(by_rank.values()) / len(traces) / steps / 1000,
                calls=round(calls[name] / len(traces) / steps, 1),
                slowest=slowest,
                slowest_ms=by_rank[slowest] / steps / 1000,
            )
        )
    return tuple(sorted(ops, key=lambda op: (-op.ms, op.name))[:_MOST_OPS])


def waits(traces: Mapping[int, Trace], steps: int) -> tuple[RankWait, ...]:
    """Return how long ranks wait for each other in collective calls, starting with the rank for
    which others wait most.

    The time of the last rank is that of the call itself; the others wait meanwhile.
    """
    if len(traces) < 2:
        return ()
    calls_us: defaultdict[int, float] = defaultdict(float)
    waits_us: defaultdict[int, float] = defaultdict(float)
    last: Counter[int] = Counter()
    made = {rank: _collectives(trace) for rank, trace in traces.items()}
    for name in set.intersection(*map(set, made.values())):
        # No call ends anywhere before all ranks have started it: an earlier end belongs to a step
        # that some ranks left out.
        begun_us = max(found[name][0][0] for found in made.values())
        rows = []
        for rank, found in made.items():
            rows.append(
                [(end - begin, rank) for begin, end in found[name] if end >= begun_us]
            )
        for call in zip(*rows, strict=False):
            least_us, latest = min(call)
            last[latest] += 1
            for took_us, rank in call:
                calls_us[rank] += took_us
                waits_us[rank] += took_us - least_us
    found_waits = [
        RankWait(
            rank=rank,
            calls_ms=calls_us[rank] / steps / 1000,
            waits_ms=waits_us[rank] / steps / 1000,
            last=last[rank],
        )
        for rank in calls_us
    ]
    return tuple(sorted(found_waits, key=lambda one: (one.waits_ms, one.rank)))


def _collectives(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Return start and end of the calls of each kind: NCCL kernels, and operations of gloo's
    threads.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    base = _base_us(trace)
    for one in trace["traceEvents"]:
        name = one.get("name", "")
        is_nccl = one.get("cat") == "kernel" and name.startswith("nccl")
        if "dur" in one and (is_nccl or name.startswith("gloo:")):
            found[name].append((base + one["ts"], base + one["ts"] + one["dur"]))
    return {name: sorted(times) for name, times in found.items()}

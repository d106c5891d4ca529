"""Section start: from the cell's start to the last rank's first user line and to the cell's end, on 2 hosts x 2 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distmagic.request import flag_parser
from tests.bench import contestants, peers
from tests.bench.bench import FOLDER, Bench
from tests.bench.contestants import Contestant, Place, Took
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.lab import Lab

TITLE = "Starting: 2 hosts x 2 ranks over SSH"
_FRESH, _KEPT = (
    "fresh processes each time",
    "processes that are there already, and keep their state",
)
_OTHERS = {
    "torchrunx": (
        contestants.torchrunx,
        f"2 hosts; {_FRESH}; it needs a shared file system and calls the notebook back",
    ),
    "accelerate": (
        contestants.accelerate,
        "one host (it knows no other), 4 ranks, forks of the notebook's own process",
    ),
    "ipyparallel": (
        contestants.ipyparallel,
        f"2 hosts; {_KEPT}; starting its engines is not counted",
    ),
    "nbdistributed": (
        contestants.nbdistributed,
        f"one host (it knows no other), 4 ranks; {_KEPT}; starting them is not counted",
    ),
}
_ROUND_TRIP = "a line to a host and back over ssh"
# What each way to start could not go below on this machine, and why.
_FLOORS = {
    "cold": (
        "torch's imports alone",
        contestants.imports_and_ranks,
        "its floor: a process on each host imports torch, and then two more, over ssh; nothing runs",
    ),
    "first cell": (
        "one import of torch",
        contestants.imports,
        "its floor: a process on each host imports torch, over ssh; nothing runs",
    ),
    "warm": (
        "forks alone",
        contestants.forks,
        "its floor: a Python with torch on each host reads a line and forks two ranks; no torchrun, no log, no view",
    ),
}
# Of "ssh + torchrun by hand": until the first user line, and until the end.
_TARGETS = {"cold": (0.95, 0.80), "first cell": (0.28, 0.28), "warm": (0.035, 0.035)}


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Run every tool once a round."""
    took: dict[str, list[Took]] = {}
    tools = peers.install(FOLDER / "peers")
    reasons = dict(tools.missing)
    with scratch("start") as folder, Lab(2) as lab, contextlib.ExitStack() as stack:
        place = Place(lab=lab, folder=folder, peers=tools)
        stack.enter_context(_name_notebook(place))
        field = dict(_field(stack, place, reasons))
        for number in range(bench.rounds_dear + 1):
            for name, run in field.items():
                # The first round only warms the caches.
                _one(bench, took if number else {}, reasons, name, run)
            _distmagic(bench, took if number else {}, place)
    return _rows(took, reasons)


@contextlib.contextmanager
def _name_notebook(place: Place) -> Iterator[None]:
    names = {host.name: host.address for host in place.lab.hosts}
    with contestants.own_name(place.lab.address, names, place.folder) as line:
        for host in place.lab.hosts:
            host.exec(["sh", "-c", f"printf '{line}' >>/etc/hosts"]).check_returncode()
        yield


def _field(
    stack: contextlib.ExitStack, place: Place, reasons: dict[str, str]
) -> Iterator[tuple[str, Contestant]]:
    yield "by hand", stack.enter_context(contestants.by_hand(place))
    yield _ROUND_TRIP, stack.enter_context(contestants.round_trip(place))
    for name, make, _ in _FLOORS.values():
        yield name, stack.enter_context(make(place))
    for name, (make, _) in _OTHERS.items():
        if name in reasons:
            continue
        try:
            yield name, stack.enter_context(make(place))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            reasons[name] = _said(error)


def _one(
    bench: Bench,
    took: dict[str, list[Took]],
    reasons: dict[str, str],
    name: str,
    run: Contestant,
) -> None:
    if name in reasons:
        return
    try:
        found = run()
    except Exception as error:
        if name == "by hand":
            raise
        reasons[name] = _said(error)
        bench.say(f"start: {name}: {reasons[name]}")
        return
    bench.say(
        f"start: {name}: first line {found.first_s:.2f} s, end {found.end_s:.2f} s"
    )
    took.setdefault(name, []).append(found)


def _said(error: Exception) -> str:
    return (
        f"not measured: {type(error).__name__}: {' '.join(str(error).split())[-400:]}"
    )


def _distmagic(bench: Bench, took: dict[str, list[Took]], place: Place) -> None:
    if "--cold" in flag_parser.flag_names():
        with contestants.own_kernel(place) as (_, run):
            _one(bench, took, {}, "cold", lambda: run("--cold"))
    with contestants.own_kernel(place) as (kernel, run):
        _one(bench, took, {}, "first cell", run)
        kernel.run(contestants.READING)
        _one(bench, took, {}, "warm", run)
    with contestants.staying(place) as next_cell:
        _one(bench, took, {}, "next cell", next_cell)


def _rows(
    took: dict[str, list[Took]], reasons: dict[str, str]
) -> tuple[MetricRow, ...]:
    rows: list[MetricRow] = []
    for number, (what, seconds, next_s) in enumerate((("first user line", _first, 0.02), ("end of the cell", _end, 0.05))):  # fmt: skip
        figures = {name: tuple(map(seconds, found)) for name, found in took.items()}
        for mode, limits in _TARGETS.items():
            note = (
                "" if mode in figures else "this version has no cold start of its own"
            )
            rows.append(
                MetricRow(what=f"{what}, {mode}", unit="s", ours=figures.get(mode, ()), against="ssh + torchrun by hand",
                    theirs=figures["by hand"], target=Target(limit=limits[number]), note=note)
            )  # fmt: skip
        for mode, (name, _, about) in _FLOORS.items():
            rows.append(
                MetricRow(what=f"{what}, {mode}", unit="s", ours=figures.get(mode, ()), against=name,
                    theirs=figures.get(name, ()), note="; ".join(part for part in (about, reasons.get(name, "")) if part))
            )  # fmt: skip
        for name, (_, about) in _OTHERS.items():
            is_end_of_forks = name == "accelerate" and number == 1
            target = Target(limit=1.3) if is_end_of_forks else None
            note = "; ".join(part for part in (about, reasons.get(name, "")) if part)
            rows.append(
                MetricRow(what=f"{what}, warm", unit="s", ours=figures["warm"], against=name, theirs=figures.get(name, ()),
                    target=target, note=note)
            )  # fmt: skip
        # The others whose processes are there already.
        for name in (_ROUND_TRIP, "ipyparallel", "nbdistributed"):
            limit = Target(limit=next_s, of="ours") if name == _ROUND_TRIP else None
            rows.append(
                MetricRow(what=f"{what}, next cell of ranks that stay", unit="s", ours=figures["next cell"],
                    against=name, theirs=figures.get(name, ()), target=limit, note=reasons.get(name, ""))
            )  # fmt: skip
    return tuple(rows)


def _first(took: Took) -> float:
    return took.first_s


def _end(took: Took) -> float:
    return took.end_s

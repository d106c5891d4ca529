"""Section many: hosts that only wait. Connect to all, learn their facts, start a job there, and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.bench import REPOSITORY, Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import scratch
from tests.bench.many_notebook import Took
from tests.lab import wait_until

TITLE = "Many hosts that take a second to answer"
_COUNTS = (128, 512)
# What a host takes, and by how much many of them may take longer than the slowest one.
_WAIT_S, _MORE_S = (1.0, 2.0)
_ABOUT = (
    "another process plays the hosts from a recording, over unix sockets in place of SSH: what counts is that no host "
    "waits for another; what SSH costs is not in it"
)


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Launch on many hosts: first those whose log-in takes a second, then those that take one for each answer."""
    rows: list[MetricRow] = []
    with scratch("many") as folder:
        with simulated_hosts(folder / "log-in", log_in_s=_WAIT_S, answer_s=0.0) as path:
            for count in _COUNTS:
                rows += _slow_log_ins(count, launches(bench, path, count))
        with simulated_hosts(
            folder / "answer", log_in_s=_WAIT_S, answer_s=_WAIT_S
        ) as path:
            two = launches(bench, path, 2)
            for count in _COUNTS:
                rows += _slow_answers(count, launches(bench, path, count), two)
    return tuple(rows)


def _slow_log_ins(count: int, found: list[Took]) -> tuple[MetricRow, ...]:
    hosts = f"{count} hosts whose log-in takes 1 s"

    def row(what: str, unit: str, figure: Callable[[Took], float]) -> MetricRow:
        return MetricRow(
            what=f"{hosts}, {what}", unit=unit, ours=_each(found, figure), note=_ABOUT
        )

    begun = _each(found, _begun_s)
    target = Target(limit=_WAIT_S + _MORE_S, of="ours")
    return (
        MetricRow(
            what=f"{hosts}: connect, facts, start",
            unit="s",
            ours=begun,
            target=target,
            note=_ABOUT,
        ),
        row(
            "CPU of the notebook's side, a host",
            "ms",
            lambda took: 1e3 * took.cpu_s / count,
        ),
        row(
            "memory of the notebook's side, a host",
            "kB",
            lambda took: 1024 * took.grown_mb / count,
        ),
    )


def _slow_answers(
    count: int, found: list[Took], two: list[Took]
) -> tuple[MetricRow, ...]:
    hosts = f"{count} hosts that take 1 s for each answer"
    rows = []
    for what, figure in (("connect, facts, start", _begun_s), ("stop", _stopped_s)):
        slowest = statistics.median(_each(two, figure))
        longer = tuple(seconds - slowest for seconds in _each(found, figure))
        target = Target(limit=_MORE_S, of="ours")
        name = f"{hosts}, longer than two of them: {what}"
        rows.append(
            MetricRow(what=name, unit="s", ours=longer, target=target, note=_ABOUT)
        )
    return tuple(rows)


def _begun_s(took: Took) -> float:
    return took.begun_s


def _stopped_s(took: Took) -> float:
    return took.stopped_s


def _each(found: list[Took], figure: Callable[[Took], float]) -> tuple[float, ...]:
    return tuple(map(figure, found))


def launches(bench: Bench, path: Path, hosts: int) -> list[Took]:
    """Launch once a round, each in a notebook's process of its own."""
    found = []
    argv = [sys.executable, "-m", "tests.bench.many_notebook", str(path), str(hosts)]
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "DISTMAGIC_HOME": str(path.parent / "home"),
    }
    for number in range(bench.rounds_dear):
        done = subprocess.run(
            argv,
            env=env,
            cwd=path.parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        found.append(Took(**json.loads(done.stdout)))
        bench.say(f"many: {path.name}: {hosts} hosts, round {number + 1}: {found[-1]}")
    return found


@contextlib.contextmanager
def simulated_hosts(path: Path, *, log_in_s: float, answer_s: float) -> Iterator[Path]:
    """Have a process play hosts at the socket `path`."""
    argv = [
        sys.executable,
        "-m",
        "tests.bench.many_server",
        str(path),
        str(log_in_s),
        str(answer_s),
    ]
    server = subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdin=subprocess.PIPE
    )
    assert server.stdin is not None
    try:
        wait_until(path.exists, "the simulated hosts")
        yield path
    finally:
        server.stdin.close()  # it ends then
        server.wait()

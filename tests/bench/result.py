"""Section result: a return value of 1 GB comes back from one host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import distmagic
from distmagic.request.access import Access
from tests.bench import links, loops
from tests.bench.bench import Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.bench.screens import Silent
from tests.lab import Lab

TITLE = "A result of 1 GB back from a host"
_SIZE_BYTES = 1_000_000_000
_TARGET = Target(limit=1.0)


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Fetch by distmagic and by scp in turn, on loopback's speed and then over 1 Gbit/s."""
    rows: list[MetricRow] = []
    with scratch("result") as folder, kept_in(folder / "home"), Lab(1) as lab:
        host = lab.hosts[0]
        run = distmagic.run(
            loops.large,
            _SIZE_BYTES,
            hosts=host.name,
            access=Access(ssh_config=str(lab.ssh_config)),
            screen=Silent(),
            nproc_per_node=1,
        )
        (host.home / "data").write_bytes(os.urandom(_SIZE_BYTES))
        os.sync()
        for speed, shaped in (
            ("unshaped", contextlib.nullcontext),
            ("1 Gbit/s", lambda: links.slow_host(host)),
        ):
            try:
                with shaped():
                    rows += _at_speed(bench, lab, folder, speed, run)
            except links.CannotShape as error:
                rows.append(
                    MetricRow(
                        what=f"a result of 1 GB, {speed}",
                        unit="s",
                        ours=(),
                        target=_TARGET,
                        note=str(error),
                    )
                )
    return tuple(rows)


def _at_speed(
    bench: Bench, lab: Lab, folder: Path, speed: str, run: distmagic.Run
) -> Iterator[MetricRow]:
    ours, theirs = [], []
    for number in range(bench.rounds_dear):
        ours.append(_ours(run))
        theirs.append(_scp(lab, folder))
        bench.say(
            f"result, {speed}, round {number + 1}: {ours[-1]:.1f} s; scp {theirs[-1]:.1f} s"
        )
    yield MetricRow(
        what=f"a result of 1 GB, {speed}", unit="s", ours=tuple(ours), against="scp", theirs=tuple(theirs),
        target=_TARGET,
    )  # fmt: skip


def _ours(run: distmagic.Run) -> float:
    run.results.clear()  # else it is there already
    began = time.monotonic()
    value = run.results[0]
    took_s = time.monotonic() - began
    assert value[-1] == _SIZE_BYTES // 8 - 1
    return took_s


def _scp(lab: Lab, folder: Path) -> float:
    target, began = folder / "data", time.monotonic()
    subprocess.run(
        [
            "scp",
            "-q",
            "-F",
            str(lab.ssh_config),
            f"{lab.hosts[0].name}:data",
            str(target),
        ],
        check=True,
    )
    took_s = time.monotonic() - began
    target.unlink()
    return took_s

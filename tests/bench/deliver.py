"""Section deliver: 1 GB from the notebook to 4 hosts, the first time and again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import distmagic
from distmagic.connection.link import Link
from distmagic.request.access import Access
from distmagic.runner.delivery import Delivery
from tests.bench import links
from tests.bench.bench import Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.bench.screens import Silent
from tests.lab import Lab

TITLE = "1 GB to 4 hosts"
_HOSTS, _SIZE_BYTES = 4, 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One delivery: seconds, and GB out of the notebook."""

    seconds: float
    gigabytes: float


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Send by distmagic and by four scp in turn, on loopback's speed and then over 1 Gbit/s."""
    rows: list[MetricRow] = []
    with scratch("deliver") as folder, kept_in(folder / "home"), Lab(_HOSTS) as lab:
        for speed, limit, shaped in (
            ("unshaped", 0.9, contextlib.nullcontext),
            ("1 Gbit/s", 0.3, lambda: links.slow_notebook(lab)),
        ):
            try:
                with shaped():
                    rows += _at_speed(bench, lab, folder, speed, Target(limit=limit))
            except links.CannotShape as error:
                rows.append(
                    MetricRow(
                        what=f"1 GB to {_HOSTS} hosts, {speed}",
                        unit="s",
                        ours=(),
                        target=Target(limit=limit),
                        note=str(error),
                    )
                )
    return tuple(rows)


def _at_speed(
    bench: Bench, lab: Lab, folder: Path, speed: str, target: Target
) -> Iterator[MetricRow]:
    first, again, theirs, checked = [], [], [], []
    for number in range(min(3, bench.rounds_dear)):
        _empty(lab, folder)
        data = os.urandom(_SIZE_BYTES)
        first.append(_ours(lab, data))
        again.append(_ours(lab, data))
        _empty(lab, folder)
        theirs.append(_scp(lab, folder, data))
        _empty(lab, folder)
        checked.append(_checked(lab, folder, data))
        bench.say(
            f"deliver, {speed}, round {number + 1}: {first[-1].seconds:.1f} s, {first[-1].gigabytes:.2f} GB; "
            f"again {again[-1].seconds:.2f} s; scp {theirs[-1].seconds:.1f} s, {theirs[-1].gigabytes:.2f} GB; with a check {checked[-1]:.1f} s"
        )
    against = f"{_HOSTS} x scp in parallel"
    seconds, their_seconds = (
        tuple(each.seconds for each in found) for found in (first, theirs)
    )
    yield MetricRow(
        what=f"1 GB to {_HOSTS} hosts, {speed}", unit="s", ours=seconds, against=against, theirs=their_seconds,
        target=target,
    )  # fmt: skip
    yield MetricRow(
        what=f"... and each host has checked its SHA-256, {speed}", unit="s", ours=seconds,
        against=f"{_HOSTS} x `ssh HOST 'tee data | sha256sum'` in parallel", theirs=tuple(checked),
        note="as ours, which checks what arrives; scp does not",
    )  # fmt: skip
    yield MetricRow(
        what=f"... bytes out of the notebook, {speed}", unit="GB", ours=tuple(each.gigabytes for each in first),
        against=against, theirs=tuple(each.gigabytes for each in theirs), target=Target(limit=1.1, of="ours"),
    )  # fmt: skip
    yield MetricRow(
        what=f"the same 1 GB again, {speed}", unit="s", ours=tuple(each.seconds for each in again), against=against,
        theirs=their_seconds,
    )  # fmt: skip
    yield MetricRow(
        what=f"... bytes out of the notebook, again, {speed}", unit="MB",
        ours=tuple(1e3 * each.gigabytes for each in again), target=Target(limit=1, of="ours"),
        note="all that the notebook sends from the start of the cell to its end, SSH's and TCP's own share included",
    )  # fmt: skip


def _empty(lab: Lab, folder: Path) -> None:
    """Remove what the hosts and the notebook have kept, and have the disk take what was written."""
    for path in (
        folder / "home" / "blobs",
        *(host.home / ".distmagic" / "blobs" for host in lab.hosts),
    ):
        shutil.rmtree(path, ignore_errors=True)
    for host in lab.hosts:
        (host.home / "data").unlink(missing_ok=True)
    os.sync()


def _ours(lab: Lab, data: bytes) -> Sent:
    """Run a cell with 1 GB among its arguments; return the seconds between the plan and the last host's having it."""
    hosts = ",".join(host.name for host in lab.hosts)
    before = lab.sent_bytes()
    with _watched() as watch:
        run = distmagic.run(
            len, data, hosts=hosts, access=Access(ssh_config=str(lab.ssh_config)), screen=Silent(), nproc_per_node=1,
            payload_limit_bytes=2 << 30,
        )  # fmt: skip
        assert run.results[_HOSTS - 1] == _SIZE_BYTES
    return Sent(
        seconds=watch.began_starting - watch.began,
        gigabytes=(lab.sent_bytes() - before) / 1e9,
    )


class _Watch:
    """When the payload's delivery began, and when the first agent was started: all hosts have it then."""

    began = began_starting = 0.0


@contextlib.contextmanager
def _watched() -> Iterator[_Watch]:
    watch, deliver, start = _Watch(), Delivery.run, Link.start

    def note_delivery(self: Delivery) -> None:
        watch.began = time.monotonic()
        deliver(self)

    def note_start(self: Link, *args: object) -> None:
        watch.began_starting = watch.began_starting or time.monotonic()
        start(self, *args)  # type: ignore[arg-type]

    Delivery.run, Link.start = note_delivery, note_start  # type: ignore[method-assign,assignment]
    try:
        yield watch
    finally:
        Delivery.run, Link.start = deliver, start  # type: ignore[method-assign]


def _checked(lab: Lab, folder: Path, data: bytes) -> float:
    source = folder / "data"
    source.write_bytes(data)
    os.sync()
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        copies = [
            subprocess.Popen(
                ["ssh", "-F", str(lab.ssh_config), host.name, "tee data | sha256sum"],
                stdin=opened.enter_context(source.open("rb")),
                stdout=subprocess.DEVNULL,
            )
            for host in lab.hosts
        ]
        codes = [copy.wait() for copy in copies]
    assert not any(codes), codes
    seconds = time.monotonic() - began
    source.unlink()
    return seconds


def _scp(lab: Lab, folder: Path, data: bytes) -> Sent:
    source = folder / "data"
    source.write_bytes(data)
    os.sync()
    before, began = lab.sent_bytes(), time.monotonic()
    copies = [
        subprocess.Popen(
            ["scp", "-q", "-F", str(lab.ssh_config), str(source), f"{host.name}:data"]
        )
        for host in lab.hosts
    ]
    codes = [copy.wait() for copy in copies]
    assert not any(codes), codes
    sent = Sent(
        seconds=time.monotonic() - began,
        gigabytes=(lab.sent_bytes() - before) / 1e9,
    )
    source.unlink()
    return sent

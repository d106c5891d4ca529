"""The lab's links, made as slow as a real network."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

from tests.lab import Lab, LabHost

GIGABIT = "1gbit"
_TC = "/usr/sbin:/sbin:/usr/bin:/bin"
_SHAPE = ("root", "tbf", "rate", GIGABIT, "burst", "256kb", "latency", "50ms")


class CannotShape(RuntimeError):
    """There is nothing here to shape traffic with; the text says what was seen."""


@contextlib.contextmanager
def slow_notebook(lab: Lab) -> Iterator[None]:
    """Let the notebook send at most 1 Gbit/s, to all hosts together; what hosts say to each other is not slowed."""
    with _shaped((), lab._bridge):
        yield


@contextlib.contextmanager
def slow_host(host: LabHost) -> Iterator[None]:
    """Let a host send at most 1 Gbit/s."""
    with _shaped(("nsenter", "--target", str(host._pid()), "--net", "--"), "eth0"):
        yield


@contextlib.contextmanager
def _shaped(where: tuple[str, ...], device: str) -> Iterator[None]:
    _tc(where, "replace", device, *_SHAPE)
    try:
        yield
    finally:
        _tc(where, "del", device, "root")


def _tc(where: tuple[str, ...], what: str, device: str, *more: str) -> None:
    argv = [*where, "env", f"PATH={_TC}", "tc", "qdisc", what, "dev", device, *more]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotShape(f"{' '.join(argv[len(where) + 2 :])}: {done.stderr.strip()}")

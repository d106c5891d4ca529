"""The lab's links, made as slow as a real network, and the bytes that went over them."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator

from tests.lab import Lab, LabHost
from tests.system.components import COMPONENTS

GIGABIT = "1gbit"
_TC = "/usr/sbin:/sbin:/usr/bin:/bin"
_SHAPE = ("root", "tbf", "rate", GIGABIT, "burst", "256kb", "latency", "50ms")


class CannotShape(RuntimeError):
    """There is nothing here to shape traffic with; the text says what was seen."""


@contextlib.contextmanager
def slow_notebook(lab: Lab) -> Iterator[None]:
    """Let the notebook send at most 1 Gbit/s, to all hosts together; what hosts say to each other is not slowed."""
    with _shaped((), _bridge(lab)):
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


def sent_bytes(lab: Lab) -> int:
    """Return how many bytes the notebook's card has sent so far, packets' heads and SSH's share included."""
    argv = [
        COMPONENTS["ip"].path() or "ip",
        "-json",
        "-statistics",
        "link",
        "show",
        "dev",
        _bridge(lab),
    ]
    # /sys shows another network.
    (found,) = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return int(found["stats64"]["tx"]["bytes"])


def _bridge(lab: Lab) -> str:
    return lab._bridge

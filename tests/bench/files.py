"""Section files: a folder of many files to 4 hosts, whole and after one file has changed, beside rsync."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import distmagic
from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.session import spreading
from tests.bench.bench import Bench
from tests.bench.figures import MetricRow, Target
from tests.bench.folders import kept_in, scratch
from tests.bench.screens import Silent
from tests.lab import Lab

TITLE = "Folders of many files to 4 hosts"
_HOSTS = 4
_WHOLE, _WHOLE_BYTES = 2000, 100_000
_CHANGED, _CHANGED_BYTES = 20_000, 1000
_A_FOLDER = 200  # files
_AGAIN = f"{_CHANGED:,} files to {_HOSTS} hosts again after one has changed, unshaped"
_OURS, _RSYNC = "ours", f"{_HOSTS} x rsync in parallel"
_SHARED = f"{_RSYNC}, over connections of OpenSSH that are open"
_WAYS = (_OURS, _RSYNC, _SHARED)


def measure(bench: Bench) -> tuple[MetricRow, ...]:
    """Send by `%distributed put --all` and by four rsync in turn, on loopback's speed.

    Ours uses the connections of a cell that has run. rsync connects anew, as by hand, or uses connections that are open.
    """
    with (
        scratch("files") as folder, kept_in(folder / "home"), Lab(_HOSTS) as lab, _shared(lab, folder) as client,
    ):  # fmt: skip
        names = ",".join(host.name for host in lab.hosts)
        distmagic.run(os.getpid, hosts=names, access=_access(lab), screen=Silent(), nproc_per_node=1)  # fmt: skip
        whole = _whole(bench, lab, client, _made(folder / "whole", _WHOLE, _WHOLE_BYTES))  # fmt: skip
        again = _changed(bench, lab, client, _made(folder / "changed", _CHANGED, _CHANGED_BYTES))  # fmt: skip
    return (
        _row(f"{_WHOLE:,} files of {_WHOLE_BYTES // 1000} kB to {_HOSTS} hosts, unshaped", whole, _RSYNC),
        _row(_AGAIN, again, _RSYNC),
        _row(_AGAIN, again, _SHARED),
    )  # fmt: skip


def _row(what: str, found: dict[str, list[float]], against: str) -> MetricRow:
    return MetricRow(
        what=what, unit="s", ours=tuple(found[_OURS]), against=against, theirs=tuple(found[against]),
        target=Target(limit=1.0) if against == _RSYNC else None, note="" if _has_rsync() else "rsync is not installed",
    )  # fmt: skip


def _made(folder: Path, count: int, size_bytes: int) -> Path:
    for number in range(count):
        file = folder / f"{number // _A_FOLDER:03}" / f"{number:05}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size_bytes))
    return folder


def _whole(bench: Bench, lab: Lab, client: str, source: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(min(3, bench.rounds_dear)):
        for way in _WAYS:
            for host in lab.hosts:
                shutil.rmtree(host.home / source.name, ignore_errors=True)
            os.sync()
            found[way] += _sent(lab, client, source, way)
        bench.say(f"files, round {number + 1}: {_last(found)}")
    return found


def _changed(
    bench: Bench, lab: Lab, client: str, source: Path
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    _put(lab, source)
    for number in range(bench.rounds_dear):
        for way in _WAYS:
            (source / "000" / "00000.bin").write_bytes(os.urandom(_CHANGED_BYTES))
            found[way] += _sent(lab, client, source, way)
        bench.say(f"files, one changed, round {number + 1}: {_last(found)}")
    return found


def _last(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{way} {took_s[-1]:.2f} s" for way, took_s in found.items() if took_s)  # fmt: skip


def _sent(lab: Lab, client: str, source: Path, way: str) -> Iterator[float]:
    """Yield how many seconds it took, if the way is there."""
    if way == _OURS:
        yield _put(lab, source)
    elif _has_rsync():
        yield _rsync(
            lab, client if way == _SHARED else f"ssh -F {lab.ssh_config}", source
        )


def _has_rsync() -> bool:
    return shutil.which("rsync") is not None


def _put(lab: Lab, source: Path) -> float:
    hosts = parse_hosts(",".join(host.name for host in lab.hosts))
    began = time.monotonic()
    with contextlib.closing(NotebookAsker(can_ask=False)) as asker:
        spreading.put(session().reach(hosts, _access(lab), asker), [source], "~")
    return time.monotonic() - began


def _access(lab: Lab) -> Access:
    return Access(ssh_config=str(lab.ssh_config))


@contextlib.contextmanager
def _shared(lab: Lab, folder: Path) -> Iterator[str]:
    """Keep a connection of OpenSSH to each host; return the client that uses it."""
    client = f"ssh -F {lab.ssh_config} -o ControlPath={folder}/%n"
    for host in lab.hosts:
        argv = [*shlex.split(client), "-o", "ControlMaster=yes", "-fN", host.name]
        subprocess.run(argv, check=True)
    try:
        yield client
    finally:
        for host in lab.hosts:
            subprocess.run([*shlex.split(client), "-O", "exit", host.name], check=True)


def _rsync(lab: Lab, client: str, source: Path) -> float:
    began = time.monotonic()
    copies = [
        subprocess.Popen(["rsync", "-a", "-e", client, str(source), f"{host.name}:"])
        for host in lab.hosts
    ]
    codes = [copy.wait() for copy in copies]
    assert not any(codes), codes
    return time.monotonic() - began

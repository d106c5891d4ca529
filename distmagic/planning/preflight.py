"""Checks hosts before anything is started. Pure.

Each check raises `PreflightError`, which names the host and the cure. `check` also returns
warnings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from distmagic.errors import ConnectionLost, PreflightError
from distmagic.remote.records import places
from distmagic.remote.wire.protocol import Facts
from distmagic.request.command_prefix import (
    ENVIRONMENT,
    NO_ENVIRONMENT,
    SETUP_FAILED,
)
from distmagic.request.hosts import pasted

_START_UP_FILES = (
    "Move exec, exit and commands that read input below this test for a terminal:\n"
    "  case $- in *i*) ;; *) return;; esac\n"
)
OLDEST_PYTHON = (3, 10)  # minimum version on hosts
Version = tuple[int, ...]
# A host's name, and the min and max seconds by which its clock is ahead of a common one.
Clock = tuple[str, float, float]
CLOCKS_APART_S = 2.0  # a larger difference means that a clock is wrong


def no_python(
    host: str, python: str, code: int | None, stderr: str, by_hand: str, exec_prefix: str
) -> ConnectionLost | PreflightError:  # fmt: skip
    """Return the error for an interpreter that ended before it wrote anything to stdout.

    `code` is its exit code, None if unknown; `by_hand` is a command to start another interpreter on
    the host. `exec_prefix` is the program that should have started it, "" for none.
    """
    words = f": {stderr[-500:]}" if stderr else ""
    if code == SETUP_FAILED:
        return PreflightError(
            host, f"its --setup failed{words}.", f"Try it by hand: {by_hand}"
        )
    _, is_no_environment, looked_at = stderr.partition(NO_ENVIRONMENT)
    if code == 127 and is_no_environment:
        name = python.removeprefix(ENVIRONMENT)
        return PreflightError(
            host,
            f"there is no environment {name}. These places were tried:{looked_at[:1000]}.",
            f"Name its folder on that host: --python {host}={ENVIRONMENT}/path/to/environment. %distributed env sync makes one.",
        )
    started = f"{exec_prefix} {python}".strip()
    is_shells_answer = code in (126, 127)
    if code in (None, 1) and "not found" in stderr.lower():  # 1: csh
        is_shells_answer = True
    if is_shells_answer and not exec_prefix:
        answer = stderr[-300:] or f"exit code {code}"
        return PreflightError(
            host,
            f"there is no {python} (the host reported: {answer}).",
            f"Name its Python, one that has torch: --python {host}=/path/to/python",
        )
    if code is None:
        return ConnectionLost(
            f"{host}: the connection ended before {started} had printed anything{words}."
        )
    argv = (*shlex.split(exec_prefix), python, "-m", "site")
    command = " ".join(pasted(by_hand, word) for word in argv)
    return PreflightError(
        host,
        f"{started} ended before it printed anything (exit code {code}{words}).",
        f"Try by hand: {by_hand} {command}",
    )


def shell_in_the_way(host: str, what: str, by_hand: str) -> PreflightError:
    """Return the error for a log-in shell that never runs the given command."""
    return PreflightError(
        host,
        f"its log-in shell {what}: a start-up file such as ~/.bashrc is in the way.",
        f"{_START_UP_FILES}It is right when this prints ok: {by_hand} echo ok",
    )


def check_oldest_python(host: str, found: Version, executable: str) -> None:
    """Raise `PreflightError` for a Python too old for distmagic's code on hosts."""
    if found[:2] < OLDEST_PYTHON:
        raise PreflightError(
            host,
            f"Python {_dots(found)} ({executable}); hosts need Python {_dots(OLDEST_PYTHON)} or a later one.",
            f"Name another Python on that host: --python {host}=/path/to/python",
        )


def check_python(host: str, found: Version, ours: Version, executable: str) -> None:
    """Raise `PreflightError` unless both Pythons have the same minor version, for a host that joins
    a running job.

    The job's payload was packed for its first hosts: as byte code, if all of them had this
    notebook's version.
    """
    if found[:2] != ours[:2]:
        wanted = _dots(ours[:2])
        raise PreflightError(
            host,
            f"Python {_dots(found)} ({executable}), but the job needs Python {wanted}: it sent its functions as byte "
            "code to its first hosts.",
            f"Name a Python {wanted} on that host: --python {host}=/path/to/python{wanted}",
        )


def _dots(version: Version) -> str:
    return ".".join(map(str, version))


def check_system(host: str, system: str) -> None:
    """Raise `PreflightError` unless the host is a Linux machine."""
    if not system.startswith("linux"):
        raise PreflightError(
            host,
            f"runs {system}; hosts of distmagic are Linux machines.",
            "Name Linux hosts: %distributed hosts gpu-a:4. Or run Jupyter in a Linux container on this machine.",
        )


def not_writable(host: str, folder: str, why: str) -> PreflightError:
    """Return the error for a directory of distmagic in which the host can't write a file."""
    cure = "Make room or make it writable, or set DISTMAGIC_HOME on the host to a directory elsewhere."
    if "[Errno 27]" in why:  # EFBIG
        cure = "Raise the limit of file sizes: write `ulimit -f unlimited` at the start of ~/.bashrc on that host (an administrator may have to allow it)."
    return PreflightError(host, f"can't write to {folder}: {why}.", cure)


def check(host: str, facts: Facts, local_torch: str | None) -> tuple[str, ...]:
    """Return warnings about possible problems of a host. Raises `PreflightError` for certain ones.

    `local_torch` is the version of torch on this machine, None if it has none (then versions are
    not compared).
    """
    if facts.torch is None:
        raise PreflightError(
            host,
            f"Python {facts.executable} has no torch.",
            f"Install torch on that host, or name a Python that has it: --python {host}=/path/to/python",
        )
    if facts.write_error:
        raise not_writable(host, facts.state_dir, facts.write_error)
    if facts.free_bytes < places.FULL_BYTES:
        raise PreflightError(
            host,
            f"the disk under {facts.state_dir} is full ({facts.free_bytes >> 20} MiB free).",
            "Make room on that disk, or set DISTMAGIC_HOME on the host to a directory on another disk.",
        )
    warnings = []
    theirs, ours = _numbers(facts.torch), _numbers(local_torch or "")
    if theirs and ours and theirs[0] != ours[0]:
        raise PreflightError(
            host,
            f"torch {facts.torch}, but this notebook has torch {local_torch}; tensors and modules don't travel between them.",
            f"Install torch {_dots(ours)} on that host, or name a Python that has it: --python {host}=/path/to/python",
        )
    if theirs and ours and theirs != ours:
        warnings.append(
            f"{host} has torch {facts.torch}, this notebook {local_torch}: modules that travel may not load."
        )
    if facts.logout:
        warnings.append(f"{host}: {facts.logout}")
    return tuple(warnings)


def shared_machines(names: Sequence[str], facts: Sequence[Facts]) -> tuple[str, ...]:
    """Return a warning for each machine that is listed under several names.

    Hosts that have their own directories on the same machine, like those of a playground, are
    intended and get no warning.
    """
    by_machine: dict[tuple[str, str], list[str]] = {}
    for name, one in zip(names, facts, strict=True):
        if one.host_id:
            by_machine.setdefault((one.host_id, one.state_dir), []).append(name)
    return tuple(
        f"{', '.join(same[:-1])} and {same[-1]} are one machine: the ranks of all of them share its devices and memory."
        for same in by_machine.values()
        if len(same) > 1
    )


def clocks_apart(clocks: Sequence[Clock]) -> tuple[str, ...]:
    """Return a warning for each host whose clock differs by more than `CLOCKS_APART_S` from the
    first host's.

    If no clock does, it compares the one that is ahead of all with the one that is behind all.
    """
    found = [_clock_apart(clock, clocks[0]) for clock in clocks[1:]]
    if clocks and not any(found):
        ahead = max(clocks, key=lambda clock: clock[1])
        behind = min(clocks, key=lambda clock: clock[2])
        found = [_clock_apart(ahead, behind)]
    return tuple(warning for warning in found if warning)


def _clock_apart(clock: Clock, other: Clock) -> str:
    """Return the warning for a clock that differs from another one; "" if it may be the same."""
    name, least, most = clock
    other_name, other_least, other_most = other
    if max(least - other_most, other_least - most) <= CLOCKS_APART_S:
        return ""
    ahead_s = (least + most - other_least - other_most) / 2
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"{name}: its clock is {abs(ahead_s):,.0f} s {where} {other_name}'s, and so are times in logs and of files. "
        "On the host that is wrong: sudo timedatectl set-ntp true"
    )


def _numbers(version: str) -> Version:
    """Return (major, minor) of a version, () for an unusual one (torch built from source, a broken
    installation).
    """
    found = re.match(r"([0-9]+)\.([0-9]+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def check_among(names: tuple[str, ...], facts: tuple[Facts, ...]) -> None:
    """Raise `PreflightError` unless all hosts have the same minor version of torch; others may not
    communicate.
    """
    first = ours = ""
    for name, one in zip(names, facts, strict=True):
        version = one.torch or ""
        if not _numbers(version):
            continue
        if not ours:
            first = name
            ours = version
        if _numbers(version) != _numbers(ours):
            raise PreflightError(
                name,
                f"torch {version}, but {first} has torch {ours}; the ranks of one job need the same minor version.",
                "Install the same torch on all hosts, or name Pythons that have it with --python HOST=PATH.",
            )

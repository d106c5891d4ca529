"""Finds faults of a single host. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from distmagic.diagnosis.finding import (
    SHARED_MEMORY,
    Finding,
    Subject,
    Unreached,
    is_loopback,
)
from distmagic.errors import HostError, PreflightError
from distmagic.planning import preflight
from distmagic.remote.records import places

STEPS = ("name", "TCP", "banner", "key", "log-in")  # of an SSH connection, in order
_SMALL_SHM_BYTES = 512 << 20  # Docker's default is 64 MiB
_SMALL_DISK_BYTES = 1 << 30
_FEW_FILES = 1024  # the usual limit at log-in
_LOCKED_BYTES = 1 << 30  # an InfiniBand card needs far less for one rank


def of_error(missed: Unreached) -> Finding:
    """Return a finding with the step of the connection that failed, and the steps that
    succeeded.
    """
    name, error = missed.name, missed.error
    evidence = error.message.removeprefix(f"{name}: ")
    step = error.step if isinstance(error, HostError) else ""
    if step in STEPS:
        fine = [f"{one} ok" for one in STEPS[: STEPS.index(step)]]
        evidence += f" ({', '.join([*fine, f'{step} failed'])})"
    check = step or "connection"
    if isinstance(error, PreflightError):
        check = "disk" if "can't write to" in evidence else "python"
    return Finding("error", name, check, evidence, error.hint)


def findings(subject: Subject, local_torch: str | None) -> Iterator[Finding]:
    """Find faults of one host.

    `local_torch` is this machine's version of torch, None without one.
    """
    yield from _of_facts(subject, local_torch)
    yield from _of_name(subject)
    yield from _of_limits(subject)


def _of_facts(subject: Subject, local_torch: str | None) -> Iterator[Finding]:
    name, facts = subject.name, subject.facts
    try:
        for warning in preflight.check(name, facts, local_torch):
            check = "log-out" if facts.logout and facts.logout in warning else "torch"
            evidence = warning.removeprefix(f"{name}: ")
            yield Finding("warning", name, check, evidence, "")
    except PreflightError as error:
        is_full = facts.free_bytes < places.FULL_BYTES
        has_disk = facts.torch is None or not (facts.write_error or is_full)
        check = "torch" if has_disk else "disk"
        evidence = error.message.removeprefix(f"{name}: ")
        yield Finding("error", name, check, evidence, error.hint)
    else:
        if facts.free_bytes < _SMALL_DISK_BYTES:
            evidence = f"{facts.free_bytes >> 20} MiB are free under {facts.state_dir}."
            cure = f"{subject.by_hand} df -h {subject.pasted(facts.state_dir)}"
            yield Finding("warning", name, "disk", evidence, cure)


def _of_name(subject: Subject) -> Iterator[Finding]:
    own, found = subject.examined.route.address, subject.examined.name_addresses
    wrong = "resolves to no address" if found == () else ""
    if found and all(map(is_loopback, found)):
        wrong = f"resolves to {found[0]}"
    if wrong and not is_loopback(own):
        yield of_own_name(subject, wrong)


def of_own_name(subject: Subject, wrong: str) -> Finding:
    """Return a finding about the name that a host has for itself; `wrong` says to what."""
    name, own = subject.examined.hostname, subject.examined.route.address
    evidence = f"its own name {name} {wrong} on that host. Programs that announce their name are not found by other hosts."
    cure = f"In /etc/hosts on {subject.name}, write this line instead of any other with {name}: {own} {name}"
    return Finding("warning", subject.name, "own name", evidence, cure)


def _of_limits(subject: Subject) -> Iterator[Finding]:
    host, examined = subject.name, subject.examined
    if examined.shm_bytes < _SMALL_SHM_BYTES:
        size = f"has only {examined.shm_bytes >> 20} MiB"
        if examined.shm_bytes < 0:
            size = "is missing"
        evidence = f"{SHARED_MEMORY} {size}: workers of a DataLoader, and NCCL, end with a bus error."
        cure = f"{subject.as_root} mount -o remount,size=8G {SHARED_MEMORY}    # for a container: docker run --shm-size=8g"
        yield Finding("warning", host, SHARED_MEMORY, evidence, cure)
    if 0 <= examined.open_files < _FEW_FILES:
        evidence = f"a process may open only {examined.open_files} files."
        cure = f"In /etc/security/limits.d/files.conf on {host}: * soft nofile 65536    # for a container: docker run --ulimit nofile=65536"
        yield Finding("warning", host, "open files", evidence, cure)
    ports = examined.infiniband if examined.gpus else {}  # only NCCL uses it
    active = [port for port, state in ports.items() if "ACTIVE" in state]
    if active and 0 <= examined.locked_bytes < _LOCKED_BYTES:
        evidence = f"a process may lock only {examined.locked_bytes >> 10} KiB of memory: NCCL can't use {active[0]}."
        cure = f"In /etc/security/limits.d/memlock.conf on {host}: * - memlock unlimited    # for a container: docker run --ulimit memlock=-1"
        yield Finding("error", host, "locked memory", evidence, cure)
    if ports and not active:
        port, state = next(iter(ports.items()))
        evidence = f"no port of InfiniBand is active. The state of {port} is {state!r}: its cable or switch may be off."
        yield Finding("warning", host, "InfiniBand", evidence, f"{subject.by_hand} ibstat")  # fmt: skip

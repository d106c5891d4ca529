"""What is wrong with one host by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from distmagic.diagnosis.finding import SHARED_MEMORY, Finding, Subject
from distmagic.errors import DistmagicError, HostError, PreflightError
from distmagic.planning import preflight
from distmagic.remote.records import places

STEPS = ("name", "TCP", "banner", "key", "log-in")  # of an SSH connection, in order
_SMALL_SHM_BYTES = 512 << 20  # Docker gives 64 MiB where nobody asks for more
_SMALL_DISK_BYTES = 1 << 30
_FEW_FILES = 1024  # what a log-in usually has
_LOCKED_BYTES = 1 << 30  # far more than an InfiniBand card needs for one rank


def findings(subject: Subject, local_torch: str | None) -> list[Finding]:
    """Return what is wrong with one host. `local_torch` is the version of torch on this machine, None for none."""
    if subject.error is not None:
        return [_of_error(subject.name, subject.error)]
    return [
        *_of_facts(subject, local_torch),
        *_of_name(subject),
        *_of_limits(subject),
        *_of_infiniband(subject),
    ]


def _of_error(name: str, error: DistmagicError) -> Finding:
    """Return which step on the way to a host failed, and which ones did not."""
    evidence = error.message.removeprefix(f"{name}: ")
    step = error.step if isinstance(error, HostError) else ""
    if step in STEPS:
        fine = [f"{one} ok" for one in STEPS[: STEPS.index(step)]]
        evidence += f" ({', '.join([*fine, f'{step} failed'])})"
    check = step or ("python" if isinstance(error, PreflightError) else "connection")
    return Finding("error", name, check, evidence, error.hint)


def _of_facts(subject: Subject, local_torch: str | None) -> Iterator[Finding]:
    name, facts = subject.name, subject.facts
    if facts is None:
        return
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
            cure = f"{subject.by_hand} df -h {facts.state_dir}"
            yield Finding("warning", name, "disk", evidence, cure)


def _of_name(subject: Subject) -> Iterator[Finding]:
    examined = subject.examined
    if examined is None or subject.route is None:
        return
    name, own = examined.hostname, subject.route.address
    wrong = ""
    if not examined.name_addresses:
        wrong = "leads to no address"
    elif all(one.startswith("127.") or one == "::1" for one in examined.name_addresses):
        wrong = f"leads to {examined.name_addresses[0]}"
    if wrong and not own.startswith("127."):
        evidence = f"its own name {name} {wrong} there. Programs that announce their name are not found by other hosts."
        cure = f"In /etc/hosts on {subject.name}: {own} {name}"
        yield Finding("warning", subject.name, "own name", evidence, cure)


def _of_limits(subject: Subject) -> Iterator[Finding]:
    examined = subject.examined
    if examined is None:
        return
    if examined.shm_bytes < _SMALL_SHM_BYTES:
        size = f"has only {examined.shm_bytes >> 20} MiB"
        if examined.shm_bytes < 0:
            size = "is missing"
        evidence = f"{SHARED_MEMORY} {size}: workers of a DataLoader, and NCCL, end with a bus error."
        cure = f"{subject.by_hand} sudo mount -o remount,size=8G {SHARED_MEMORY}    # of a container: docker run --shm-size=8g"
        yield Finding("warning", subject.name, SHARED_MEMORY, evidence, cure)
    if 0 <= examined.open_files < _FEW_FILES:
        evidence = f"a process may open only {examined.open_files} files."
        cure = f"In /etc/security/limits.d/files.conf on {subject.name}: * soft nofile 65536"
        yield Finding("warning", subject.name, "open files", evidence, cure)


def _of_infiniband(subject: Subject) -> Iterator[Finding]:
    examined = subject.examined
    if examined is None or not examined.infiniband:
        return
    active = [port for port, state in examined.infiniband.items() if "ACTIVE" in state]
    if active and 0 <= examined.locked_bytes < _LOCKED_BYTES:
        evidence = f"a process may lock only {examined.locked_bytes >> 10} KiB of memory: NCCL can't use {active[0]}."
        cure = f"In /etc/security/limits.d/memlock.conf on {subject.name}: * - memlock unlimited"
        yield Finding("error", subject.name, "locked memory", evidence, cure)
    if not active:
        port, state = next(iter(examined.infiniband.items()))
        evidence = f"no port of InfiniBand is active: {port} is {state}."
        cure = f"{subject.by_hand} ibstat"
        yield Finding("warning", subject.name, "InfiniBand", evidence, cure)

"""Finds faults of a host's GPUs, and of the torch that uses them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from distmagic.diagnosis.finding import MEMORY, Finding, Level, Subject
from distmagic.payload.sizes import plural

_HELD_BYTES = 1 << 30  # displays and the driver use less


def findings(subject: Subject) -> Iterator[Finding]:
    """Find faults of the GPUs of a host that has any."""
    name, examined, torch = subject.name, subject.examined, subject.facts.torch
    if not examined.gpus:
        return
    built, highest = examined.torch_cuda, examined.driver_cuda
    evidence = ""
    if torch and not built:
        evidence = f"it has GPUs ({examined.gpus[0].model}), and its torch {torch} is built for CPUs alone."
    # Within one major version, a driver runs code built for a later minor one.
    elif torch and _major(built) > _major(highest) > 0:
        evidence = f"torch is built for CUDA {built}, and driver {examined.driver} takes CUDA {highest} at most."
    if evidence:
        cure = f"Install a torch for CUDA {highest or 'of this driver'} on that host, or name a Python that has it: --python {name}=/path/to/python"
        # A program may want no GPU, such as that of a display.
        level: Level = "error" if built else "warning"
        yield Finding(level, name, "CUDA of torch", evidence, cure)
    for number in range(len(examined.gpus)):
        yield from _of_device(subject, number)
    if examined.xid:
        evidence = f"the Linux kernel log has a GPU error: Xid {examined.xid}."
        cure = f"{subject.as_root} dmesg -T    # look for Xid, then ask the host's owner to reset the GPU"
        yield Finding("warning", name, "Xid", evidence, cure)


def _major(version: str) -> int:
    """Return the first number of a version, 0 for an invalid one."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _of_device(subject: Subject, number: int) -> Iterator[Finding]:
    name, ask, gpu = subject.name, subject.by_hand, subject.examined.gpus[number]
    root = subject.as_root
    if gpu.ecc_errors:
        evidence = f"GPU {number} has had {plural(gpu.ecc_errors, 'memory error')} that could not be corrected."
        cure = (
            f"{root} nvidia-smi --gpu-reset -i {number}    # when nothing uses that GPU"
        )
        # Since the driver was loaded: the GPU may have replaced that memory meanwhile.
        yield Finding("warning", name, f"ECC of GPU {number}", evidence, cure)
    if gpu.slowed_by:
        evidence = f"GPU {number} runs slower than it could, because of {gpu.slowed_by}."  # fmt: skip
        cure = f"{ask} nvidia-smi -q -i {number} -d PERFORMANCE,TEMPERATURE,POWER"
        yield Finding("warning", name, f"speed of GPU {number}", evidence, cure)
    if gpu.used_bytes > _HELD_BYTES:
        who = ", ".join(gpu.holders) or "processes that the host does not show"
        evidence = f"{gpu.used_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB of GPU {number} are held by {who}."
        cure = f"End them if they are yours (%distributed jobs), or leave that GPU out with --devices: {ask} nvidia-smi -i {number}"
        yield Finding("warning", name, f"{MEMORY} {number}", evidence, cure)

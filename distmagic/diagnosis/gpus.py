"""What is wrong with the GPUs of hosts, and with the torch that is to use them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from distmagic.diagnosis.finding import Finding, Subject, odd_ones, others_have

_HELD_BYTES = 1 << 30  # less is kept by displays, and by the driver


def findings(subjects: Sequence[Subject]) -> list[Finding]:
    """Return what is wrong with GPUs, on each host and among hosts."""
    found = []
    for one in subjects:
        found += [*_of_torch(one), *_of_devices(one)]
    if len(subjects) > 1:
        found += _among(subjects)
    return found


def models(subject: Subject) -> str:
    """Return how many GPUs of which model a host has: `8 x H100`; "" for none that NVML knows."""
    if subject.examined is None:
        return ""
    counts = Counter(gpu.model for gpu in subject.examined.gpus)
    return ", ".join(f"{count} x {model}" for model, count in counts.items())


def _of_torch(subject: Subject) -> Iterator[Finding]:
    examined, facts = subject.examined, subject.facts
    if examined is None or facts is None or not facts.torch or not examined.gpus:
        return
    cure = f"Install a torch for CUDA {examined.driver_cuda or 'of this driver'} there, or name a Python that has it: --python {subject.name}=/path/to/python"
    built, highest = examined.torch_cuda, examined.driver_cuda
    if not built:
        evidence = f"it has {models(subject)}, and its torch {facts.torch} is built for CPUs alone."
        yield Finding("error", subject.name, "CUDA of torch", evidence, cure)
    # Within one major version a driver runs what was built for a later minor one.
    elif _major(built) > _major(highest) > 0:
        evidence = f"torch is built for CUDA {built}, and driver {examined.driver} takes CUDA {highest} at most."
        yield Finding("error", subject.name, "CUDA of torch", evidence, cure)


def _major(version: str) -> int:
    """Return the first number of a version, 0 for a text that is none."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _of_devices(subject: Subject) -> Iterator[Finding]:
    examined = subject.examined
    if examined is None:
        return
    name, ask = subject.name, subject.by_hand
    for number, gpu in enumerate(examined.gpus):
        if gpu.ecc_errors:
            evidence = f"GPU {number} has had {gpu.ecc_errors} memory errors that could not be corrected."
            cure = f"{ask} sudo nvidia-smi --gpu-reset -i {number}    # when nothing runs there"
            yield Finding("error", name, f"ECC of GPU {number}", evidence, cure)
        if gpu.slowed_by:
            evidence = (
                f"GPU {number} runs slower than it could, because of {gpu.slowed_by}."
            )
            cure = f"{ask} nvidia-smi -q -i {number} -d PERFORMANCE,TEMPERATURE,POWER"
            yield Finding("warning", name, f"speed of GPU {number}", evidence, cure)
        if gpu.used_bytes > _HELD_BYTES:
            who = ", ".join(gpu.holders) or "processes that can't be seen from there"
            evidence = f"{gpu.used_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB of GPU {number} are held by {who}."
            cure = f"End them if they are yours, or leave that GPU out with --devices: {ask} nvidia-smi -i {number}"
            yield Finding("warning", name, f"memory of GPU {number}", evidence, cure)
    if examined.gpus and examined.xid:
        evidence = f"the kernel has noted a fault of a GPU: Xid {examined.xid}."
        cure = f"{ask} sudo dmesg -T | grep Xid"
        yield Finding("warning", name, "Xid", evidence, cure)


def _among(subjects: Sequence[Subject]) -> Iterator[Finding]:
    others = others_have(subjects)
    counts = {one.name: str(one.facts.gpus) for one in subjects if one.facts}
    usual, odd = odd_ones(counts)
    for host, count in odd.items():
        evidence = f"{_counted(count)}, where {others} {usual}."
        by_hand = next(one.by_hand for one in subjects if one.name == host)
        cure = f"See which one is gone: {by_hand} nvidia-smi -L"
        yield Finding("warning", host, "GPUs", evidence, cure)
    for check in ("models", "driver"):
        values = {}
        for one in subjects:
            if one.examined is not None and one.examined.gpus and one.name not in odd:
                values[one.name] = (
                    models(one) if check == "models" else one.examined.driver
                )
        usual, different = odd_ones(values)
        for host, found in different.items():
            if check == "models":
                cure = "The slowest one sets the pace: give each host ranks to suit it, or leave it out of --hosts."
                yield Finding("warning", host, check, f"{found}, where {others} {usual}.", cure)  # fmt: skip
            else:
                cure = f"Install driver {usual} on {host}, as on the others."
                yield Finding("warning", host, check, f"driver {found}, where {others} {usual}.", cure)  # fmt: skip


def _counted(count: str) -> str:
    return {"0": "no GPU", "1": "1 GPU"}.get(count, f"{count} GPUs")

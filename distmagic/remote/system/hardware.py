"""The load of this host and its GPUs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

from distmagic.remote.system.memory import text_of
from distmagic.remote.wire import protocol

EVERY_S = 2.0
_QUERY = "index,count,uuid,utilization.gpu,memory.used,memory.total,temperature.gpu"
_SMI = ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-l2")
_MIB = 1 << 20

GpuTable = dict[str, protocol.Gpu]  # by index and by UUID


def looks(mask: str | None) -> Iterator[protocol.Hardware]:
    """Yield the load of this host every two seconds.

    `mask` is CUDA_VISIBLE_DEVICES, None for all GPUs.
    """
    before = counters()
    for gpus in rounds():
        now = counters()
        yield hardware(before, now, chosen(gpus, mask))
        before = now


def rounds() -> Iterator[GpuTable]:
    """Yield the GPUs of this host every two seconds, none without nvidia-smi."""
    with suppress(OSError, ValueError):
        smi = subprocess.Popen(
            _SMI, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True
        )
        yield from smi_rounds(smi.stdout or ())
    while True:
        time.sleep(EVERY_S)
        yield {}


def smi_rounds(lines: Iterable[str]) -> Iterator[GpuTable]:
    """Yield the tables in the output of nvidia-smi: one line for each GPU, repeated."""
    found: GpuTable = {}
    for line in lines:
        index, count, uuid, *rest = (word.strip() for word in line.split(","))
        # Otherwise "[N/A]".
        busy, used, total, heat = (
            float(word) if re.fullmatch(r"[\d.]+", word) else None for word in rest
        )
        found[index] = found[uuid] = protocol.Gpu(
            utilization=None if busy is None else busy / 100,
            used_bytes=None if used is None else int(used * _MIB),
            total_bytes=None if total is None else int(total * _MIB),
            celsius=heat,
        )
        if int(index) == int(count) - 1:
            yield found
            found = {}


def chosen(gpus: GpuTable, mask: str | None) -> tuple[protocol.Gpu, ...]:
    """Return the GPUs in the order of ranks' GPU numbers."""
    if mask is None:
        return tuple(gpus[name] for name in gpus if name.isdigit())
    found = []
    for name in mask.split(","):
        fitting = [key for key in gpus if name and key.startswith(name.strip())]
        if name.strip() in gpus:
            fitting = [name.strip()]
        if not fitting:
            break
        found.append(gpus[fitting[0]])
    return tuple(found)


def counters() -> tuple[float, ...]:
    """Return counters since boot: the time; the ticks of all CPUs, and the idle ones; bytes
    received, and sent.
    """
    ticks = [int(word) for word in text_of(Path("/proc/stat")).split()[1:9]] or [0] * 8
    received = sent = 0
    for line in text_of(Path("/proc/net/dev")).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        # Excludes bridges.
        if Path(f"/sys/class/net/{name.strip()}/device").exists():
            words = numbers.split()
            received += int(words[0])
            sent += int(words[8])
    return time.monotonic(), sum(ticks), ticks[3] + ticks[4], received, sent


def hardware(
    before: tuple[float, ...], now: tuple[float, ...], gpus: tuple[protocol.Gpu, ...]
) -> protocol.Hardware:
    """Return the load of the host between two readings of the counters."""
    past_s, ticks, idle, received, sent = (
        b - a for a, b in zip(before, now, strict=True)
    )
    table = text_of(Path("/proc/meminfo"))
    total, free = (
        int(found[1]) << 10 if (found := re.search(rf"{name}:\s*(\d+)", table)) else 0
        for name in ("MemTotal", "MemAvailable")
    )
    return protocol.Hardware(
        cpu_utilization=1 - idle / ticks if ticks else None,
        used_bytes=total - free,
        total_bytes=total,
        # In a container there may be no network device.
        received_bytes_s=received / past_s if now[3] else None,
        sent_bytes_s=sent / past_s if now[4] else None,
        gpus=gpus,
    )

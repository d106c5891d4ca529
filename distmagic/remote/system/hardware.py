"""The load of this host and its GPUs."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distmagic.remote.system import facts
from distmagic.remote.system.memory import text_of
from distmagic.remote.wire import protocol

EVERY_S = 2.0
_OF_CHIP = 0  # nvmlTemperatureSensors_t

GpuTable = dict[str, protocol.Gpu]  # by index and by UUID


class _Utilization(ctypes.Structure):
    """NVML's `nvmlUtilization_t`, in percent of the time."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


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
    """Yield the GPUs of this host every two seconds, none without NVIDIA's driver."""
    with facts.open_nvml() as nvml:
        gpus = facts.nvml_gpus(nvml)
        while True:
            time.sleep(EVERY_S)
            found: GpuTable = {}
            for number, (uuid, handle) in enumerate(gpus):
                found[str(number)] = found[uuid] = _gpu(nvml, handle)
            yield found


def _gpu(nvml: Any, handle: ctypes.c_void_p) -> protocol.Gpu:
    """Return the load of a GPU. A GPU that MIG divides reports no utilization."""
    use = _Utilization()
    name = "nvmlDeviceGetUtilizationRates"
    has_use = facts.ask_nvml(nvml, name, handle, ctypes.byref(use))
    celsius = facts.nvml_number(nvml, "nvmlDeviceGetTemperature", handle, _OF_CHIP)
    used, total = facts.nvml_memory(nvml, handle) or (None, None)
    return protocol.Gpu(
        utilization=use.gpu / 100 if has_use else None,
        used_bytes=used,
        total_bytes=total,
        celsius=None if celsius is None else float(celsius),
    )


def chosen(gpus: GpuTable, mask: str | None) -> tuple[protocol.Gpu, ...]:
    """Return the GPUs in the order of ranks' GPU numbers."""
    if mask is None:
        return tuple(gpus[name] for name in gpus if name.isdigit())
    found = []
    for part in mask.split(","):
        name = part.strip()
        # The start of a UUID is enough; a whole name is the shortest that fits.
        fitting = [key for key in gpus if name and key.startswith(name)]
        if not fitting:
            break
        found.append(gpus[min(fitting, key=len)])
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

"""Reads from NVML data about each GPU that matter before a run.

Nothing is changed, no device is used.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

from distmagic.remote.system import facts
from distmagic.remote.system.facts import ask_nvml, nvml_number, nvml_text
from distmagic.remote.system.memory import text_of
from distmagic.remote.wire.protocol import GpuHealth

_MOST_HOLDERS = 64
_UNCORRECTED, _SINCE_DRIVER = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
# From nvmlClocksEventReasons. Reaching a power limit is normal for a working GPU.
_SLOWED = (
    (0x40, "heat (hardware)"),
    (0x20, "heat"),
    (0x80, "the power supply"),
    (0x08, "hardware"),
)
_XID = re.compile(rb"NVRM: Xid \(([^)]*)\): (\d+)")
# Caused by a program, or by the end of one: the GPU is well. NVIDIA's plugin for Kubernetes ignores
# the same.
_OF_PROGRAMS = (b"13", b"31", b"43", b"45", b"68", b"109")
_LOG_BYTES = 1 << 20


class _Holder(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpus() -> tuple[str, str, tuple[GpuHealth, ...]]:
    """Return the driver's version, its highest CUDA version, and each GPU; "", "" and () without a
    driver.
    """
    with facts.open_nvml() as nvml:
        if nvml is None:
            return "", "", ()
        driver = nvml_text(nvml, "nvmlSystemGetDriverVersion")
        # The newer call also knows the package for forward compatibility.
        cuda = nvml_number(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        if cuda is None:
            cuda = nvml_number(nvml, "nvmlSystemGetCudaDriverVersion")
        highest = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        found = [_health(nvml, gpu) for _, gpu in facts.nvml_gpus(nvml) if gpu]
        return driver, highest, tuple(found)


def _health(nvml: Any, handle: ctypes.c_void_p) -> GpuHealth:
    mig, pending = ctypes.c_uint(), ctypes.c_uint()
    places = ctypes.byref(mig), ctypes.byref(pending)
    is_divided = ask_nvml(nvml, "nvmlDeviceGetMigMode", handle, *places) and mig.value
    memory = None if is_divided else facts.nvml_memory(nvml, handle)
    used, total = memory or (0, 0)
    kind = (_UNCORRECTED, _SINCE_DRIVER)
    errors = nvml_number(nvml, "nvmlDeviceGetTotalEccErrors", handle, *kind)
    reasons = nvml_number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    slowed_by = (what for bit, what in _SLOWED if (reasons or 0) & bit)
    return GpuHealth(
        model=nvml_text(nvml, "nvmlDeviceGetName", handle),
        used_bytes=used,
        total_bytes=total,
        holders=_holders(nvml, handle),
        ecc_errors=errors or 0,
        slowed_by=next(slowed_by, ""),
    )


def _holders(nvml: Any, handle: ctypes.c_void_p) -> tuple[str, ...]:
    """Return the processes that use memory of a GPU: pid and name, as far as visible to this
    user.
    """
    count = ctypes.c_uint(_MOST_HOLDERS)
    table = (_Holder * _MOST_HOLDERS)()
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    if not ask_nvml(nvml, name, handle, ctypes.byref(count), table):
        return ()
    found = []
    for process in table[: count.value]:
        program = text_of(Path(f"/proc/{process.pid}/comm"))  # "" in another container
        found.append(f"{process.pid} {program}".strip())
    return tuple(found)


def last_xid() -> str:
    """Return the last fault (Xid) of a GPU itself in the kernel's log: place and number; "" for
    none, or no log.
    """
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    last, left = "", _LOG_BYTES
    try:
        while left > 0:
            line = os.read(log, 8192)
            left -= len(line) or left
            found = _XID.search(line)
            if found and found[2] not in _OF_PROGRAMS:
                last = f"{found[2].decode()} ({found[1].decode(errors='replace')})"
    except OSError:  # the end, or a line that was overwritten meanwhile
        pass
    finally:
        os.close(log)
    return last

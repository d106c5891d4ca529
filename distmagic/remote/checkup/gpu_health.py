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
from distmagic.remote.system.facts import ask_nvml
from distmagic.remote.wire.protocol import GpuHealth

_TEXT_BYTES = 96
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
        driver = ctypes.create_string_buffer(_TEXT_BYTES)
        ask_nvml(nvml, "nvmlSystemGetDriverVersion", driver, _TEXT_BYTES)
        cuda = ctypes.c_int()
        # The newer call also knows the package for forward compatibility.
        place = ctypes.byref(cuda)
        if not ask_nvml(nvml, "nvmlSystemGetCudaDriverVersion_v2", place):
            ask_nvml(nvml, "nvmlSystemGetCudaDriverVersion", place)
        highest = (
            f"{cuda.value // 1000}.{cuda.value % 1000 // 10}" if cuda.value else ""
        )
        found = [_health(nvml, gpu) for _, gpu in facts.nvml_gpus(nvml) if gpu]
        return driver.value.decode(errors="replace"), highest, tuple(found)


def _health(nvml: Any, handle: ctypes.c_void_p) -> GpuHealth:
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    ask_nvml(nvml, "nvmlDeviceGetName", handle, name, _TEXT_BYTES)
    mig, pending = ctypes.c_uint(), ctypes.c_uint()
    places = ctypes.byref(mig), ctypes.byref(pending)
    is_divided = ask_nvml(nvml, "nvmlDeviceGetMigMode", handle, *places) and mig.value
    memory = None if is_divided else facts.nvml_memory(nvml, handle)
    used, total = memory or (0, 0)
    errors = ctypes.c_ulonglong()
    ask_nvml(
        nvml,
        "nvmlDeviceGetTotalEccErrors",
        handle,
        _UNCORRECTED,
        _SINCE_DRIVER,
        ctypes.byref(errors),
    )
    reasons = ctypes.c_ulonglong()
    ask_nvml(
        nvml,
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        handle,
        ctypes.byref(reasons),
    )
    slowed_by = [what for bit, what in _SLOWED if reasons.value & bit]
    return GpuHealth(
        model=name.value.decode(errors="replace"),
        used_bytes=used,
        total_bytes=total,
        holders=_holders(nvml, handle),
        ecc_errors=errors.value,
        slowed_by=slowed_by[0] if slowed_by else "",
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
        try:
            program = Path(f"/proc/{process.pid}/comm").read_text().strip()
        except OSError:
            program = ""  # in another container
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

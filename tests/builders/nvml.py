"""NVIDIA's library, played: for tests of what asks it in this process."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

_NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED


class Nvml:
    """The library, as far as it is asked, with `count` GPUs.

    The second one answers its UUID and its name alone. `error` is the answer to the start of it.
    """

    def __init__(self, count: int = 2, error: int = 0) -> None:
        self._count, self._error = count, error
        self.is_open = False

    # ---- the library

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.is_open = not self._error
        return self._error

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_open = False
        return 0

    def nvmlSystemGetDriverVersion(self, place: Any, size: int) -> int:  # noqa: N802
        assert size == 96
        place.value = b"570.1"
        return 0

    def nvmlSystemGetCudaDriverVersion(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 12080
        return 0

    # ---- its GPUs: each has a handle, which is 100 for the first one

    def nvmlDeviceGetCount_v2(self, place: Any) -> int:  # noqa: N802
        place._obj.value = self._count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, place: Any) -> int:  # noqa: N802
        place._obj.value = 100 + number
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, place: Any, size: int) -> int:  # noqa: N802
        assert (self.is_open, size) == (True, 96)
        place.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, place: Any, _size: int) -> int:  # noqa: N802
        place.value = b"H100"
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, place: Any) -> int:  # noqa: N802
        place._obj.gpu, place._obj.memory = 87, 5
        return 0 if handle.value == 100 else _NOT_SUPPORTED

    def nvmlDeviceGetMemoryInfo(self, handle: Any, place: Any) -> int:  # noqa: N802
        if handle.value == 101:
            return _NOT_SUPPORTED
        place._obj.total, place._obj.used = 80, 40
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, place: Any) -> int:  # noqa: N802
        assert place._obj.version == 0x2000028, "its size is 40 bytes"
        place._obj.used, place._obj.total = 62311 << 20, 81559 << 20
        return 0 if handle.value == 100 else _NOT_SUPPORTED

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, place: Any) -> int:  # noqa: N802
        assert sensor == 0
        place._obj.value = 71
        return 0 if handle.value == 100 else _NOT_SUPPORTED

    def nvmlDeviceGetTotalEccErrors(  # noqa: N802
        self, handle: Any, error: int, counter: int, place: Any
    ) -> int:
        assert (error, counter) == (1, 0)  # not corrected, since the driver was loaded
        if handle.value == 101:
            return _NOT_SUPPORTED
        place._obj.value = 7
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(  # noqa: N802
        self, handle: Any, place: Any
    ) -> int:
        # A limit of power, which is usual; heat on the first one alone.
        place._obj.value = 0x24 if handle.value == 100 else 0x4
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(  # noqa: N802
        self, handle: Any, count: Any, table: Any
    ) -> int:
        if handle.value == 101:
            return _NOT_SUPPORTED
        assert count._obj.value == len(table)
        count._obj.value = 2
        table[0].pid, table[1].pid = os.getpid(), 2**31 - 1
        return 0


def play(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    """Have this process find that library; with None, a machine without NVIDIA's driver."""

    def load(name: str) -> Nvml:
        if nvml is None:
            raise OSError(f"{name}: cannot open shared object file")
        return nvml

    monkeypatch.setattr(ctypes, "CDLL", load)

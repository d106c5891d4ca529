"""What NVIDIA's library tells of GPUs, played by one that has two of them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import distmagic
from distmagic.remote.checkup import gpu_health
from distmagic.remote.wire.protocol import GpuHealth


class _Nvml:
    """As far as it is asked. Of the second GPU it tells the name alone."""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def nvmlSystemGetDriverVersion(self, place: Any, size: int) -> int:  # noqa: N802
        assert size == 96
        place.value = b"570.1"
        return 0

    def nvmlSystemGetCudaDriverVersion(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 12080
        return 0

    def nvmlDeviceGetCount_v2(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, place: Any) -> int:  # noqa: N802
        place._obj.value = 100 + number
        return 0

    def nvmlDeviceGetName(self, handle: Any, place: Any, _size: int) -> int:  # noqa: N802
        place.value = b"H100"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, place: Any) -> int:  # noqa: N802
        if handle.value == 101:
            return 3  # NVML_ERROR_NOT_SUPPORTED
        place._obj.total, place._obj.used = 80, 40
        return 0

    def nvmlDeviceGetTotalEccErrors(  # noqa: N802
        self, handle: Any, error: int, counter: int, place: Any
    ) -> int:
        assert (error, counter) == (1, 0)  # not corrected, since the driver was loaded
        if handle.value == 101:
            return 3
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
            return 3
        assert count._obj.value == len(table)
        count._obj.value = 2
        table[0].pid, table[1].pid = os.getpid(), 2**31 - 1
        return 0


def test_what_is_told_of_two_gpus(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _Nvml())
    driver, cuda, (first, second) = gpu_health.gpus()
    assert (driver, cuda) == ("570.1", "12.8")
    own, strange = first.holders
    assert own.split()[0] == str(os.getpid())
    assert own.split()[1:] != []
    assert strange == str(2**31 - 1)
    assert (first.model, first.used_bytes, first.total_bytes) == ("H100", 40, 80)
    assert (first.ecc_errors, first.slowed_by) == (7, "heat")
    assert second == GpuHealth(model="H100")


def test_a_library_that_is_older_than_a_question(monkeypatch):
    class Old(_Nvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = None  # noqa: N815

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Old())
    _, _, (first, _) = gpu_health.gpus()
    assert first.holders == ()


def test_a_host_without_a_driver(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_health.gpus() == ("", "", ())


def test_the_last_fault_of_the_kernels_log(monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    real = os.open
    monkeypatch.setattr(
        gpu_health.os, "open", lambda path, *rest: real(log, *rest) if path == "/dev/kmsg" else real(path, *rest)
    )  # fmt: skip
    assert gpu_health.last_xid() == ""
    log.write_bytes(b"4,1,2,-;NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off\n")
    assert gpu_health.last_xid() == "79 (PCI:0000:65:00)"
    # An illegal access, and the end of its program.
    for number in (31, 45):
        log.write_bytes(
            f"4,1,2,-;NVRM: Xid (PCI:0000:65:00): {number}, pid=71\n".encode()
        )
        assert gpu_health.last_xid() == ""


def test_memory_of_a_gpu_that_mig_divides_is_not_that_of_one_user(monkeypatch):
    class Divided(_Nvml):
        def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, next_mode: Any) -> int:  # noqa: N802
            mode._obj.value = next_mode._obj.value = int(handle.value == 100)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Divided())
    _, _, (first, _) = gpu_health.gpus()
    assert first.used_bytes == 0


def test_a_package_for_forward_compatibility_counts(monkeypatch):
    class Compatible(_Nvml):
        def nvmlSystemGetCudaDriverVersion_v2(self, place: Any) -> int:  # noqa: N802
            place._obj.value = 13000
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Compatible())
    assert gpu_health.gpus()[1] == "13.0"


def test_the_help_names_each_xid_that_is_left_out():
    page = Path(distmagic.__file__).parent / "help" / "doctor.md"
    text = " ".join(page.read_text().split())
    names = b", ".join(gpu_health._OF_PROGRAMS).decode()
    assert f"({names}) are left out" in text

"""What NVIDIA's library tells of GPUs, played by one that has two of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import distmagic
from distmagic.remote.checkup import gpu_health
from distmagic.remote.wire.protocol import GpuHealth
from tests.builders.nvml import Nvml, play


def test_what_is_told_of_two_gpus(monkeypatch):
    play(monkeypatch, Nvml())
    driver, cuda, (first, second) = gpu_health.gpus()
    assert (driver, cuda) == ("570.1", "12.8")
    own, strange = first.holders
    assert own.split()[0] == str(os.getpid())
    assert own.split()[1:] != []
    assert strange == str(2**31 - 1)
    assert first.model == "H100"
    assert (first.used_bytes, first.total_bytes) == (62311 << 20, 81559 << 20)
    assert (first.ecc_errors, first.slowed_by) == (7, "heat")
    assert second == GpuHealth(model="H100")


def test_a_library_that_is_older_than_a_question(monkeypatch):
    class Old(Nvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = None  # noqa: N815
        nvmlDeviceGetMemoryInfo_v2 = None  # noqa: N815

    play(monkeypatch, Old())
    _, _, (first, _) = gpu_health.gpus()
    assert first.holders == ()
    assert (first.used_bytes, first.total_bytes) == (40, 80)


def test_a_host_without_a_driver(monkeypatch):
    play(monkeypatch, None)
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
    class Divided(Nvml):
        def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, next_mode: Any) -> int:  # noqa: N802
            mode._obj.value = next_mode._obj.value = int(handle.value == 100)
            return 0

    play(monkeypatch, Divided())
    _, _, (first, _) = gpu_health.gpus()
    assert first.used_bytes == 0


def test_a_package_for_forward_compatibility_counts(monkeypatch):
    class Compatible(Nvml):
        def nvmlSystemGetCudaDriverVersion_v2(self, place: Any) -> int:  # noqa: N802
            place._obj.value = 13000
            return 0

    play(monkeypatch, Compatible())
    assert gpu_health.gpus()[1] == "13.0"


def test_the_help_names_each_xid_that_is_left_out():
    page = Path(distmagic.__file__).parent / "help" / "doctor.md"
    text = " ".join(page.read_text().split())
    names = b", ".join(gpu_health._OF_PROGRAMS).decode()
    assert f"({names}) are left out" in text

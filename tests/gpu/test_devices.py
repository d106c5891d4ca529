"""What is read of nvidia-smi and of /proc, from recordings: these tests run everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu import checks, devices

LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-3b2a7d50-8ee5-9b0c-5f0f-4b8c1d8e7a11)
GPU 1: NVIDIA H200 (UUID: GPU-91f0e6d2-0c35-7e5b-2a41-6c2f5a9d0b22)
  MIG 1g.18gb     Device  0: (UUID: MIG-5c1f8a3e-6a0d-5f3b-9d6c-2b7a4e1c0d33)
  MIG 1g.18gb     Device  1: (UUID: MIG-0e7d2b94-1f58-5a6e-8b3d-7c9e5f2a1b44)
"""


@pytest.mark.parametrize(
    ("listed", "pids"),
    [
        ("1234\n5678\n", {1234, 5678}),
        (" 1234 \n", {1234}),
        ("", set()),
        ("[Not Found]\n77\n", {77}),
        ("No devices were found\n", set()),
        ("Failed to initialize NVML: Driver/library version mismatch\n", set()),
    ],
)
def test_the_list_of_processes(listed, pids):
    assert devices.compute_pids(listed) == pids


@pytest.mark.parametrize(
    ("listed", "mib"),
    [
        ("521\n", 521),
        (" 521\n4 \n", 525),
        ("0\n", 0),
        ("", None),
        ("[N/A]\n", None),
        ("521\n[Insufficient Permissions]\n", None),
        ("No devices were found\n", None),
    ],
)
def test_the_memory_in_use(listed, mib):
    assert devices.total_mib(listed) == mib


RANKS = {
    "ranks": frozenset({7, 8}),
    "torchruns": frozenset({5}),
    "with_contexts": frozenset(),
    "with_devices": frozenset({5, 7, 8}),
    "used_mib": 1060,
}


@pytest.mark.parametrize(
    ("seen", "is_fine"),
    [
        ({}, True),
        ({"used_mib": 1590}, False),  # one more context: torchrun's
        ({"used_mib": 530}, False),  # what is seen is not these ranks' memory
        ({"with_devices": frozenset({5, 6, 7, 8})}, False),
        ({"with_devices": frozenset({7, 8}), "used_mib": None}, True),
        ({"with_devices": frozenset({7})}, False),
        ({"with_contexts": frozenset({7, 8}), "used_mib": None}, True),
        ({"with_contexts": frozenset({5, 7, 8})}, False),
        ({"with_contexts": frozenset({7})}, False),
        ({"with_contexts": frozenset({70, 80})}, True),  # other pids than here
    ],
)
def test_who_has_a_context(seen, is_fine):
    found = checks.Seen(**RANKS | seen)
    if is_fine:
        checks.assert_only_ranks_have_contexts(found, 530)
        return
    with pytest.raises(AssertionError):
        checks.assert_only_ranks_have_contexts(found, 530)


def test_what_can_not_be_told_of_torchrun_is_no_success():
    with pytest.raises(pytest.skip.Exception, match="can't be told here"):
        checks.assert_only_ranks_have_contexts(
            checks.Seen(**RANKS | {"used_mib": None}), 530
        )


def test_the_names_of_devices():
    gpus, instances = devices.uuids(LISTED)
    assert [uuid[:8] for uuid in gpus] == ["GPU-3b2a", "GPU-91f0"]
    assert [uuid[:8] for uuid in instances] == ["MIG-5c1f", "MIG-0e7d"]
    assert devices.uuids("") == ((), ())


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Processes with a GPU (7), a mapped GPU (8), only the driver's own file (9), none of them (10); and another folder."""
    files = {
        "7": ["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"],
        "8": [],
        "9": ["/dev/nvidiactl"],
        "10": ["/dev/null"],
    }
    for pid, names in files.items():
        (tmp_path / pid / "fd").mkdir(parents=True)
        for fd, name in enumerate(names):
            (tmp_path / pid / "fd" / str(fd)).symlink_to(name)
        mapped = (
            "7f00-7f01 rw-s 00000000 00:05 600 /dev/nvidia3\n"
            if pid == "8"
            else "7f00-7f01 r--p 0 00:00 0 /lib/libc.so\n"
        )
        (tmp_path / pid / "maps").write_text(mapped)
        (tmp_path / pid / "stat").write_text(f"{pid} (a) b) S 77 1 1")
    (tmp_path / "sys").mkdir()
    return tmp_path


def test_device_files_of_a_process(proc):
    assert devices.open_devices(7, proc) == {"/dev/nvidiactl", "/dev/nvidia0"}
    assert devices.open_devices(8, proc) == {"/dev/nvidia3"}
    assert devices.open_devices(10, proc) == frozenset()
    assert devices.open_devices(11, proc) == frozenset()  # it has ended
    assert devices.processes_with_devices(proc) == {7, 8}


def test_the_parent_of_a_process(proc):
    assert devices.parent_of(7, proc) == 77
    assert devices.parent_of(11, proc) == 0
    assert devices.parent_of(os.getpid()) == os.getppid()


def test_a_machine_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(devices, "_SMI", "no-such-program")
    assert devices.processes_with_contexts() == frozenset()

"""What a host is like: GPUs behind masks, torch without importing it, addresses and their interfaces."""

from __future__ import annotations

import importlib.util
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.remote.system import facts
from distmagic.remote.wire import protocol
from tests import REPOSITORY
from tests.builders.nvml import Nvml, play


@pytest.fixture(autouse=True)
def _plain_host(monkeypatch, tmp_path):
    for name in (
        "SSH_CONNECTION",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (None, 4), ("", 0), ("0", 1), ("3,2,1,0", 4), (" 2 , 3 ", 2), ("-1", 0), ("0,-1,2", 1), ("0,9,1", 1), ("9", 0),
        ("0,,1", 1), ("0,1,0", 0), ("1,01", 0), ("GPU-8932f937,GPU-1234", 2), ("GPU-8932f937,GPU-8932f937", 0),
        ("NoDevFiles", 0), ("none", 0), ("0,void,1", 1),
        ("GPU-1,GPU-2,GPU-3,GPU-4,GPU-5", 4), ("GPU-1,none", 1), ("MIG-GPU-1/2/0", 1), ("MIG-8932f937,MIG-1234", 1),
    ],
)  # fmt: skip
def test_a_mask_ends_at_its_first_invalid_device_as_for_torch(monkeypatch, mask, count):
    assert facts.visible(4, mask) == count
    if mask is None or not mask.startswith(("GPU-", "MIG-")):  # else it asks for UUIDs
        import torch

        if mask is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
        assert torch.cuda._device_count_nvml() == count


def test_a_host_without_gpus_has_none_whatever_the_mask_names():
    assert facts.visible(0, "GPU-8932f937,GPU-1234") == 0


class _Unnamed(Nvml):
    """The second GPU has no UUID either."""

    def nvmlDeviceGetUUID(self, handle: Any, place: Any, size: int) -> int:  # noqa: N802
        error = super().nvmlDeviceGetUUID(handle, place, size)
        return 3 if handle.value == 101 else error  # NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("error", "count"), [(0, 8), (9, 0)]
)  # 9: NVML_ERROR_DRIVER_NOT_LOADED
def test_the_figures_of_nvml(monkeypatch, error, count):
    nvml = _Unnamed(8, error)
    play(monkeypatch, nvml)
    assert facts._count_nvidia() == count
    assert not nvml.is_open
    uuids = ("GPU-100", "1", *(f"GPU-{handle}" for handle in range(102, 108)))
    assert facts.nvidia_uuids() == uuids[:count]
    assert not nvml.is_open


def test_a_host_without_nvml(monkeypatch):
    play(monkeypatch, None)
    assert facts._count_nvidia() == 0
    assert facts.nvidia_uuids() == ()


def test_gpus_of_nvidia_amd_and_none(monkeypatch):
    monkeypatch.setattr(facts, "_count_nvidia", lambda: 8)
    monkeypatch.setattr(facts, "_count_amd", lambda: 4)
    assert facts.count_gpus() == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert facts.count_gpus() == 2
    monkeypatch.setattr(facts, "_count_nvidia", lambda: 0)
    assert facts.count_gpus() == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert facts.count_gpus() == 1
    monkeypatch.setattr(facts, "_count_amd", lambda: 0)
    assert facts.count_gpus() == 0


def test_amd_nodes_that_may_not_be_read_are_not_counted(monkeypatch, tmp_path):
    for name, text in (("0", "simd_count 0\n"), ("1", "simd_count 304\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(f"cpu_cores_count 8\n{text}")
    (tmp_path / "2/properties").mkdir(parents=True)
    real = Path.glob
    monkeypatch.setattr(
        Path,
        "glob",
        lambda self, pattern: (
            real(tmp_path, pattern) if "kfd" in str(self) else real(self, pattern)
        ),
    )
    assert facts._count_amd() == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cu130'\ndebug = False\n", "2.13.0+cu130"),
        ('from typing import Optional\n__all__ = ["__version__"]\n__version__: str = "2.4.1"\n', "2.4.1"),
        ("version = compute()\n", "unknown"),
        (None, "unknown"),
    ],
)  # fmt: skip
def test_the_version_of_torch_is_read_from_its_files(
    monkeypatch, tmp_path, text, version
):
    if text:
        (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert facts.torch_version() == version


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)])
def test_no_torch(monkeypatch, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert facts.torch_version() is None


def test_facts_are_gathered_without_importing_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from distmagic.remote.system import facts; "
        f"from distmagic.remote.wire import protocol; found = facts.gather(Path({str(tmp_path)!r}), 'seven');"
        "assert not {'torch', 'numpy', 'tqdm'} & set(sys.modules); sys.stdout.buffer.write(protocol.encode(found))"
    )
    root = REPOSITORY
    line = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, check=True
    ).stdout
    _, found = protocol.decode(line)
    assert (found.executable, found.state_dir) == (sys.executable, str(tmp_path))
    assert (found.address, found.interface) == ("127.0.0.1", "lo")
    assert found.torch is not None
    assert found.cpus >= 1
    assert found.free_bytes > 0
    assert 1024 <= found.free_port <= 65535


def test_the_interface_of_an_address():
    assert facts.interface_of("127.0.0.1") == "lo"
    assert facts.interface_of("192.0.2.77") == ""
    assert facts.interface_of("") == ""


def test_the_way_to_a_peer():
    assert facts.route("127.0.0.1") == ("127.0.0.1", "lo")
    assert facts.route("127.0.0.9") == ("127.0.0.1", "lo")
    with pytest.raises(OSError):
        facts.route("999.0.0.1")


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("192.0.2.1 50000 127.0.0.1 22", "127.0.0.1"),
        ("192.0.2.1 50000 192.0.2.77 22", "127.0.0.1"),  # of another network than the one this machine is in now
        ("nonsense", "127.0.0.1"),
        ("", "127.0.0.1"),
    ],
)  # fmt: skip
def test_the_address_that_ssh_came_to(monkeypatch, connection, address):
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert facts.route("")[0] == address


@pytest.mark.parametrize(
    "connection", ["127.0.0.1 50000 127.0.0.1 22", "UNKNOWN 65535 UNKNOWN 65535", ""]
)
def test_a_host_behind_a_forwarded_port_has_its_address_towards_others(
    monkeypatch, connection
):
    monkeypatch.setenv("SSH_CONNECTION", connection)
    monkeypatch.setenv("DISTMAGIC_CLIENT", "192.0.2.1")
    monkeypatch.setattr(facts, "_address_towards", {"192.0.2.1": "10.0.0.7"}.get)
    assert facts.route("")[0] == "10.0.0.7"

    def no_way(_: str) -> str:
        raise OSError

    monkeypatch.setattr(facts, "_address_towards", no_way)
    assert facts.route("")[0] == "127.0.0.1"


def test_runs_that_begin_at_the_same_time_get_different_ports(monkeypatch):
    """Each kernel's contact is a process of its own; that the same port is free for several of them is made likely here."""
    base = facts.free_port("127.0.0.1")
    monkeypatch.setattr(facts, "_TRIES", 1000)
    monkeypatch.setattr(facts, "free_port", lambda _: base + random.randrange(64))
    with ThreadPoolExecutor(16) as pool:
        for _ in range(20):
            reserved = list(pool.map(facts.reserve_port, ["127.0.0.1"] * 16))
            assert len({port for port, _ in reserved}) == 16
            for _, holder in reserved:
                holder.close()


def test_a_reserved_port_is_left_to_torchrun_and_to_the_next_run():
    port, holder = facts.reserve_port("127.0.0.1")
    with socket.socket() as store:
        store.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(holder.getsockname())
    name = holder.getsockname()
    holder.close()
    with socket.socket(socket.AF_UNIX) as again:
        again.bind(name)


def test_where_all_ports_are_taken_the_last_one_has_to_do(monkeypatch):
    port, holder = facts.reserve_port("127.0.0.1")
    monkeypatch.setattr(facts, "free_port", lambda _: port)
    again, unnamed = facts.reserve_port("127.0.0.1")
    unnamed.close()
    assert again == port
    holder.close()

"""What is asserted of GPUs and, as far as it goes, of the CPU."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distmagic.errors import Cancelled
from distmagic.outcome.run import Run
from distmagic.remote.wire.protocol import Gpu, Hardware
from distmagic.state.model import RunState
from tests.builders.later import Later
from tests.e2e.runner import Watch, at_work
from tests.gpu import devices, programs

torch = Later("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Pids of this machine while ranks hold their devices: the ranks, their torchruns, and who uses a GPU.

    `with_contexts` is the driver's own list, in which a container's processes may be missing. `used_mib` is the memory of
    all GPUs that is in use, None where nothing tells. What was there before the run is left out of all three.
    """

    ranks: frozenset[int]
    torchruns: frozenset[int]
    with_contexts: frozenset[int]
    with_devices: frozenset[int]
    used_mib: int | None


def processes_during(
    run: Callable[..., Run], device: str, *, hosts: str, is_cold: bool = False
) -> Seen:
    """Run `programs.hold`, look at all processes once every rank has its tensor, and interrupt the run."""
    world = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    contexts_before, devices_before, used_before = (
        devices.processes_with_contexts(),
        devices.processes_with_devices(),
        devices.used_mib(),
    )
    seen = []

    def look() -> None:
        assert watch.last is not None
        ranks = frozenset(worker.pid for worker in watch.last.workers.values())
        used = devices.used_mib()
        torchruns = frozenset(devices.parent_of(pid) for pid in ranks)
        # They read the load of GPUs by NVML, which opens the same files.
        agents = frozenset(devices.parent_of(pid) for pid in torchruns)
        seen.append(
            Seen(
                ranks=ranks,
                torchruns=torchruns,
                with_contexts=devices.processes_with_contexts() - contexts_before,
                with_devices=devices.processes_with_devices() - devices_before - agents,
                used_mib=None
                if used is None or used_before is None
                else used - used_before,
            )
        )
        signal.raise_signal(signal.SIGINT)

    watch = Watch(when=at_work(world), act=look)
    with pytest.raises(Cancelled):
        run(programs.hold, device, hosts=hosts, is_cold=is_cold, screen=watch)
    (only,) = seen
    return only


def assert_only_ranks_have_contexts(seen: Seen, context_mib: int | None) -> None:
    """Assert that of all processes only the ranks have a context on a GPU: no contact, template, agent or torchrun.

    Where the driver does not list them, device files tell it, but for torchrun: it asks CUDA how many GPUs there are, and
    keeps all files open that a context has, too. A context of its own would take the memory of one more rank, which is
    `context_mib`. Where nothing tells of memory either, the test is skipped.
    """
    if seen.with_contexts & seen.ranks:
        assert seen.with_contexts == seen.ranks
        return
    assert seen.with_devices >= seen.ranks
    assert seen.with_devices - seen.torchruns == seen.ranks
    if not seen.with_devices & seen.torchruns:
        return
    if seen.used_mib is None or not context_mib:
        pytest.skip(
            "whether torchrun has a context can't be told here: the driver lists no process of this container, and "
            "nvidia-smi tells no memory in use (MIG)"
        )
    contexts = seen.used_mib / context_mib
    ranks = len(seen.ranks)
    assert ranks - 0.5 < contexts < ranks + 0.5, "in memory of one rank"


def hardware_during(
    run: Callable[..., Run], device: str, folder: Path
) -> tuple[Run, Hardware]:
    """Run `programs.compute` until its host has told how busy it is, each of its GPUs too; return both."""
    told: list[Hardware] = []

    def has_told(state: RunState) -> bool:
        found = state.nodes[0].hardware
        if found is None:
            return False
        if device == "cpu" or any(gpu.utilization for gpu in found.gpus):
            told.append(found)
        return bool(told)

    watch = Watch(when=has_told, act=(folder / "told").touch)
    done = run(
        programs.compute, device, str(folder / "told"), hosts="node1:1", screen=watch
    )
    assert told, "the host has told nothing of a GPU at work"
    return done, told[0]


def assert_host_figures(told: Hardware) -> None:
    """Assert what is told of a host itself. Some containers have no numbers of CPUs in /proc/stat."""
    assert told.cpu_utilization is None or 0 <= told.cpu_utilization <= 1
    assert 0 < told.used_bytes < told.total_bytes


def assert_gpu_figures(told: Gpu, *, kept_bytes: int, total_bytes: int) -> None:
    """Assert what is told of a GPU at work: `kept_bytes` of it are a rank's, and torch sees `total_bytes` of it in all."""
    assert told.utilization is not None
    assert 0 < told.utilization <= 1
    assert told.total_bytes is not None
    assert total_bytes <= told.total_bytes < 1.1 * total_bytes, "a part is the driver's"
    assert told.used_bytes is not None
    assert kept_bytes <= told.used_bytes <= told.total_bytes
    assert told.celsius is not None
    assert 10 < told.celsius < 110


def assert_shared_once(done: Run) -> None:
    """Assert that what `programs.shared_storages` returned is on the CPU, is right, and came over as one storage."""
    found = done.results[0]
    assert {
        tensor.device.type
        for tensor in (found["whole"], found["view"], found["layer"]["weight"])
    } == {"cpu"}
    assert torch.equal(found["whole"], torch.arange(1 << 20, dtype=torch.float32))
    assert found["view"].tolist() == list(range(10, 20))
    assert (
        len(
            {
                found[name].untyped_storage().data_ptr()
                for name in ("whole", "view", "again")
            }
        )
        == 1
    )
    ended = done.state.workers[0].ended
    assert ended is not None
    assert ended.result_bytes is not None
    assert ended.result_bytes < 1.1 * found["whole"].nbytes

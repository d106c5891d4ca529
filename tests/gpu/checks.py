"""What is asserted of GPUs and, as far as it goes, of the CPU."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from distmagic.errors import Cancelled
from distmagic.runner.outcome import Run
from tests.e2e.runner import Watch, at_work
from tests.gpu import devices, programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Pids of this machine while ranks hold their devices: the ranks, their torchruns, and who uses a GPU.

    `with_contexts` is the driver's own list, in which a container's processes may be missing. What was there before the
    run is left out of it and of `with_devices`.
    """

    ranks: frozenset[int]
    torchruns: frozenset[int]
    with_contexts: frozenset[int]
    with_devices: frozenset[int]


def processes_during(
    run: Callable[..., Run], device: str, *, hosts: str, is_cold: bool = False
) -> Seen:
    """Run `programs.hold`, look at all processes once every rank has its tensor, and interrupt the run."""
    world = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    contexts_before, devices_before = (
        devices.processes_with_contexts(),
        devices.processes_with_devices(),
    )
    seen = []

    def look() -> None:
        assert watch.last is not None
        ranks = frozenset(worker.pid for worker in watch.last.workers.values())
        seen.append(
            Seen(
                ranks=ranks,
                torchruns=frozenset(devices.parent_of(pid) for pid in ranks),
                with_contexts=devices.processes_with_contexts() - contexts_before,
                with_devices=devices.processes_with_devices() - devices_before,
            )
        )
        signal.raise_signal(signal.SIGINT)

    watch = Watch(when=at_work(world), act=look)
    with pytest.raises(Cancelled):
        run(programs.hold, device, hosts=hosts, is_cold=is_cold, screen=watch)
    (only,) = seen
    return only


def assert_only_ranks_have_contexts(seen: Seen) -> None:
    """Assert that of all processes only the ranks have a context on a GPU: no contact, template, agent or torchrun.

    Where the driver does not list them, device files tell it, but for torchrun: it asks CUDA how many GPUs there are, and
    keeps their files open without a context.
    """
    if seen.with_contexts & seen.ranks:
        assert seen.with_contexts == seen.ranks
    else:
        assert seen.with_devices >= seen.ranks
        assert seen.with_devices - seen.torchruns == seen.ranks


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

"""Ranks that stay, each with a tensor's device: on the CPU with gloo, on a GPU with gloo and with NCCL.

NCCL refuses two ranks on one GPU of a host. Here each rank is a host of its own for it (NCCL_HOSTID), so two can meet on
one GPU, over the loopback network.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from distmagic.errors import Cancelled, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.playground.playground import Playground
from distmagic.request.access import Access
from distmagic.staying.ranks import Ranks
from tests.e2e.runner import Watch, at_work
from tests.e2e.staying import ranks_that_stay

FIRST = """\
import os
import time

import torch
import torch.distributed as dist
import distmagic

torch.set_num_threads(1)
if device == "cuda":
    os.environ["NCCL_HOSTID"] = "rank " + os.environ["RANK"]
    torch.cuda.set_device(0)
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        distmagic.report(step=step)

def weights():
    return [round(p.detach().sum().item(), 4) for p in model.parameters()]

def allocated():
    return torch.cuda.memory_allocated() if device == "cuda" else 0
"""
WAITS = """\
x = torch.ones(4, device=device)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    distmagic.report(step=1)
    work.wait()
    x.sum().item()
else:
    distmagic.report(step=1)
    time.sleep(3600)
"""
SUM = """\
total = torch.ones(1, device=device)
dist.all_reduce(total)
total.item()
"""


@dataclass(frozen=True)
class Stay:
    """Two ranks that stay, on one device."""

    device: str
    ranks: Ranks
    run_cell: Callable[[str, Watch], Run]

    def results(self, text: str) -> list[Any]:
        """Run a cell on both ranks; return its values."""
        done = self.run_cell(text, Watch())
        return [done.results[rank] for rank in range(2)]

    def interrupted(self, text: str) -> str:
        """Interrupt a cell once both ranks have reported a step; return the notices."""
        watch = Watch(at_work(2), lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Cancelled):
            self.run_cell(text, watch)
        assert watch.last is not None
        return " ".join(watch.last.notices)

    def works(self) -> None:
        """Assert that both ranks meet in a collective call."""
        assert self.results(SUM) == [2.0, 2.0]


@pytest.fixture(
    scope="module", params=["cpu gloo", "cuda gloo", "cuda nccl"], ids=lambda it: it
)
def stay(request, hosts: Playground) -> Iterator[Stay]:
    device, backend = request.param.split()
    if device == "cuda":
        request.getfixturevalue("gpus")
    way = Access(ssh_config=hosts.ssh_config)
    with ranks_that_stay(way, "node1:1,node2:1", device=device, backend=backend) as (
        ranks,
        run_cell,
    ):
        stay = Stay(device, ranks, run_cell)
        stay.run_cell(FIRST, Watch())
        yield stay


def test_model_and_group_stay_on_their_device(stay):
    stay.run_cell("train(3)", Watch())
    kinds = stay.results("str(next(model.parameters()).device)")
    assert kinds == ["cuda:0" if stay.device == "cuda" else "cpu"] * 2
    first, second = stay.results("weights()")
    assert first == second
    stay.works()


def test_what_ranks_have_is_listed_with_its_device(stay):
    held = "\n".join(stay.ranks.holdings())
    assert "DistributedDataParallel, 4,160 parameters on" in held
    assert ("on cuda:0" in held) == ("GPU" in held) == (stay.device == "cuda")


def test_an_interrupt_stops_both_ranks_after_the_same_step(stay):
    assert "Stopped after step" in stay.interrupted("train(10**9)")
    stay.run_cell("train(3)", Watch())
    first, second = stay.results("weights()")
    assert first == second


def test_an_interrupt_breaks_a_call_in_which_a_rank_waits(stay):
    assert "A process group was aborted" in stay.interrupted(WAITS)
    stay.works()
    stay.run_cell(FIRST, Watch())  # as people do
    stay.run_cell("train(3)", Watch())


def test_a_rank_that_fails_lets_the_other_go_from_its_call(stay):
    text = WAITS.replace("time.sleep(3600)", 'raise ValueError("no such batch")')
    with pytest.raises(WorkerFailed) as caught:
        stay.run_cell(text, Watch())
    assert "rank 1 (node2, local_rank 0) raised ValueError" in caught.value.message
    stay.works()


def test_memory_of_a_cell_that_failed_is_given_back(stay):
    before = stay.results("allocated()")
    with pytest.raises(WorkerFailed):
        stay.run_cell(
            "def hold():\n    big = torch.ones(1 << 26, device=device)\n    raise ValueError(len(big))\nhold()",
            Watch(),
        )
    assert stay.results("allocated()") == before
    stay.works()


def test_a_cell_that_asks_for_too_much_memory_fails_alone(stay):
    before = stay.results("allocated()")
    with pytest.raises(WorkerFailed):
        stay.run_cell("torch.empty(1 << 52, dtype=torch.uint8, device=device)", Watch())
    assert stay.results("allocated()") == before
    stay.works()


def test_values_on_a_device_are_read_and_set(stay):
    stay.ranks["scale"] = 3.0
    stay.run_cell("scaled = scale * torch.ones(2, device=device)", Watch())
    scaled = stay.ranks[1]["scaled"]
    assert (scaled.device.type, scaled.tolist()) == ("cpu", [3.0, 3.0])

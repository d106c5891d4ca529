"""What ranks of these tests do. With `device` "cpu" and the backend gloo each of them runs on any machine."""

from __future__ import annotations

from typing import Any


def see_device(device: str) -> dict[str, Any]:
    """Use this rank's device; return which it is, how many this rank sees, and whether a fork has spoilt CUDA here."""
    import os

    import torch

    import distmagic

    local_rank = int(os.environ["LOCAL_RANK"])
    place = (
        torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    )
    total = torch.ones(3, device=place).sum().item()
    distmagic.report(step=1, total=1)
    return {
        "place": str(place),
        "total": total,
        "count": torch.cuda.device_count(),
        "is_spoilt": torch.cuda._is_in_bad_fork(),
        "pid": os.getpid(),
    }


def hold(device: str) -> None:
    """Keep a tensor on this rank's device until the run is interrupted; the step says that it is there."""
    import os
    import time

    import torch

    import distmagic

    local_rank = int(os.environ["LOCAL_RANK"])
    place = (
        torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    )
    kept = torch.ones(1 << 20, device=place)
    distmagic.report(step=1, total=kept.numel())
    while True:
        time.sleep(0.1)


def compute(device: str, until: str) -> dict[str, int]:
    """Keep this rank's device at work until there is a file of this name; return what it holds there, and how much there is."""
    import time
    from pathlib import Path

    import torch

    import distmagic

    is_gpu = device == "cuda"
    kept = torch.ones(1 << (28 if is_gpu else 10), device=device)
    factor = torch.ones((4096, 4096) if is_gpu else (64, 64), device=device)
    give_up_s = time.monotonic() + 60
    step = 0
    while not Path(until).exists() and time.monotonic() < give_up_s:
        for _ in range(20):
            (factor @ factor).sum()
        if is_gpu:
            torch.cuda.synchronize()
        step += 1
        distmagic.report(step=step)
    total = torch.cuda.get_device_properties(0).total_memory if is_gpu else 0
    return {"kept_bytes": kept.nbytes, "total_bytes": total}


def reduce(backend: str, device: str, is_shared: bool) -> dict[str, float]:
    """Sum 1 + rank over all ranks, and have rank 0 send a number to all; `is_shared`: all use the first device."""
    import os

    import torch
    import torch.distributed as dist

    place = torch.device(device)
    if device == "cuda":
        place = torch.device(device, 0 if is_shared else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group(backend)
    total = torch.full((1000,), 1.0 + dist.get_rank(), device=place)
    dist.all_reduce(total)
    sent = torch.tensor([42.0 if dist.get_rank() == 0 else 0.0], device=place)
    dist.broadcast(sent, 0)
    world = dist.get_world_size()
    dist.destroy_process_group()
    return {
        "first": total[0].item(),
        "last": total[-1].item(),
        "sent": sent.item(),
        "world": world,
    }


def shared_storages(device: str) -> dict[str, Any]:
    """Return tensors that share memory on the device, and a module's parameters."""
    import torch

    whole = torch.arange(1 << 20, dtype=torch.float32, device=device)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2).to(device)
    return {
        "whole": whole,
        "view": whole[10:20],
        "again": whole.view(1024, 1024),
        "layer": layer.state_dict(),
    }


def ask_for_too_much(device: str) -> None:
    """Ask for more memory than any device has."""
    import torch

    torch.empty(1 << 46, dtype=torch.uint8, device=device)


def index_out_of_range(device: str) -> float:
    """Read an element beyond a tensor's end. On a GPU a later call raises the error."""
    import torch

    table = torch.arange(10.0, device=device)
    wrong = torch.tensor([3, 12], device=device)
    return table[wrong].sum().item()


def meet(backend: str, device: str) -> None:
    """Begin a process group of ranks that may share one GPU.

    NCCL refuses two ranks on one GPU of a host. So each rank is a host of its own for it.
    """
    import os

    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = "rank " + os.environ["RANK"]
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend)


def part(backend: str, device: str, is_absent: bool) -> None:
    """Make two calls together. Then rank 1 makes another call than rank 0, or none."""
    import time

    import torch
    import torch.distributed as dist

    meet(backend, device)
    x = torch.ones(4, device=device)
    torch.optim.SGD(
        [x], lr=0.1
    )  # as training has one: torch then returns the lines of calls
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    x.sum().item()
    if dist.get_rank() == 0:
        dist.all_reduce(x)
        x.sum().item()
    elif not is_absent:
        dist.broadcast(x, 1)
        x.sum().item()
    while True:
        time.sleep(0.1)


def ask_nccl() -> list[str]:
    """Return what NCCL reports as errors of two sound ranks, and with rank 1 stopped."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    from distmagic.remote.checkup import nccl_ras

    meet("nccl", "cuda")
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    found = []
    if dist.get_rank() == 0:
        found.append(nccl_ras.errors())
        os.kill(pids[1], signal.SIGSTOP)
        try:
            found.append(nccl_ras.errors())
        finally:
            os.kill(pids[1], signal.SIGCONT)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return found


def train_until(device: str, until: str) -> None:
    """Train a small model on this rank's device until there is a file of this name."""
    from pathlib import Path

    import torch

    import distmagic

    model = torch.nn.Linear(512, 512).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while not Path(until).exists():
        optimizer.zero_grad()
        model(torch.ones(64, 512, device=device)).square().mean().backward()
        optimizer.step()
        step += 1
        distmagic.report(step=step)

"""Measures the network between hosts: one rank on each, and pairs of ranks that run a collective at
the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

_SMALL, _LARGE = 2, 2 << 20  # elements of four bytes each
_LARGE_ON_GPUS = 16 << 20
_SMALL_TIMES, _LARGE_TIMES = 30, 5

# The other rank, seconds for 8 bytes, bytes per second.
Measured = tuple[int, float, float]


def measure() -> list[Measured]:
    """Return this rank's measurements with the other rank of each of its pairs: by NCCL if all have
    GPUs, else by gloo.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flag = torch.tensor([int(torch.cuda.is_available())])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    has_gpus = bool(flag.item())
    device = torch.device("cuda" if has_gpus else "cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = _LARGE_ON_GPUS if has_gpus else _LARGE
    found = []
    for pairs in rounds(size):
        other, group = -1, None
        for pair in pairs:
            made = dist.new_group(list(pair), backend="nccl" if has_gpus else "gloo")
            if rank in pair:
                group, other = made, pair[0] + pair[1] - rank
        dist.barrier()
        if group is not None:
            small, large = torch.ones(_SMALL), torch.ones(numbers)
            best_s = _best_s(dist, small.to(device), group, _SMALL_TIMES)
            large_s = _best_s(dist, large.to(device), group, _LARGE_TIMES)
            found.append((other, best_s, 4 * numbers / large_s))
        dist.barrier()
    dist.destroy_process_group()
    return found


def _best_s(dist: Any, tensor: Any, group: Any, times: int) -> float:
    """Return the shortest of `times` measurements: other programs make some of them longer."""
    wait: Callable[[], object] = lambda: None  # noqa: E731
    if tensor.is_cuda:
        import torch

        wait = torch.cuda.synchronize
    best = math.inf
    for _ in range(times):
        wait()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return pairs of ranks, in rounds in which no rank occurs twice: each rank meets several
    others, not all if there are many.

    As at a round table, the first rank stays, and the others move on by one seat each round.
    """
    seats = [*range(size)]
    if size % 2:
        seats.append(-1)  # the rank opposite has a pause
    count = len(seats)
    most = min(count - 1, max(3, math.ceil(math.log2(max(size, 2))) + 1))
    found = []
    for _ in range(most):
        pairs = []
        for one, other in zip(seats[: count // 2], reversed(seats[count // 2 :]), strict=True):  # fmt: skip
            if -1 not in (one, other):
                pairs.append((min(one, other), max(one, other)))
        found.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found

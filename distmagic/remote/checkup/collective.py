"""Measures the network between hosts: one rank on each, and pairs of ranks that run a collective at
the same time. If one stands out, pairs are measured again alone, because they slow each other down.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

_SMALL, _LARGE = 2, 2 << 20  # elements of four bytes each
_LARGE_ON_GPUS = 16 << 20
_SMALL_TIMES, _LARGE_TIMES = 30, 3
_ALONE_S, _MOST_ALONE_S = 0.75, 60.0  # per rank and in all: pairs are measured again
_TRIES = 3  # of a pair that stands out

_SLOW = 0.7  # fraction of the usual bandwidth
_LATE = 3.0  # times the usual latency
_FEW = 3  # pairs, of three hosts
_LATE_S = 0.5e-3  # a smaller latency does not affect training

RankPair = tuple[int, int]
Speed = tuple[float, float]  # seconds for 8 bytes, bytes per second


def compared(speeds: Mapping[Any, Speed]) -> tuple[Speed, set[Any], set[Any]]:
    """Return the speed of most pairs, the pairs of high latency, and those of low bandwidth."""
    times, rates = (sorted(column) for column in zip(*speeds.values(), strict=True))
    # In a tie the fast pairs count: a host is in half of all pairs of four hosts, and in two thirds
    # of three.
    is_few = len(speeds) <= _FEW
    prompt = times[0] if is_few else statistics.median_low(times)
    usual = rates[-1] if is_few else statistics.median_high(rates)
    limit_s = max(_LATE * prompt, prompt + _LATE_S)
    late = {pair for pair, (latency_s, _) in speeds.items() if latency_s > limit_s}
    slow = {pair for pair, (_, rate) in speeds.items() if rate < _SLOW * usual}
    return (prompt, usual), late, slow


def next_alone(speeds: Mapping[RankPair, Speed], tries: Counter[RankPair]) -> RankPair | None:  # fmt: skip
    """Return the pair to measure alone: one with the fewest tries, and of these one that stands
    out, and of these the fastest, which takes the least time.

    If any pair stands out, each has one try, because pairs are slower together than alone. Those
    that still stand out have more.
    """
    _, late, slow = compared(speeds)
    odd = late | slow
    if not tries and not odd:
        return None
    untried = speeds.keys() - tries.keys()
    wanted = {pair for pair in odd | untried if tries[pair] < _TRIES}
    by_turn = lambda pair: (tries[pair], pair not in odd, -speeds[pair][1], pair)  # noqa: E731
    return min(wanted, key=by_turn, default=None)


def measure() -> tuple[dict[RankPair, Speed], set[RankPair]]:
    """Return the speed of each pair of ranks: by NCCL if all have GPUs, else by gloo; and the pairs
    that may be called slow.

    These are the ones that were measured alone, or all of them if none stood out.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flag = torch.tensor([int(torch.cuda.is_available())])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    has_gpus = bool(flag.item())
    device = torch.device("cuda" if has_gpus else "cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    small = torch.ones(_SMALL, device=device)
    large = torch.ones(_LARGE_ON_GPUS if has_gpus else _LARGE, device=device)
    in_rounds = rounds(size)
    every = [pair for pairs in in_rounds for pair in pairs]
    backend = "nccl" if has_gpus else "gloo"
    groups = {pair: dist.new_group(list(pair), backend=backend) for pair in every}
    # The shortest seconds of each pair, of both tensors.
    table = torch.full((len(every), 2), math.inf, dtype=torch.float64)

    def measure_together(pairs: Collection[RankPair]) -> dict[RankPair, Speed]:
        """Measure `pairs` at the same time while the other ranks wait; return all speeds."""
        for pair, best in zip(every, table, strict=True):
            if pair in pairs and rank in pair:
                best[0] = min(best[0], _best_s(small, groups[pair], _SMALL_TIMES))
                best[1] = min(best[1], _best_s(large, groups[pair], _LARGE_TIMES))
        dist.all_reduce(table, dist.ReduceOp.MIN)
        return {
            pair: (small_s, large.nbytes / large_s)
            for pair, (small_s, large_s) in zip(every, table.tolist(), strict=True)
        }

    tries: Counter[RankPair] = Counter()
    for pairs in in_rounds:
        speeds = measure_together(pairs)
        if len(pairs) == 1:
            tries.update(pairs)
    until_s = time.monotonic() + min(size * _ALONE_S, _MOST_ALONE_S)
    # All ranks choose the same pair, because they have the same speeds; rank 0 has the clock.
    while pair := next_alone(speeds, tries):
        is_over = torch.tensor([int(time.monotonic() > until_s)])
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
        tries[pair] += 1
        speeds = measure_together([pair])
    dist.destroy_process_group()
    return speeds, set(tries or speeds)


def _best_s(tensor: Any, group: Any, times: int) -> float:
    """Return the shortest of `times` measurements: other programs make some of them longer."""
    import torch

    best = math.inf
    for _ in range(times):
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize()
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

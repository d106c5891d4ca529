"""How torchrun numbers ranks, as far as a plan can know it."""

from __future__ import annotations

import pytest

from distmagic.planning import torchrun


def rdzv(backend: str, low: int, high: int) -> torchrun.Rendezvous:
    return torchrun.Rendezvous(
        backend=backend,
        address="10.0.0.1",
        port=29500,
        rdzv_id="j",
        min_nodes=low,
        max_nodes=high,
    )


@pytest.mark.parametrize(
    ("backend", "low", "high", "ranks", "world"),
    [
        ("static", 2, 2, (range(4), range(4, 6)), 6),
        ("c10d", 2, 2, (), 6),
        ("c10d", 1, 2, (), 0),
    ],
)
def test_ranks_of_nodes(backend, low, high, ranks, world):
    one = rdzv(backend, low, high)
    assert torchrun.ranks_of_nodes(one, [4, 2]) == ranks
    assert torchrun.world_size(one, [4, 2]) == world

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


@pytest.mark.parametrize(("low", "high", "world"), [(2, 2, 6), (1, 2, 0)])
def test_the_size_of_a_world_is_known_where_no_node_comes_or_goes(low, high, world):
    assert torchrun.world_size(rdzv("c10d", low, high), [4, 2]) == world

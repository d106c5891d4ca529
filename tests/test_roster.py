"""How often the progress of ranks is told."""

from __future__ import annotations

import pytest

from distmagic.remote.roster import pace_s


@pytest.mark.parametrize(("world_size", "seconds"), [(1, 0.1), (8, 0.1), (200, 0.1), (1000, 0.5), (4000, 2.0)])
def test_progress_of_very_many_ranks_is_told_less_often(world_size, seconds):
    assert pace_s(world_size) == pytest.approx(seconds)


@pytest.mark.parametrize("world_size", [500, 1024, 10_000])
def test_a_notebook_never_has_more_than_2000_lines_a_second_to_read(world_size):
    assert world_size / pace_s(world_size) <= 2000.001

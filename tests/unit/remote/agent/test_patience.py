"""When the lead ends ranks that stay and have no cell."""

from __future__ import annotations

from distmagic.remote.agent.patience import CellWait


def test_ranks_end_after_their_time_without_a_cell_on_any_node():
    wait = CellWait(0.0, 30.0)
    assert not wait.is_too_long(100.0, cells=0, is_at_cell=False, has_notebook=True)
    assert not wait.is_too_long(200.0, cells=1, is_at_cell=True, has_notebook=False)
    assert not wait.is_too_long(230.0, cells=1, is_at_cell=False, has_notebook=False)
    # A cell shorter than the time between two looks.
    assert not wait.is_too_long(231.0, cells=2, is_at_cell=False, has_notebook=True)
    assert not wait.is_too_long(261.0, cells=2, is_at_cell=False, has_notebook=True)
    assert wait.is_too_long(262.0, cells=2, is_at_cell=False, has_notebook=True)


def test_without_a_notebook_the_time_counts_before_the_first_cell_too():
    wait = CellWait(0.0, 30.0)
    assert not wait.is_too_long(60.0, cells=0, is_at_cell=False, has_notebook=True)
    assert not wait.is_too_long(90.0, cells=0, is_at_cell=False, has_notebook=False)
    assert wait.is_too_long(91.0, cells=0, is_at_cell=False, has_notebook=False)


def test_ranks_of_a_notebook_end_with_it():
    wait = CellWait(0.0, None)
    assert not wait.is_too_long(1e9, cells=1, is_at_cell=False, has_notebook=False)

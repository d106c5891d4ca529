"""The tiers of the suite: which tests `make test` has, how long all take, and `make test` beside busy processes."""

from __future__ import annotations

import pytest

# A test's name before pytest-xdist adds the group.
NAME = pytest.StashKey[str]()
_CHEAP = ("unit", "transports", "system")
_STARTS_ONCE = ("slurm", "browser")
_LOADS_TORCH_ONCE = {"torch_forks", "compiler_forks"}


def sort_into_tier(item: pytest.Item) -> None:
    """Mark a test as `quick` if `make test` has it, and choose what one worker of pytest-xdist runs as one piece.

    Slurm, JupyterLab and the Pythons that have loaded torch start once. A file is a piece if it is marked so, and if its
    tests need no host.
    """
    needs = {name for mark in item.iter_markers("needs") for name in mark.args}
    is_cheap = not needs and item.nodeid.split("/")[1] in _CHEAP
    if is_cheap or item.get_closest_marker("promise"):
        item.add_marker(pytest.mark.quick)
    if item.get_closest_marker("quick"):
        item.user_properties.append(("tier", "quick"))
    group = next((name for name in _STARTS_ONCE if name in needs), None)
    if is_cheap or item.get_closest_marker("together"):
        group = item.nodeid.partition("::")[0]
    if _forks_torch(item):
        group = "torch"
    if group:
        item.add_marker(pytest.mark.xdist_group(group))


def takes_long(item: pytest.Item) -> bool:
    """Whether a test, or the piece that it is of, takes so long that it is to come first: at the end others would wait for it."""
    return item.get_closest_marker("timeout") is not None or _forks_torch(item)


def _forks_torch(item: pytest.Item) -> bool:
    return not _LOADS_TORCH_ONCE.isdisjoint(getattr(item, "fixturenames", ()))

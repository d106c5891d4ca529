"""Where the notebook of this process runs its cells: said by the magics, asked by `distmagic.run`.

It stands down here, and is the one thing that is kept in this package, because the magics are loaded long before
anything that reaches a host: loading the extension must stay fast.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.request.hosts import Host
from distmagic.request.spec import Access

Place = Callable[[], tuple[tuple[Host, ...], Access]]

_said: list[Place] = []


def say(place: Place) -> None:
    """Have `place` return the hosts and the way to them; the last one that was said counts."""
    _said.append(place)


def forget(place: Place) -> None:
    """Take back what was said."""
    if place in _said:
        _said.remove(place)


def current() -> tuple[tuple[Host, ...], Access] | None:
    """Return the notebook's hosts and the way to them, None outside of a notebook. Raises `SpecError`."""
    return _said[-1]() if _said else None

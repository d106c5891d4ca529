"""The hosts on which this process's notebook runs its cells: the magics register them,
`distmagic.run` reads them.

It is a module of its own because the magics load long before any code that contacts hosts: loading
the extension must stay fast.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.request.access import Access
from distmagic.request.hosts import Hosts

ChooseHosts = Callable[[], tuple[Hosts, Access]]

_registered: list[ChooseHosts] = []


def register(choose: ChooseHosts) -> None:
    """Register `choose`, which returns the hosts and the way to reach them.

    The last registered function is used.
    """
    _registered.append(choose)


def unregister(choose: ChooseHosts) -> None:
    """Undo `register`."""
    if choose in _registered:
        _registered.remove(choose)


def current() -> tuple[Hosts, Access] | None:
    """Return the notebook's hosts and the way to reach them; None outside of a notebook.

    Raises `UsageError`.
    """
    return _registered[-1]() if _registered else None

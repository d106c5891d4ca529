"""Where the notebook of this process runs its cells: registered by the magics, read by `distmagic.run`.

It stands down here because the magics are loaded long before anything that reaches a host: loading the extension must
stay fast.
"""

from __future__ import annotations

from collections.abc import Callable

from distmagic.request.access import Access
from distmagic.request.hosts import Host

ChooseHosts = Callable[[], tuple[tuple[Host, ...], Access]]

_registered: list[ChooseHosts] = []


def register(choose: ChooseHosts) -> None:
    """Have `choose` return the hosts and the way to them; the last one that was registered counts."""
    _registered.append(choose)


def unregister(choose: ChooseHosts) -> None:
    """Take it out again."""
    if choose in _registered:
        _registered.remove(choose)


def current() -> tuple[tuple[Host, ...], Access] | None:
    """Return the notebook's hosts and the way to them, None outside of a notebook. Raises `UsageError`."""
    return _registered[-1]() if _registered else None

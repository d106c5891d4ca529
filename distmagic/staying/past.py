"""What ranks that stay have done so far, by the events of their job: for a kernel that attaches to
them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.state.events import Event


@frozen
class Past:
    """The cells so far. `last` is the number of the newest one, and `running` has the start of the
    cell of each rank that runs one.

    `texts` are what the user wrote, by cell. `ends` has for each rank the end of its last cell of
    the user. `names` are those that cells on a rank have assigned.
    """

    last: int = 0
    texts: Mapping[int, str] = field(default_factory=dict)
    running: Mapping[int, protocol.CellBegan] = field(default_factory=dict)
    ends: Mapping[int, protocol.CellEnded] = field(default_factory=dict)
    names: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @property
    def at_work(self) -> tuple[int, ...]:
        """The ranks that still run the newest cell."""
        started = self.running.items()
        return tuple(sorted(rank for rank, one in started if one.cell == self.last))


def take(past: Past, events: Iterable[Event]) -> Past:
    """Return the past after some events of the session."""
    told = [
        event.what
        for event in events
        if isinstance(event.what, protocol.CellBegan | protocol.CellEnded)
    ]
    if not told:
        return past
    last = past.last
    texts, running = dict(past.texts), dict(past.running)
    ends, names = dict(past.ends), dict(past.names)
    for one in told:
        if isinstance(one, protocol.CellBegan):
            last = max(last, one.cell)
            running[one.rank] = one
            if one.text:
                texts[one.cell] = one.text
        else:
            began = running.pop(one.rank, None)
            names[one.rank] = frozenset(one.names)
            if began is not None and began.is_users:
                ends[one.rank] = replace(one, shown="", value="")
    return Past(last=last, texts=texts, running=running, ends=ends, names=names)

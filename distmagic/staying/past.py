"""What ranks that stay have done so far, by the events of their job: for their next cell, and for
a kernel that attaches to them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.state.events import Event


@frozen
class Past:
    """The cells so far."""

    last: int = 0  # number of the newest cell
    # what the user wrote, by cell
    texts: Mapping[int, str] = field(default_factory=dict)
    # the start of the cell of each rank that runs one
    running: Mapping[int, protocol.CellBegan] = field(default_factory=dict)
    # the end of each rank's last cell of the user
    ends: Mapping[int, protocol.CellEnded] = field(default_factory=dict)
    # those that cells on a rank have assigned
    names: Mapping[int, frozenset[str]] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()  # cells that raised or exited on a rank

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
    failed = set(past.failed)
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
            # Not an interrupt: a user who stops a training keeps what it has done.
            if one.ended.outcome in ("raised", "exited"):
                failed.add(one.cell)
    return Past(
        last=last,
        texts=texts,
        running=running,
        ends=ends,
        names=names,
        failed=frozenset(failed),
    )

"""The first part of a run, as the main thread has it: hosts are reached, are sent what they lack, and start.

    futures of working threads  --Opening-->  events, folded into the state and shown; an interrupt, heeded

The work itself is done by others, on threads of their own; `drive` goes on with `Opening.state` once all have started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from distmagic.errors import Cancelled, DistmagicError
from distmagic.runner.interrupts import Interrupts
from distmagic.state.events import Abandoned, Connected, Event, Launched, Unusable
from distmagic.state.fold import fold
from distmagic.state.model import RunState

_BEAT_S = 0.1

T = TypeVar("T")


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, state: RunState) -> None:
        """Show a state."""

    def finish(self, state: RunState) -> None:
        """Show the last state for good."""


class Opening:
    """Waits for others while the user looks on.

    `clock` tells the seconds since the run began, `serve` answers questions of connections that are being made.
    """

    def __init__(
        self, state: RunState, screen: Screen, clock: Callable[[], float], serve: Callable[[float], None],
        interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self.state = state
        self._screen, self._clock, self._serve, self._interrupts = screen, clock, serve, interrupts
        self._next_s = 0.0

    def tell(self, *what: Launched) -> None:
        """Fold what happened to the run as a whole."""
        self.state = fold(self.state, [Event(node_rank=0, at_s=self._clock(), what=one) for one in what])

    def watch(self, futures: Sequence[Future[Any]], events: Callable[[], Iterable[Event]] = tuple) -> None:
        """Return when all `futures` are done; meanwhile fold and show `events`. Raises KeyboardInterrupt, if there is one.

        What the futures raise is for the caller to look at.
        """
        is_done = False
        while not is_done:
            is_done = not wait(futures, _BEAT_S if self._next_s else 0.0).not_done  # the first look is at once
            self._interrupts.ask(self._serve)
            self.state = fold(self.state, [*events(), Event(node_rank=0, at_s=self._clock(), what=None)])
            if self.state.at_s >= self._next_s:
                self._next_s = self.state.at_s + _BEAT_S
                self._screen.show(self.state)
            if self._interrupts.take():
                raise KeyboardInterrupt

    def watch_hosts(self, links: Sequence[Future[Any]]) -> None:
        """Return when all hosts are reached, or known to be out of reach; one future a host, in order."""
        self.watch(links, lambda: [event for i, link in enumerate(links) for event in _outcome(i, link, self._clock())])

    def result(self, future: Future[T]) -> T:
        """Return what a future returns, or raise what it raises."""
        self.watch([future])
        return future.result()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Show how it ended where the block ends with an error. Raises `Cancelled` for an interrupt."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            error = interrupt if isinstance(interrupt, Cancelled) else Cancelled("Interrupted; nothing was started.")
            self._end(error.message, is_wish=True)
            raise error from None
        except BaseException as error:
            self._end(error.message if isinstance(error, DistmagicError) else repr(error), is_wish=False)
            raise

    def _end(self, why: str, *, is_wish: bool) -> None:
        self.tell(Abandoned(why=why.partition("\n")[0], is_wish=is_wish))
        self._screen.finish(self.state)


def _outcome(node_rank: int, link: Future[Any], at_s: float) -> Iterable[Event]:
    if link.done() and not link.cancelled():
        error = link.exception()
        why = error.message if isinstance(error, DistmagicError) else repr(error)
        yield Event(node_rank=node_rank, at_s=at_s, what=Connected() if error is None else Unusable(why=why))

"""Links to the hosts of a run: all of them are waited for, and the links are given back where no run comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.reach import Reaching
from distmagic.errors import DistmagicError
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.run_loop import RunLoop
from distmagic.state.events import Connected, Unusable


def connect(
    loop: RunLoop, reaching: Reaching, enough: int | None, *, needs_remote: bool = False
) -> tuple[Link, ...]:  # fmt: skip
    """Return a link to each host, showing meanwhile how far each of them is. Arguments and errors are those of `settle`."""
    for host_index, future in enumerate(reaching.futures):
        future.add_done_callback(partial(_report, loop.queue, host_index))
    try:
        loop.wait_for(reaching.futures)
    except KeyboardInterrupt:
        raise reaching.interrupted() from None
    except BaseException:
        reaching.cancel()
        raise
    return reaching.settle(enough, needs_remote=needs_remote)


def _report(queue: EventQueue, host_index: int, future: Future[Link]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        queue.tell(Connected(), node_rank=host_index)
    else:
        why = error.message if isinstance(error, DistmagicError) else repr(error)
        queue.tell(Unusable(why=why), node_rank=host_index)


@contextmanager
def given_back(reaching: Reaching, links: Sequence[Link]) -> Iterator[None]:
    """Where the block ends with an error of ours, let the links rest: the next cell begins over them.

    After anything else, an interrupt say, an answer may be on its way over them: they are closed.
    """
    try:
        yield
    except DistmagicError:
        in_parallel(reaching.give_back, reaching.present, links)
        raise
    except BaseException:
        in_parallel(Link.close, links)
        raise

"""Calls a function for many hosts at once, and combines their errors into one.

Each call has its own thread, so that all calls together take as long as the slowest host. Such a
thread mostly waits for its host. This process's own computing is done for one host at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from distmagic.errors import DistmagicError, HostErrors

# With more hosts, this process's own computing would exceed the time limit of a connection.
MOST_AT_ONCE = 512

A = TypeVar("A")
B = TypeVar("B")


def threads_for(acts: int, name: str) -> ThreadPoolExecutor:
    """Return a pool that runs so many calls at the same time, at most `MOST_AT_ONCE`."""
    return ThreadPoolExecutor(
        max(1, min(acts, MOST_AT_ONCE)), thread_name_prefix=f"distmagic-{name}"
    )


def begin_all(
    name: str, act: Callable[..., B], things: Collection[A], *more: Collection[Any]
) -> list[Future[B]]:
    """Start `act` on all things at the same time; return its futures.

    `name` is the name of the threads.
    """
    pool = threads_for(len(things), name)
    rows = zip(things, *more, strict=True)
    futures = [pool.submit(act, *arguments) for arguments in rows]
    pool.shutdown(wait=False)
    return futures


def in_parallel(
    act: Callable[..., B], things: Collection[A], *more: Collection[Any]
) -> list[B]:
    """Return the results of `act` for all things, computed at the same time.

    An interrupt waits for none of them. If calls fail, the first failure is raised after all calls
    have ended.
    """
    futures = begin_all("parallel", act, things, *more)
    wait(futures)
    return [future.result() for future in futures]


def join_errors(errors: list[BaseException]) -> BaseException:
    """Return the only error, or one that names all hosts.

    An exception that is no distmagic error comes first: it is a bug.
    """
    ours = []
    for error in errors:
        if not isinstance(error, DistmagicError):
            return error
        ours.append(error)
    return HostErrors(tuple(ours)) if len(ours) > 1 else ours[0]


def close_result(future: Future[Any]) -> None:
    """Close the result of a call whose caller no longer waits."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def raise_first(futures: Sequence[Future[Any]]) -> None:
    """Raise the errors of futures, if any: the only error, or one that names all hosts."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise join_errors(errors)

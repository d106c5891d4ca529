"""The same act on many hosts at once, and one error for all that went wrong.

Each act has a thread of its own, so that the slowest host alone says how long all of them take. Most of the time such a
thread waits for its host. What this process itself has to compute it computes for one host at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from distmagic.errors import DistmagicError, HostErrors

# Of more hosts, some would wait longer for this process's own computing than a connection may take.
MOST_AT_ONCE = 512

A = TypeVar("A")
B = TypeVar("B")


def threads_for(acts: int, name: str) -> ThreadPoolExecutor:
    """Return a pool in which so many acts run at the same time, none after another; `MOST_AT_ONCE` of very many."""
    return ThreadPoolExecutor(
        max(1, min(acts, MOST_AT_ONCE)), thread_name_prefix=f"distmagic-{name}"
    )


def begin_all(
    name: str, act: Callable[..., B], things: Sequence[A], *more: Sequence[Any]
) -> list[Future[B]]:
    """Begin the same act on all things at the same time; return its futures. `name` is that of the threads."""
    pool = threads_for(len(things), name)
    futures = []
    for arguments in zip(things, *more, strict=True):
        futures.append(pool.submit(act, *arguments))
    pool.shutdown(wait=False)
    return futures


def in_parallel(
    act: Callable[..., B], things: Sequence[A], *more: Sequence[Any]
) -> list[B]:
    """Return what `act` returns for each of the things, done at the same time. An interrupt waits for none of them.

    Of acts that fail the first one is raised, but only when the others are through.
    """
    futures = begin_all("parallel", act, things, *more)
    wait(futures)
    return [future.result() for future in futures]


def join_errors(errors: list[BaseException]) -> BaseException:
    """Return the one error, or one that names all hosts. What is no error of ours comes first: it is a bug."""
    ours = tuple(error for error in errors if isinstance(error, DistmagicError))
    if len(ours) < len(errors):
        return next(error for error in errors if not isinstance(error, DistmagicError))
    return HostErrors(ours) if len(ours) > 1 else ours[0]


def close_result(future: Future[Any]) -> None:
    """Close what an act has opened for somebody who has left."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def raise_first(futures: Sequence[Future[Any]]) -> None:
    """Raise what went wrong, if anything did: the one error, or one that names all hosts."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise join_errors(errors)

"""Renewing a job's lease while its hosts start, each in a thread of its own."""

from __future__ import annotations

import threading
from typing import Any, cast

from distmagic.connection.lease_keeper import LeaseKeeper
from distmagic.connection.link import Link


class Lock:
    """A lock; another thread comes in as soon as it is free again."""

    def __init__(self, other: Any) -> None:
        self._lock, self._other = threading.Lock(), other

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        other, self._other = self._other, None
        if other is not None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()


def test_of_two_hosts_that_start_in_the_same_moment_both_are_renewed(monkeypatch):
    keeper = LeaseKeeper(60.0)
    first, second = cast(Link, object()), cast(Link, object())
    lock = Lock(lambda: keeper.keep_over_one_more(second))
    monkeypatch.setattr(keeper, "_lock", lock)
    keeper.keep_over_one_more(first)
    assert keeper._links == (first, second)
    keeper.close()

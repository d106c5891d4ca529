"""Where events wait for the main thread: in order, bounded for each node, and nobody waits for room for ever."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

from distmagic.runner import event_queue
from distmagic.runner.event_queue import EventQueue
from distmagic.state.events import Event, Gone, Mended
from tests.lab.waiting import HANG_S


def make() -> EventQueue:
    clock = itertools.count()
    return EventQueue(lambda: float(next(clock)))


def test_events_come_in_order_with_their_time():
    box = make()
    box.put(1, Mended())
    box.put(0, Gone())
    assert box.batch(0.0) == [
        Event(node_rank=1, at_s=0.0, what=Mended()),
        Event(node_rank=0, at_s=1.0, what=Gone()),
    ]
    assert box.batch(0.0) == []


def test_a_node_that_says_much_waits_and_the_others_do_not(monkeypatch):
    monkeypatch.setattr(event_queue, "_AHEAD_BYTES", 2 * 4096)
    box, has_put = make(), threading.Event()

    def say_much() -> None:
        for _ in range(3):
            box.put(0, Mended())
        has_put.set()

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(say_much)
        while len(first := box.batch(10.0)) == 0:
            continue
        box.put(1, Gone())
        found = [*first]
        while len(found) < 4:
            found += box.batch(10.0)
        told.result()
    assert has_put.is_set()
    assert sorted(event.node_rank for event in found) == [0, 0, 0, 1]


def test_of_long_events_fewer_wait(monkeypatch):
    """What waits is bounded in bytes: 256 lines of a mebibyte, of each of many hosts, would fill the memory."""
    monkeypatch.setattr(event_queue, "_AHEAD_BYTES", 20_000)
    box = make()
    box.put(0, Mended(), 15_000)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(box.put, 0, Gone(), 6000)
        # Of another node; alone it has room, however long it is.
        box.put(1, Gone(), 1 << 20)
        first = box.batch(10.0)
        late.result(HANG_S)
    assert [event.what for event in first if event.node_rank == 0][:1] == [Mended()]
    found = [*first, *box.batch(0.0)]
    assert [event.what for event in found if event.node_rank == 0] == [Mended(), Gone()]
    assert len(found) == 3


def test_a_long_event_waits_until_the_others_are_read(monkeypatch):
    monkeypatch.setattr(event_queue, "_AHEAD_BYTES", 20_000)
    box = make()
    box.put(0, Mended(), 15_000)
    box.close()
    box.put(0, Gone(), 6000)  # there is no room for it, and nobody reads any more
    assert [event.what for event in box.batch(0.0)] == [Mended()]


def test_what_an_act_ended_with_never_waits_for_room(monkeypatch):
    monkeypatch.setattr(event_queue, "_AHEAD_BYTES", 4096)
    box = make()
    box.put(0, Mended())
    box.tell(Gone())
    box.wake()
    assert [event.what for event in box.batch(0.0)] == [Mended(), Gone(), None]

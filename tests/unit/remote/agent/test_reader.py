"""A connection over which a notebook follows a job, and which takes all that it is sent."""

from __future__ import annotations

from typing import Any, cast

from distmagic.remote.agent import reader
from distmagic.remote.agent.reader import Reader
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol as p


class Taking:
    """A socket that never blocks, as one on whose other side somebody reads as fast as he can."""

    def __init__(self) -> None:
        self.asked = p.encode(p.FollowJob(job="j", node_rank=0))
        self.taken_bytes = 0
        self.now = 0.0

    def setblocking(self, _: bool) -> None:
        """Never block."""

    def recv(self, _: int) -> bytes:
        """Ask for the job from its first event."""
        return self.asked

    def send(self, data: bytes) -> int:
        """Take all of it, in 30 ms of a clock of its own."""
        self.now += 0.03
        self.taken_bytes += len(data)
        return len(data)

    def monotonic(self) -> float:
        """Return the time of that clock."""
        return self.now


def test_a_reader_that_is_as_fast_as_it_can_be_leaves_each_turn_time_for_other_duties(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 1000)
    journal = Journal(tmp_path)
    for number in range(1000):
        journal.add(p.Notice(text=f"{number:0100}"))
    conn = Taking()
    monkeypatch.setattr(reader, "time", conn)
    one = Reader(cast(Any, conn), 0.0)
    one.receive(journal.last)
    turns = 0
    while not one.has_all(journal):
        before, began_s = conn.taken_bytes, conn.now
        one.send(journal, float(turns))
        assert conn.taken_bytes > before
        assert conn.now - began_s < 0.13
        turns += 1
    assert turns > 10
    assert conn.taken_bytes > 100_000

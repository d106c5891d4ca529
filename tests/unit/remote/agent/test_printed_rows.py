"""Numbers that a rank only prints become its metrics, unless it reports some."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.printed_numbers import PrintedRows


def steps(rows: list[p.MetricRow]) -> list[tuple[float | None, dict[str, float]]]:
    return [(row.step, row.metrics) for row in rows]


def test_a_kind_of_line_counts_from_its_second_one_on():
    printed = PrintedRows()
    printed.add(b"loss: 9.0\nlr: 0.1\nstep 1 loss 3.0 acc 0.1\nlr: 0.1\nsaved\n")
    assert printed.take(1.0) == []
    printed.add(b"step 2 loss 2.0 ac")
    assert printed.take(2.0) == []
    printed.add(b"c 0.2\nstep 2 los")
    assert printed.take(3.0) == [
        p.MetricRow(at_s=1.0, step=1.0, metrics={"loss": 3.0, "acc": 0.1}),
        p.MetricRow(at_s=3.0, step=2.0, metrics={"loss": 2.0, "acc": 0.2}),
    ]
    printed.add(b"s 7\nstep 3 loss nan acc 0.3\n")
    assert [row.step for row in printed.take(4.0)] == [3.0]


def test_a_flood_is_bounded():
    printed = PrintedRows()
    for start in range(0, 200_000, 10_000):
        printed.add(b"".join(b"step %d loss 0.5\n" % n for n in range(start, start + 10_000)))  # fmt: skip
    assert [row.step for row in printed.take(1.0)] == list(range(199_950, 200_000))
    printed.add(b"x" * 300_000)
    printed.add(b"\nstep 1 loss 0.5\n")
    assert steps(printed.take(2.0)) == [(1.0, {"loss": 0.5})]
    many = "".join(f"loss_{n}: 0.{m}\n" for m in (1, 2) for n in range(40))
    printed.add(many.encode())
    assert 0 < len(printed.take(3.0)) < 40


class Rank:
    """A rank and what it writes: to its socket, and to its stdout and stderr."""

    def __init__(self, folder: Path) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        self.writing = [writing for _, writing in pipes]
        hello = p.Worker(rank=3, local_rank=1, world_size=4, restart=2, pid=os.getpid())
        fds = [reading for reading, _ in pipes]
        self.process = RankProcess(ours, hello, fds, folder, 10.0)

    def prints(self, text: str, *, stderr: bool = False) -> None:
        os.write(self.writing[stderr], text.encode())
        self.process.streams[stderr].drain()

    def reports(self, **more: object) -> None:
        message = p.Progress(rank=3, restart=2, at_s=0.5, **more)
        self.socket.send(p.encode(message))

    def progress(self) -> p.Progress | None:
        self.process.read_numbers(12.0)
        return self.process.progress()

    def close(self) -> None:
        self.process.close()
        self.socket.close()
        for fd in self.writing:
            os.close(fd)


@pytest.fixture
def rank(tmp_path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_printed_numbers_are_progress_of_the_rank_and_are_kept_with_its_reports(
    rank, tmp_path
):
    rank.prints("step 1 loss 3.0\nstep 2 loss 2.0\n", stderr=True)
    sent = rank.progress()
    assert (sent.rank, sent.restart, sent.at_s, sent.is_printed) == (3, 2, 2.0, True)
    assert sent.points == {"loss": (2.0, 1.0, 3.0, 2.0, 2.0, 2.0)}
    assert sent.step is None
    kept = (tmp_path / "rank3.reports.jsonl").read_bytes()
    assert json.loads(kept) == {
        "restart": 2,
        "seconds_step_value": {"loss": [[2.0, 1.0, 3.0], [2.0, 2.0, 2.0]]},
    }
    rank.prints("evaluating\n", stderr=True)
    assert rank.progress() is None


def test_nothing_printed_counts_once_the_rank_has_reported_numbers(rank):
    """A report that is still in the socket was made before the second line was printed."""
    row = p.MetricRow(at_s=0.5, step=1.0, metrics={"loss": 3.0})
    rank.reports(points=p.points_of([row]))
    rank.prints("step 1 loss 3.0\nstep 2 loss 2.0\n")
    sent = rank.progress()
    assert (sent.points, sent.is_printed) == (p.points_of([row]), False)
    rank.prints("step 3 loss 3.0\nstep 4 loss 2.0\n")
    assert rank.progress() is None


def test_a_bar_without_numbers_leaves_those_that_are_printed(rank):
    rank.reports(bars=(p.Bar(id=1, desc="train", n=1.0),))
    rank.prints("step 1 loss 3.0\nstep 2 loss 2.0\n")
    sent = rank.progress()
    assert len(sent.points["loss"]) == 2 * 3
    assert sent.is_printed
    assert [bar.desc for bar in sent.bars] == ["train"]

"""How often the progress of ranks is journaled, and which of them have ended."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

import pytest

from distmagic.remote.agent.rank_process import RankProcess
from distmagic.remote.agent.rank_table import RankTable, pace_s
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol as p


@pytest.mark.parametrize(
    ("world_size", "seconds"),
    [(1, 0.1), (8, 0.1), (100, 0.1), (1000, 1.0), (4000, 4.0)],
)
def test_progress_of_very_many_ranks_is_told_less_often(world_size, seconds):
    assert pace_s(world_size) == pytest.approx(seconds)


@pytest.mark.parametrize("world_size", [500, 1024, 10_000])
def test_a_notebook_never_has_more_than_1000_lines_a_second_to_read(world_size):
    assert world_size / pace_s(world_size) <= 1000.001


def a_rank(
    table: RankTable, pid: int, *, rank: int, local_rank: int = 0, restart: int = 0
) -> RankProcess:
    """Have a rank say hello that is this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in ("stdout", "stderr")]
    for _, writing in pipes:
        os.close(writing)
    hello = p.Worker(
        rank=rank,
        local_rank=local_rank,
        world_size=2,
        restart=restart,
        pid=pid,
        local_world_size=2,
    )
    process = RankProcess(
        ours, hello, [reading for reading, _ in pipes], table.folder, 0.0
    )
    table._add_rank(process)
    theirs.close()
    return process


def test_a_rank_that_returns_before_another_one_connects_is_not_all_of_them(tmp_path):
    """So it is in the first round, and when torchrun starts all ranks again, also those that had returned before."""
    selector = selectors.DefaultSelector()
    table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: 0.0)
    assert not table.have_all_returned
    processes = []
    for restart in (0, 1):
        first = a_rank(table, os.getpid(), rank=1, local_rank=1, restart=restart)
        table._end_rank(first, p.Ended(rank=1, restart=restart, outcome="returned"))
        assert not table.have_all_returned
        second = a_rank(table, os.getpid(), rank=0, restart=restart)
        assert not table.have_all_returned
        table._end_rank(second, p.Ended(rank=0, restart=restart, outcome="returned"))
        assert table.have_all_returned
        processes += [first, second]
    for process in processes:
        process.close()
    selector.close()


def test_since_when_torchrun_waits_to_start_ranks_again(tmp_path):
    now = 7.0
    selector = selectors.DefaultSelector()
    table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: now)

    def end(rank: RankProcess, code: int) -> None:
        table._end_rank(rank, rank.end_by_code(code, table.memory))

    end(a_rank(table, os.getpid(), rank=1, local_rank=1), 0)
    assert table.waits_since is None
    old = a_rank(table, os.getpid(), rank=2, local_rank=2)
    end(a_rank(table, os.getpid(), rank=0), 1)
    assert table.waits_since == 7.0
    # They are started again, and only then it is found that one of before had failed, too.
    again = a_rank(table, os.getpid(), rank=0, restart=1)
    end(old, 1)
    assert table.waits_since is None
    # The nodes meet anew without a lost one: nothing has failed.
    again.is_replaced = True
    end(again, -9)
    assert table.waits_since is None
    now = 9.0
    end(a_rank(table, os.getpid(), rank=0, restart=2), -11)
    assert (table.waits_since, table.failed_at) == (9.0, 7.0)
    for rank in table.ranks:
        rank.close()
    selector.close()


def test_a_rank_in_whose_place_another_one_starts_has_ended_before(tmp_path):
    """Torchrun has ended and reaped it, so that nobody can tell how; journaled later, its end would be taken for the new one's."""
    journaled: list[p.Message] = []
    selector = selectors.DefaultSelector()
    table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: 0.0)
    table.journal.add = journaled.append  # type: ignore[method-assign, assignment]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    a_rank(table, child.pid, rank=1)
    a_rank(table, os.getpid(), rank=0, local_rank=1)
    child.kill()
    child.communicate()
    a_rank(table, os.getpid(), rank=1)
    table.end_unreported(0)
    for rank in table.ranks:
        rank.close()
    selector.close()
    assert [type(one).__name__ for one in journaled] == [
        "Worker",
        "Worker",
        "Ended",
        "Worker",
    ]
    assert journaled[2] == p.Ended(rank=1, restart=0, outcome="replaced", code=-15)


def test_how_a_rank_died_is_known_before_torchrun_has_ended_the_others(tmp_path):
    """Torchrun alone learns the exit code of a rank that it reaps before the agent has looked at it."""
    journaled: list[p.Message] = []
    with selectors.DefaultSelector() as selector:
        table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: 0.0)
        table.journal.add = journaled.append  # type: ignore[method-assign, assignment]
        table.listen(str(tmp_path / "ranks"))
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
        )
        a_rank(table, child.pid, rank=1)
        a_rank(table, os.getpid(), rank=0, local_rank=1)
        child.kill()
        child.communicate()
        exits = (p.Exit(rank=1, local_rank=0, pid=child.pid, code=-9),)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as torchrun:
            torchrun.connect(str(tmp_path / "ranks"))
            torchrun.send(p.encode(p.RankExits()))
            torchrun.send(p.encode(p.RankExits(exits=exits)))
        for _ in ("the connection", "its first packet", "the others"):
            for key, _ in selector.select(0):
                key.data()
        for rank in table.ranks:
            rank.close()
        assert table._listener is not None
        table._listener.close()
    ends = [one for one in journaled if isinstance(one, p.Ended)]
    assert [(one.rank, one.outcome, one.code) for one in ends] == [(1, "signalled", -9)]
    assert table.failed_at == 0.0
    # Torchrun may start the rank again: its exit says nothing of how torchrun ends.
    assert table.engine_exits == ()


def test_a_child_of_a_restarted_rank_tears_no_line_of_the_new_one(tmp_path):
    """Both write to one log: each byte of it is shown once, in its order."""
    selector = selectors.DefaultSelector()
    table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: 0.0)
    shown: list[p.Message] = []
    table.journal.add = shown.append  # type: ignore[method-assign, assignment]
    writing = []
    for restart in (0, 1):
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        hello = p.Worker(
            rank=0,
            local_rank=0,
            world_size=1,
            restart=restart,
            pid=os.getpid(),
            local_world_size=1,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [reading for reading, _ in pipes]
        socket.send_fds(theirs, [p.encode(hello)], fds)
        selector.register(ours, selectors.EVENT_READ)
        table._receive_first(ours)
        for fd in fds:
            os.close(fd)
        theirs.close()
        writing.append(pipes[0][1])
        os.close(pipes[1][1])
    old, new = writing
    said = b""
    for number, end in enumerate((old, new, new, old, new)):
        line = b"line %d\n" % number
        os.write(end, line)
        said += line
        for stream in table.streams:
            stream.drain()
        table.write(0.0)
    events = [one for one in shown if isinstance(one, p.Output)]
    covered = [(one.offset, one.size_bytes) for one in events]
    assert covered == [(at, 7) for at in range(0, 35, 7)]
    assert (tmp_path / "rank0.stdout.log").read_bytes() == said
    for end in writing:
        os.close(end)
    for rank in table.ranks:
        rank.close()
    selector.close()


def test_a_rank_gets_one_line_a_prompt_and_only_the_one_it_waits_for(tmp_path):
    journaled: list[p.Message] = []
    selector = selectors.DefaultSelector()
    table = RankTable(tmp_path, Journal(tmp_path), selector, lambda: 0.0)
    table.journal.add = journaled.append  # type: ignore[method-assign, assignment]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    out, err, stdin = os.pipe(), os.pipe(), os.pipe()
    hello = p.Worker(rank=1, local_rank=0, world_size=2, restart=0, pid=os.getpid())
    rank = RankProcess(ours, hello, [out[0], err[0], stdin[1]], tmp_path, 0.0)
    table._add_rank(rank)
    paused = p.Paused(rank=1, restart=0, prompt=1, file="train.py", line=4)

    def say(message: p.Message) -> None:
        theirs.send(p.encode(message))
        table.notice_ends()  # which looks for a rank's last words, and reads what comes before
        table.write(0.0)

    def typed(prompt: int, text: str, of: int = 1) -> None:
        table.type(p.RankInput(rank=of, prompt=prompt, text=text))

    typed(1, "too early")
    os.write(out[1], b"> train.py(4)")
    say(paused)
    kinds = [type(one) for one in journaled]
    assert kinds == [p.Worker, p.Output, p.Paused]  # what it had written comes before
    assert table.has_paused
    os.write(err[1], b"warning")
    ended = p.Ended(rank=1, restart=0, outcome="returned")
    say(p.CellEnded(cell=1, rank=1, ended=ended))
    assert journaled[-1].logged == (13, 7)
    typed(2, "for another prompt")
    typed(1, "for another rank", of=0)
    typed(1, "p x\nimport os")
    typed(1, "once more")
    assert os.read(stdin[0], 1000) == b"p x\n"
    say(p.Resumed(rank=1, restart=0, prompt=1))
    assert not table.has_paused
    typed(1, "too late")
    say(p.Paused(rank=1, restart=0, prompt=2, file="train.py", line=5))
    typed(2, "é" * 4096)
    assert os.read(stdin[0], 10_000) == ("é" * 4096).encode()[:4095] + b"\n"
    say(p.Paused(rank=1, restart=0, prompt=3, file="train.py", line=6))
    table.type(p.RankInput(rank=1, prompt=3, is_end=True))
    assert os.read(stdin[0], 10_000) == b""
    rank.close()
    theirs.close()
    for fd in (out[1], err[1], stdin[0]):
        os.close(fd)
    selector.close()

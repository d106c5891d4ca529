"""An agent whose home is on a file server that fails: at any call, once or from then on, a healthy job goes on and ends well."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.remote.records import environments, places, work_dirs
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol as p
from tests.builders.agent_node import ENGINE, JOB, Node
from tests.builders.descriptors import closed_at_the_end
from tests.builders.file_server import FileServer, chosen, each_error
from tests.builders.messages import START

pytestmark = pytest.mark.usefixtures("own_process")
_DUTY_S = 31.0  # longer than each pause of an agent between two looks after its files
_HELLO = p.Worker(
    rank=0, local_rank=0, world_size=1, restart=0, pid=ENGINE, local_world_size=1
)


@pytest.fixture
def home(home_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an environment that this process belongs to, and logs of small pieces."""
    home = home_in_memory
    monkeypatch.setattr(environments, "_OWN", home / "envs" / ".0123456789abcdef")
    environments._OWN.mkdir(parents=True)
    monkeypatch.setattr(places, "log_limit_bytes", lambda: 8 * 64)
    monkeypatch.setattr(places, "REPORTS_BYTES", 8 * 400)
    return home


def play(
    monkeypatch: pytest.MonkeyPatch, server: FileServer, at: int, *, stays: bool = False
) -> tuple[list[p.Message], list[p.Message]]:
    """Play a job of one rank that prints and reports for three duties and returns, and whose home fails at a call.

    Return how it ended: what was told, and what is in the journal.
    """
    shutil.rmtree(places.home() / "jobs", ignore_errors=True)
    shutil.rmtree(work_dirs.root(), ignore_errors=True)
    places.job_dir(JOB, 0).mkdir(parents=True)
    work = p.WorkDir(name="train", origin="nb")
    path = str(work_dirs.prepare(work, JOB, 0).path)
    start = replace(START, job=JOB, node_rank=0, work=replace(work, path=path))
    told: list[p.Message] = []
    add = Journal.add
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(
            Journal, "add", lambda self, event: (told.append(event), add(self, event))
        )
        server.fail(at, stays=stays)
        node = Node(patch, start)
        stack.callback(node.close)
        stack.callback(shutil.rmtree, node.agent.run_dir, ignore_errors=True)
        reader = stack.enter_context(node.follow())
        rank = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        rank.connect(str(node.agent.run_dir / places.RANKS))
        pipes = [os.pipe(), os.pipe()]
        socket.send_fds(rank, [p.encode(_HELLO)], [reading for reading, _ in pipes])
        for number in range(12):
            os.write(pipes[0][1], b"step %d: loss 0.25\n" % number)
            row = p.MetricRow(at_s=1.0, step=number, metrics={"loss": 0.25})
            rank.send(
                p.encode(
                    p.Progress(
                        rank=0,
                        restart=0,
                        at_s=1.0,
                        step=number,
                        points=p.points_of([row]),
                    )
                )
            )
            node.step(_DUTY_S / 6)
        rank.send(p.encode(p.Ended(rank=0, restart=0, outcome="returned", code=0)))
        for both in pipes:
            for descriptor in both:
                os.close(descriptor)
        node.step()
        node.step(_DUTY_S)
        node.end()
        assert node.agent.rank_table.ranks == [], "it and its files are closed"
        reader.close()
        node.step()
        assert node.agent.may_go()
        server.fail(-1, stays=False)
        kept = [*node.events(p.Ended), *node.events(p.Final)]
    return [event for event in told if isinstance(event, p.Ended | p.Final)], kept


@each_error
@pytest.mark.parametrize("stays", [False, True])
def test_no_error_of_the_home_ends_a_healthy_job(home, monkeypatch, stays, home_error):
    server = FileServer(monkeypatch, home, home_error)
    well, _ = play(monkeypatch, server, -1)
    calls = server.calls_before
    assert len(calls) > 100
    for at in range(0, len(calls), 7) if stays else chosen(calls):
        with closed_at_the_end():
            told, kept = play(monkeypatch, server, at, stays=stays)
        assert told == well, server.failed
        assert stays or kept == well, server.failed

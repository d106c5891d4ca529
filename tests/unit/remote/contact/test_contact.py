"""The process behind one SSH channel, for real, and an agent that is played: who leaves when, and what is still told."""

from __future__ import annotations

import json
import secrets
import select
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, PreflightError
from distmagic.payload import bundle
from distmagic.remote.records import journal, listing, places
from distmagic.remote.wire import protocol as p
from distmagic.request.hosts import LOCALHOST
from distmagic.transports.local import LocalTransport

HELLO = p.Hello(protocol=p.PROTOCOL, job="j", node_rank=0, hostname="a", pid=7)
FINAL = p.Final(reason="done")


class PlayedAgent:
    """The listening socket of a job's agent, as its contact finds it."""

    def __init__(self, job: str) -> None:
        self.job, self.run_dir = job, places.make_run_dir(job, 0)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.run_dir / "readers"))
        self.listener.listen(1)
        self.listener.settimeout(20.0)
        self.keep_journal()

    def keep_journal(self) -> None:
        """Have on disk what an agent of this job has said in all."""
        folder = places.job_dir(self.job, 0)
        folder.mkdir(parents=True)
        (folder / journal.FILE).write_bytes(p.encode(HELLO, 1) + p.encode(FINAL, 2))

    def leave(self) -> None:
        """Be gone, as an agent that has ended."""
        self.listener.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A conversation with this machine, which has a home directory of its own."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    found = Link.open(LOCALHOST, LocalTransport(), sys.executable, bundle.build())
    yield found
    found.close()


@pytest.fixture
def agent(link: Link) -> Iterator[PlayedAgent]:
    """An agent of a job, on this machine."""
    played = PlayedAgent(secrets.token_hex(6))
    yield played
    played.leave()


def test_what_an_agent_says_after_it_has_stopped_listening_is_told(link: Link, agent: PlayedAgent) -> None:
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    conn, _ = agent.listener.accept()
    conn.sendall(p.encode(HELLO, 1))
    events = link.events()
    assert next(events) == (1, HELLO)
    conn.recv(65536)
    conn.shutdown(socket.SHUT_RD)  # what is sent to it from now on fails, as when it is about to exit
    link.send(p.StopNode(grace_s=0.0))
    link.send(p.RenewLease())
    conn.sendall(p.encode(FINAL, 2))
    agent.leave()
    conn.close()
    assert list(events) == [(2, FINAL)]


def test_what_an_agent_has_not_sent_when_it_leaves_comes_from_its_journal(link: Link, agent: PlayedAgent) -> None:
    """It waits no longer for a connection that takes nothing, and drops it in the middle of a line."""
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    conn, _ = agent.listener.accept()
    conn.recv(65536)
    conn.sendall(p.encode(HELLO, 1) + p.encode(FINAL, 2)[:9])
    agent.leave()
    conn.close()
    assert list(link.events()) == [(1, HELLO), (2, FINAL)]


def test_a_connection_that_an_agent_drops_while_its_job_runs_is_lost(link: Link, agent: PlayedAgent) -> None:
    """So that the notebook connects again: the job has not ended."""
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    conn, _ = agent.listener.accept()
    conn.recv(65536)
    conn.sendall(p.encode(HELLO, 1))
    conn.close()
    events = link.events()
    assert next(events) == (1, HELLO)
    with pytest.raises(ConnectionLost):
        next(events)


def test_an_agent_that_leaves_before_it_has_let_anybody_in(link: Link, agent: PlayedAgent) -> None:
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    assert select.select([agent.listener], [], [], 20.0)[0]  # the kernel has taken the connection; nobody accepts it
    agent.leave()
    assert list(link.events()) == [(1, HELLO), (2, FINAL)]


def test_an_agent_of_another_version_is_not_spoken_to(link: Link, agent: PlayedAgent) -> None:
    about = {"protocol": 1, "job": agent.job, "node_rank": 0, "hosts": ["a"], "began_s": 1.5}
    (places.job_dir(agent.job, 0) / listing.FILE).write_text(json.dumps(about))
    assert [(one.job, one.is_running, one.protocol) for one in link.jobs()] == [(agent.job, True, 1)]
    with pytest.raises(PreflightError) as caught:
        link.stop(agent.job, 0)
    assert str(caught.value) == f"localhost: {p.another_version(agent.job, 1)}."

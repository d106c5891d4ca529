"""The process behind one SSH channel, for real, and an agent that is played: who leaves when, and what is still told."""

from __future__ import annotations

import array
import errno
import fcntl
import grp
import hashlib
import io
import json
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.connection.requests import host_requests, job_requests
from distmagic.errors import ConnectionLost, PreflightError
from distmagic.payload import bundle
from distmagic.planning import preflight
from distmagic.remote.contact import boot, contact, relay, template_client
from distmagic.remote.contact.agents import Agents
from distmagic.remote.records import journal, listing, logs, places, work_dirs
from distmagic.remote.system import processes
from distmagic.remote.system.device_claims import DeviceClaims
from distmagic.remote.wire import protocol as p
from distmagic.request.hosts import LOCALHOST
from distmagic.transports.local import LocalTransport
from tests import REPOSITORY
from tests.builders.messages import START
from tests.lab import wait_until
from tests.lab.waiting import HANG_S

HELLO = p.Hello(protocol=p.PROTOCOL, job="j", node_rank=0, hostname="a", pid=7)
FINAL = p.Final(reason="done")


class PlayedAgent:
    """The listening socket of a job's agent, as its contact finds it."""

    def __init__(self, job: str) -> None:
        self.job, self.run_dir = job, places.make_run_dir(job, 0)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.run_dir / "readers"))
        self.listener.listen(1)
        self.listener.settimeout(HANG_S)
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
    found = open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())
    yield found
    found.close()


@pytest.fixture
def agent(link: Link) -> Iterator[PlayedAgent]:
    """An agent of a job, on this machine."""
    played = PlayedAgent(secrets.token_hex(6))
    yield played
    played.leave()


def test_what_an_agent_says_after_it_has_stopped_listening_is_told(link, agent):
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    conn, _ = agent.listener.accept()
    conn.sendall(p.encode(HELLO, 1))
    events = link.events()
    assert next(events) == (1, HELLO)
    conn.recv(65536)
    # What is sent to it from now on fails, as when it is about to exit.
    conn.shutdown(socket.SHUT_RD)
    link.send(p.StopNode(grace_s=0.0))
    link.send(p.RenewLease())
    conn.sendall(p.encode(FINAL, 2))
    agent.leave()
    conn.close()
    assert list(events) == [(2, FINAL)]


def test_devices_are_free_when_the_conversation_that_claimed_them_ends(link):
    devices = (f"GPU-{secrets.token_hex(8)}",)
    other = open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())

    def claim(one: Link, job: str) -> list[str]:
        others = host_requests.claim_devices(one, job, devices)
        return [claim.job for claim in others]

    with closing(other):
        assert claim(link, "j-1") == []
        assert claim(other, "j-2") == ["j-1"]
        assert host_requests.claim_devices(link, "j-1", ()) == ()
        assert claim(other, "j-2") == []
    # A job that does not come to an agent has no devices either.
    wait_until(lambda: not claim(link, "j-3"), "the other one's end")
    with pytest.raises(PreflightError, match="--cwd"):
        link.start(replace(START, job="j-3", cwd="/no/such/folder"))
    third = open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())
    with closing(third):
        assert claim(third, "j-4") == []


def test_what_an_agent_has_not_sent_when_it_leaves_comes_from_its_journal(link, agent):
    """It waits no longer for a connection that takes nothing, and drops it in the middle of a line."""
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    conn, _ = agent.listener.accept()
    conn.recv(65536)
    conn.sendall(p.encode(HELLO, 1) + p.encode(FINAL, 2)[:9])
    agent.leave()
    conn.close()
    assert list(link.events()) == [(1, HELLO), (2, FINAL)]


def test_a_connection_that_an_agent_drops_while_its_job_runs_is_lost(link, agent):
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


def test_an_agent_that_closes_one_socket_after_the_other_is_gone(monkeypatch):
    """So the kernel closes those of a killed one. A notebook that took it for a broken connection would drop that of other runs."""
    looks = [False, True, True]
    monkeypatch.setattr(relay.listing, "is_running", lambda *_: looks.pop())
    assert not relay._still_runs(p.FollowJob(job="j", node_rank=0))
    assert not looks


def test_an_agent_that_leaves_before_it_has_let_anybody_in(link, agent):
    link.attach(p.FollowJob(job=agent.job, node_rank=0))
    # The kernel has taken the connection; nobody accepts it.
    assert select.select([agent.listener], [], [], HANG_S)[0]
    agent.leave()
    assert list(link.events()) == [(1, HELLO), (2, FINAL)]


def test_an_agent_of_another_version_is_not_spoken_to(link, agent):
    about = {
        "protocol": 1,
        "job": agent.job,
        "node_rank": 0,
        "hosts": ["a"],
        "began_s": 1.5,
    }
    (places.job_dir(agent.job, 0) / listing.FILE).write_text(json.dumps(about))
    assert [
        (one.job, one.is_running, one.protocol) for one in host_requests.list_jobs(link)
    ] == [(agent.job, True, 1)]
    with pytest.raises(PreflightError) as caught:
        job_requests.stop(link, agent.job, 0, 3.0)
    assert str(caught.value) == f"localhost: {p.another_version(agent.job, 1)}."


# ---- hosts on which something is amiss


def test_an_agent_that_can_not_begin_is_told_with_its_last_words_and_leaves_nothing(
    link, tmp_path
):
    # Somebody makes room: the program of the agent is gone.
    shutil.rmtree(tmp_path / "blobs")
    job = f"job-{secrets.token_hex(4)}"
    with pytest.raises(PreflightError) as caught:
        link.start(replace(START, job=job, node_rank=0))
    assert caught.value.host == "localhost"
    assert os.strerror(errno.ENOENT) in caught.value.message
    assert not places.run_dir(job, 0).exists()


def test_a_full_disk_is_a_fact_and_jobs_can_be_listed_and_stopped(
    link, agent, tmp_path, golden
):
    python = tmp_path / "python-that-writes-nothing"
    python.write_text(f'#!/bin/sh\nulimit -f 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with closing(
        open_link(LOCALHOST, LocalTransport(), str(python), bundle.build())
    ) as other:
        assert other.facts.write_error == "[Errno 27] File too large"
        other.attach(p.FollowJob(job=agent.job, node_rank=0))
        agent.leave()
        assert list(other.events()) == [(1, HELLO), (2, FINAL)]
        assert host_requests.list_jobs(other) == ()
        with pytest.raises(PreflightError) as caught:
            preflight.check("gpu-a", other.facts, None)
    golden(caught.value)


def test_a_full_disk_without_the_bundle(tmp_path, monkeypatch):
    made = bundle.build()
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "other"))
    python = tmp_path / "python-that-writes-nothing"
    python.write_text(f'#!/bin/sh\nulimit -f 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(PreflightError, match=re.escape(f"{tmp_path}/other: ")):
        open_link(LOCALHOST, LocalTransport(), str(python), made)


@pytest.mark.parametrize(("role", "lives"), [("agent", True), ("worker", False)])
def test_an_agent_whose_socket_somebody_has_removed_is_not_killed(
    link, tmp_path, role, lives
):
    """A cleaner of /tmp takes what is old; what an agent left that is dead is ended."""
    job = f"1121-000000-{secrets.token_hex(4)}"
    run_dir = places.make_run_dir(job, 0)
    code = tmp_path / "blobs" / "waiting"
    code.write_text("print(flush=True); input()")
    waits = [sys.executable, "-u", str(code), role]
    process = subprocess.Popen(
        waits,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, processes.MARK: job},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        # Less than a day: hosts of the lab share this /tmp, and remove what seems to be forgotten there.
        os.utime(run_dir, (1, time.time() - 3600))
        with closing(
            open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())
        ) as other:
            host_requests.route_to(other, "")  # it has swept by now
        assert (process.poll() is None) is lives
        assert run_dir.exists() is lives
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
        shutil.rmtree(run_dir, ignore_errors=True)


@pytest.fixture
def hidden(link: Link, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of the agent of job `hidden.args[-1]`, whose directory in /tmp somebody has removed."""
    job = f"1121-000000-{secrets.token_hex(4)}"
    code = tmp_path / "blobs" / "waiting"
    code.write_text("print(flush=True); input()")
    process = subprocess.Popen(
        [sys.executable, "-u", str(code), "agent", job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, processes.MARK: job},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    folder = places.job_dir(job, 0)
    folder.mkdir(parents=True)
    hello = replace(HELLO, job=job, pid=process.pid)
    (folder / journal.FILE).write_bytes(p.encode(hello, 1))
    listing.remember(folder, replace(START, job=job, node_rank=0))
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_a_job_whose_socket_somebody_has_removed_is_running(link, hidden, golden):
    job = str(list(hidden.args)[-1])  # type: ignore[arg-type]
    (listed,) = host_requests.list_jobs(link, job)
    assert listed.is_running
    with golden.raises(PreflightError):
        host_requests.remove_job(link, job)
    # Its agent is about to make another one: whoever follows it connects again.
    link.attach(p.FollowJob(job=job, node_rank=0))
    with pytest.raises(ConnectionLost):
        list(link.events())


def test_a_node_that_never_began_on_this_host_has_nothing_to_tell(link, golden):
    """The kernel that started the job was killed before it came to this host."""
    link.attach(p.FollowJob(job="never-begun", node_rank=1))
    with golden.raises(PreflightError):
        list(link.events())


def test_an_agent_that_has_said_its_last_word_is_not_running(hidden):
    """It removes its directory itself, and waits for the other nodes' end."""
    job = str(list(hidden.args)[-1])  # type: ignore[arg-type]
    assert listing.is_running(job, 0)
    with (places.job_dir(job, 0) / journal.FILE).open("ab") as file:
        file.write(p.encode(FINAL, 2))
    assert not listing.is_running(job, 0)


def test_an_agent_that_never_came_to_say_who_it_is_is_swept_with_its_node(link, hidden):
    """Its process was stopped, or waits for a disk, since it was started."""
    job = str(list(hidden.args)[-1])  # type: ignore[arg-type]
    (places.job_dir(job, 0) / journal.FILE).unlink()
    assert job_requests.sweep(link, job, 0) == p.Final(reason="swept")
    assert hidden.wait() == -signal.SIGKILL


def test_an_agent_that_is_just_being_started_is_swept_by_nobody(link, hidden):
    """Two hosts on one machine join an elastic job at the same time; it has not noted its number yet."""
    job = str(list(hidden.args)[-1])  # type: ignore[arg-type]
    run_dir = places.make_run_dir(job, 1)
    try:
        with places.reader_listener(run_dir):
            for node_rank in (None, 2):
                assert job_requests.sweep(link, job, node_rank) == p.Final(
                    reason="swept"
                )
        assert hidden.poll() is None
        assert run_dir.exists()
        assert job_requests.sweep(link, job, 0) == p.Final(reason="swept")
        assert hidden.wait() == -signal.SIGKILL
    finally:
        shutil.rmtree(run_dir)


@pytest.mark.parametrize(("node_rank", "left"), [(0, [1]), (1, [0]), (None, [0, 1])])
def test_a_sweep_ends_one_node_and_what_is_dead_and_no_agent_of_another_node(
    link, marks, node_rank, left
):
    """One host under two names in a list of hosts is two nodes."""
    job = f"1121-000000-{secrets.token_hex(4)}"
    env = {**os.environ, **marks, processes.MARK: job}
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                subprocess.Popen(
                    waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
                )
            )
            for _ in range(
                3
            )  # the last one has no directory: what a dead agent has left
        ]
        for agent in agents:
            assert agent.stdout is not None
            agent.stdout.readline()
        for rank, agent in enumerate(agents[:2]):
            processes.note(agent.pid, places.make_run_dir(job, rank) / places.PID)
            stack.callback(shutil.rmtree, places.run_dir(job, rank), ignore_errors=True)
        assert job_requests.sweep(link, job, node_rank) == p.Final(reason="swept")
        assert [
            rank for rank, agent in enumerate(agents) if agent.poll() is None
        ] == left
        assert [rank for rank in (0, 1) if places.run_dir(job, rank).exists()] == left


def test_a_host_is_tidied_when_the_notebook_has_its_answer(monkeypatch):
    """On a slow disk it takes longer than the notebook waits."""
    order: list[str] = []
    monkeypatch.setattr(contact.sweep, "sweep_dead", lambda: order.append("sweep"))
    monkeypatch.setattr(contact.expiry, "tidy", lambda: order.append("tidy"))
    played: Any = SimpleNamespace(
        _send_facts=lambda: order.append("facts"), _line=lambda: None
    )
    contact.Contact.run(played)
    assert order == ["facts", "sweep", "tidy"]


def test_a_notebook_that_is_silent_while_devices_are_kept_is_knocked_at(monkeypatch):
    """A server learns only so that a firewall has cut the connection."""
    knocked: list[bytes] = []
    silence = iter([[], [], [], [0]])
    monkeypatch.setattr(contact.select, "select", lambda *_: (next(silence), [], []))
    monkeypatch.setattr(contact.os, "read", lambda *_: b"")
    played: Any = SimpleNamespace(
        lines=SimpleNamespace(line=lambda: None),
        _receiver=SimpleNamespace(awaited=()),
        _devices=SimpleNamespace(descriptors=(7,)),
        write=knocked.append,
        _answer_by_nothing=lambda: None,
    )
    assert contact.Contact._line(played) is None
    assert knocked == [b"\n"] * 3


@pytest.mark.parametrize(
    ("request_", "waits"),
    [
        (p.CheckBlobs(blobs=()), True),
        (p.GetFreePort(address="a"), True),
        (START, False),
        (p.PlaceFiles(folder=p.Folder(), files=()), False),
        (p.GetFacts(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_blobs_are_awaited_until_a_job_or_files_have_them(request_, waits):
    """A link stays open between runs: 20,000 files that came over it are not touched for ever."""
    receiver = SimpleNamespace(awaited=(Path("blob"),), close=lambda: None)
    played: Any = SimpleNamespace(
        _receiver=receiver, _handlers={type(request_): lambda _: None}
    )
    contact.Contact._answer(played, request_)
    assert bool(receiver.awaited) == waits


def test_more_jobs_than_fit_into_a_line(link, tmp_path):
    hosts = tuple(f"node{n:04d}.cluster.example.org" for n in range(500))
    for n in range(100):
        start = replace(START, job=f"job-{n}", node_rank=0, hosts=hosts)
        folder = places.job_dir(start.job, 0)
        folder.mkdir(parents=True)
        listing.remember(folder, start)
        (folder / journal.FILE).touch()
    found = host_requests.list_jobs(link)
    assert sum(len(p.encode(p.Jobs(jobs=(one,)))) for one in found) > p.MAX_LINE_BYTES
    assert sorted(one.job for one in found) == sorted(f"job-{n}" for n in range(100))
    assert [one.job for one in host_requests.list_jobs(link, "job-7")] == ["job-7"]
    assert host_requests.list_jobs(link, "job-777") == ()


def test_an_agent_that_is_stopped_is_there_and_nobody_waits_for_it(link, agent, golden):
    listing.remember(
        places.job_dir(agent.job, 0), replace(START, job=agent.job, node_rank=0)
    )
    with ExitStack() as stack:
        while places.listens(path := agent.run_dir / "readers"):
            conn = stack.enter_context(socket.socket(socket.AF_UNIX))
            conn.setblocking(False)
            if conn.connect_ex(str(path)) == errno.EAGAIN:
                break  # no more connections fit into its queue
        assert [
            (one.job, one.is_running)
            for one in host_requests.list_jobs(link, agent.job)
        ] == [(agent.job, True)]
        with pytest.raises(PreflightError) as caught:
            job_requests.stop(link, agent.job, 0, 3.0)
    golden(str(caught.value).replace(agent.job, "JOB"))


def test_a_job_that_was_followed_is_not_refused_for_an_error_of_the_system(
    link, agent, golden
):
    """A refusal would end a healthy run, and the error may pass: the notebook connects again."""
    folder = places.job_dir(agent.job, 0)
    shutil.rmtree(agent.run_dir)
    listing.remember(folder, replace(START, job=agent.job, node_rank=0))
    (folder / journal.FILE).unlink()
    (folder / journal.FILE).mkdir()
    link.attach(p.FollowJob(job=agent.job, node_rank=0, after=7))
    with pytest.raises(ConnectionLost) as caught:
        next(link.events())
    golden(str(caught.value).replace(agent.job, "JOB"))


def test_a_template_that_has_no_time_is_there():
    folder = places.make_warm_dir(secrets.token_hex(8), "key")
    try:
        with (
            socket.socket(socket.AF_UNIX) as listener,
            socket.socket(socket.AF_UNIX) as first,
        ):
            listener.bind(str(folder / places.TEMPLATE))
            listener.listen(0)
            first.connect(str(folder / places.TEMPLATE))
            assert template_client._is_there(folder)
        assert not template_client._is_there(folder)
    finally:
        shutil.rmtree(folder)


def test_a_result_counts_as_fetched_once_the_notebook_has_it(link):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    (folder / "rank0.result").write_bytes(b"12345")
    # As where the connection breaks then: it is sent, and may be lost on the way.
    link.send(p.GetFile(job="job-1", node_rank=0, name="rank0.result"))
    link.take(link.answer(p.Data).size_bytes, lambda data: None)
    host_requests.route_to(link, "")
    assert [path.name for path in folder.iterdir()] == ["rank0.result"]
    for name in ("rank1.result", "../x.result", "rank0"):
        link.send(p.ResultTaken(job="job-1", node_rank=0, name=name))
    job_requests.fetch(
        link,
        p.GetFile(job="job-1", node_rank=0, name="rank0.result", offset=2),
        lambda data: None,
        limit_bytes=5,
    )
    host_requests.route_to(link, "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank0.result",
        "rank0.result.fetched",
    ]


def test_whether_a_rank_has_a_log_is_asked_without_its_bytes(link):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    (folder / "rank0.stderr.log").write_bytes(b"first\nsecond\n")
    assert job_requests.has_logs(link, "job-1", 0, 0)
    assert not job_requests.has_logs(link, "job-1", 0, 1)
    assert job_requests.newest_logs(link, "job-1", 0, 0, 100) == "first\nsecond\n"
    _, newest = job_requests.newest_logs(link, "job-1", 0, 0, 9).splitlines()
    assert newest == "second"


def test_the_streams_of_a_rank_come_in_the_order_of_its_journal(link):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    (folder / "rank0.stdout.log").write_bytes(b"one\nthree\nfive\nseven")
    (folder / "rank0.stderr.log").write_bytes(b"two\nfour\nsix\n")
    outputs = [("stdout", 4), ("stderr", 4), ("stdout", 12), ("stderr", 9), ("stdout", 15), ("stderr", 13)]  # fmt: skip
    lines = []
    done = {"stdout": 0, "stderr": 0}
    for number, (stream, end) in enumerate(outputs, start=1):
        size = end - done[stream]
        event = p.Output(rank=0, stream=stream, offset=done[stream], size_bytes=size)
        lines.append(p.encode(event, number))
        lines.append(p.encode(replace(event, rank=1, offset=1 << 20), number))
        done[stream] = end
    (folder / "chatter.jsonl").write_bytes(b"".join(lines) + b'{"t":"output"')

    def newest(most: int) -> str:
        return job_requests.newest_logs(link, "job-1", 0, 0, most, by_time=True)

    whole = "one\ntwo\nthree\nfour\nfive\nsix\nseven"
    assert newest(100) == whole
    note, last = newest(14).split("\n", 1)
    assert note.startswith("... 10 bytes of stdout not shown")
    assert last == "two\nfour\nfive\nsix\nseven"


def test_the_end_of_a_log_in_pieces_is_asked_for_by_its_size(link):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    (folder / "rank0.stdout.log").write_bytes(b"01234")
    (folder / "rank0.stdout.log.5").write_bytes(b"56789")
    for offset, most_bytes, sent in [
        (0, None, b"0123456789"),
        (0, 3, b"789"),
        (0, 7, b"3456789"),
        (0, 10, b"0123456789"),
        (0, 99, b"0123456789"),
        (4, 7, b"456789"),
        (8, 7, b"89"),
        (99, 7, b""),
    ]:
        got = bytearray()
        about = job_requests.fetch(
            link,
            p.GetFile(
                job="job-1", node_rank=0, name="rank0.stdout.log", offset=offset,
                most_bytes=most_bytes,
            ),
            got.extend,
            limit_bytes=10,
        )  # fmt: skip
        assert bytes(got) == sent
        assert about == p.Data(size_bytes=len(sent), skipped_bytes=10 - len(sent))


def test_a_part_of_a_log_is_found_though_earlier_bytes_are_gone(link):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    log = logs.Log(folder / "rank0.stdout.log", 10 * logs.PIECES)
    for number in range(30):
        log.append(b"%09d\n" % number)
    log.close()
    for begin, end, last in ((250, 270, 26), (250, None, 29)):
        got = bytearray()
        request = p.GetFile(
            job="job-1", node_rank=0, name="rank0.stdout.log", begin=begin, end=end
        )
        job_requests.fetch(link, request, got.extend, limit_bytes=1000)
        lines = [b"%09d" % number for number in range(25, last + 1)]
        assert got.splitlines() == lines


def test_of_a_long_log_no_more_is_sent_than_is_shown(link, monkeypatch):
    folder = places.job_dir("job-1", 0)
    folder.mkdir(parents=True)
    with (folder / "rank0.stdout.log").open("wb") as file:
        file.truncate(3 << 30)  # no whole file of this size is taken
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    taken = []
    take = link.take

    def counting(size: int, write: Callable[[bytes], object]) -> None:
        taken.append(size)
        take(size, write)

    monkeypatch.setattr(link, "take", counting)
    about, newest = job_requests.newest_logs(link, "job-1", 0, 0, 1000).splitlines()
    assert newest == "last"
    assert "3,221,225,473 bytes" in about
    assert about.endswith("/jobs/job-1")
    assert taken == [1000]


TOUCHES_OFTEN = """
from distmagic.remote.contact import contact
contact._TOUCH_S = 0.02
contact.Contact(0o22).run()
"""


def test_a_payload_that_waits_for_other_hosts_is_kept_from_those_who_clean_up(
    tmp_path, marks
):
    """Between its arrival here and the start minutes may go by, while others receive it."""
    data = b"the payload"
    blob = p.Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    file = tmp_path / "blobs" / blob.sha256
    file.parent.mkdir()
    file.write_bytes(data)
    file.chmod(0o600)
    env = {
        **os.environ,
        **marks,
        "DISTMAGIC_HOME": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    argv = [sys.executable, "-c", TOUCHES_OFTEN]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as contact:
        assert contact.stdin is not None
        assert contact.stdout is not None
        assert isinstance(p.decode(contact.stdout.readline())[1], p.Facts)
        contact.stdin.write(p.encode(p.CheckBlobs(blobs=(blob,))))
        contact.stdin.flush()
        assert p.decode(contact.stdout.readline())[1] == p.MissingBlobs()
        os.utime(file, (1, 1))
        wait_until(lambda: file.stat().st_mtime > 1, "the file to be touched")
        contact.stdin.close()
        assert contact.wait(HANG_S) == 0


@pytest.fixture
def piped(tmp_path, marks) -> Iterator[subprocess.Popen[bytes]]:
    """A contact that has sent its facts."""
    env = {
        **os.environ,
        **marks,
        "DISTMAGIC_HOME": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    (tmp_path / "blobs").mkdir()
    program = (
        "from distmagic.remote.contact import contact; contact.Contact(0o22).run()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env,
    ) as contact:  # fmt: skip
        assert isinstance(p.decode(contact.stdout.readline())[1], p.Facts)
        yield contact
        contact.stdin.close()
        assert contact.wait(HANG_S) == 0


def test_a_contact_answers_what_it_waits_on_as_the_notebook_does(piped):
    """The rest of what it has is held back by srun until something comes back."""
    data = b"the payload"
    blob = p.Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    offer = p.encode(p.OfferBlobs(blobs=(blob,)))
    piped.stdin.write(b"\n" + offer[:9])
    assert piped.stdout.readline() == b"\n"
    piped.stdin.write(offer[9:])
    assert p.decode(piped.stdout.readline())[1] == p.MissingBlobs(sha256=(blob.sha256,))
    piped.stdin.write(data[:4])
    assert piped.stdout.readline() == b"\n"
    piped.stdin.write(data[4:])
    assert p.decode(piped.stdout.readline())[1] == p.MissingBlobs()
    piped.stdin.write(p.encode(p.RenewLease()))  # no message answers it
    assert piped.stdout.readline() == b"\n"
    piped.stdin.write(b"\n" + p.encode(p.ListTemplates(owner="nb")))
    assert p.decode(piped.stdout.readline())[1] == p.Templates()


def test_a_contact_sends_no_empty_line_to_a_notebook_that_sends_none(piped):
    piped.stdin.write(p.encode(p.RenewLease()))
    offer = p.encode(p.CheckBlobs(blobs=()))
    piped.stdin.write(offer[:9])
    wait_until(lambda: not unread(piped.stdin), "the contact to take the part")
    piped.stdin.write(offer[9:])
    assert p.decode(piped.stdout.readline())[1] == p.MissingBlobs()


def unread(pipe: Any) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


FLOODED = """
import errno, os, socket
from distmagic.remote.contact import agents, contact
from distmagic.remote.records import logs, places
from distmagic.remote.wire import protocol as p

def start_agent(request, listener, *_):
    path = str(places.run_dir(request.job, 0) / places.READERS)
    looks = []  # of other notebooks, while this agent is still loading torch
    while not looks or looks[-1].connect_ex(path) != errno.EAGAIN:
        looks.append(socket.socket(socket.AF_UNIX))
        looks[-1].setblocking(False)
    conn, _ = listener.accept()
    conn.sendall(p.encode(p.Hello(protocol=p.PROTOCOL, job=request.job, node_rank=0, hostname="a", pid=7), 1))
    os.remove(path)
    conn.close()
    return lambda: None

places.BACKLOG = 4
agents.Agents._spawn = lambda _, *words: start_agent(*words)
contact.Contact(0o22).run()
"""


def test_a_job_starts_while_others_look_again_and_again_whether_it_is_there(
    tmp_path, marks
):
    job = f"1121-000000-{secrets.token_hex(4)}"
    env = {
        **os.environ,
        **marks,
        "DISTMAGIC_HOME": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    argv = [sys.executable, "-c", FLOODED]
    (tmp_path / "jobs").mkdir()
    try:
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        ) as contact:
            said, _ = contact.communicate(
                p.encode(replace(START, job=job, node_rank=0)), timeout=HANG_S
            )
    finally:
        shutil.rmtree(places.run_dir(job, 0), ignore_errors=True)
    messages = [p.decode(line)[1] for line in said.splitlines()]
    # And not that it was refused.
    assert [type(message) for message in messages[:2]] == [p.Facts, p.Hello]


def test_a_free_port_is_told_at_once_and_only_of_its_own_address(link):
    port = host_requests.free_port(link, "127.0.0.1")
    with (
        socket.socket() as there,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        there.bind(("127.0.0.1", port))
        other.bind(("127.0.0.1", port))
        assert host_requests.free_port(link, "127.0.0.1") != port
    with pytest.raises(PreflightError):
        host_requests.free_port(link, "192.0.2.1")


# ---- working directories


def test_working_directories_are_told_and_removed(link, golden):
    path = work_dirs.prepare(p.WorkDir(name="train", origin="nb"), "job-1", 0).path
    (path / "snapshot").write_bytes(b"12345")
    (kept,) = host_requests.list_work_dirs(link)
    assert (kept.name, kept.origin, kept.size_bytes, kept.is_used) == (
        "train",
        "nb",
        5,
        True,
    )
    with golden.raises(PreflightError):
        host_requests.remove_work_dir(link, "train")
    work_dirs.leave(path, "job-1", 0)
    assert host_requests.remove_work_dir(link, "train") == 5
    assert host_requests.list_work_dirs(link) == ()


def test_what_is_removed_for_an_owner_is_nobody_else_s(link, tmp_path):
    start = replace(START, terms=replace(START.terms, owner="me"))
    folder = places.job_dir(start.job, start.node_rank)
    folder.mkdir(parents=True)
    listing.remember(folder, start)
    kept = tmp_path / "setup" / "one"  # of whom, nobody knows
    kept.parent.mkdir()
    kept.write_bytes(b"12345")
    assert host_requests.remove_job(link, start.job, "you") == 0
    assert host_requests.prune_blobs(link, removes=True, owner="me") == 0
    assert (folder.exists(), kept.exists()) == (True, True)
    assert host_requests.remove_job(link, start.job, "me") > 0
    assert host_requests.prune_blobs(link, removes=True) == 5
    assert (folder.exists(), kept.exists()) == (False, False)


def test_a_working_directory_remembers_who_began_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    monkeypatch.setattr(Agents, "_start_agent", lambda *_: None)
    notebook: Any = SimpleNamespace(say=lambda _: None)
    agents = Agents(notebook, 0o77, DeviceClaims())
    terms = replace(START.terms, owner="me@here:/nb")
    work = p.WorkDir(name="train", origin="nb")
    agents.start(replace(START, cwd="", work=work, terms=terms))
    assert [one.owners for one in work_dirs.kept()] == [("me@here:/nb",)]


# ---- the first program


def first_answer(folder: Path, **env: str) -> dict[str, object]:
    """Run the first program in a folder; return what it says."""
    ran = subprocess.run(
        [sys.executable, "-u", "-c", boot.BOOTSTRAP], input=boot.program("ab" * 32), capture_output=True, cwd=folder,
        env={**os.environ, "DISTMAGIC_HOME": str(folder / "home"), **env}, check=False,
    )  # fmt: skip
    return json.loads(ran.stdout.partition(boot.MARK)[2])


def test_a_first_program_ends_whose_connection_has_died_before_it_came():
    soon = boot.BOOTSTRAP.replace(str(boot.SILENCE_S), "1")
    assert soon != boot.BOOTSTRAP
    with subprocess.Popen(
        [sys.executable, "-u", "-c", soon], stdin=subprocess.PIPE
    ) as begun:
        assert begun.wait(HANG_S) == -signal.SIGALRM


def test_modules_in_the_working_directory_are_not_pythons_own(tmp_path):
    for name in (
        "base64",
        "signal",
        "zlib",
        "hashlib",
        "json",
        "os",
        "stat",
        "secrets",
        "token",
        "copy",
        "socket",
    ):
        (tmp_path / f"{name}.py").write_text(
            f"raise SystemExit('the user's own {name}')"
        )
    assert first_answer(tmp_path)["error"] == ""


def test_no_home_no_directory_of_that_name(tmp_path, golden):
    found = first_answer(tmp_path, DISTMAGIC_HOME="~no-such-user/distmagic")
    assert found["home"] == "~no-such-user/distmagic"
    golden(found["error"])
    assert list(tmp_path.iterdir()) == []


def of_the_first_program() -> dict[str, Any]:
    """Return the functions of the first program, and what they use."""
    functions: dict[str, Any] = {}
    exec(boot._PROGRAM.rpartition("distmagic_boot(")[0], functions)
    return functions


@pytest.mark.parametrize(
    ("mode", "others", "is_refused"),
    [
        (0o770, "eve (of group 7)", True),
        (0o770, "", False),
        (0o1770, "eve (of group 7)", False),
        (0o750, "eve (of group 7)", False),
    ],
)
def test_a_folder_that_others_of_a_group_can_change(
    tmp_path, mode, others, is_refused, golden
):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    functions = of_the_first_program()
    functions["distmagic_others"] = lambda gid: others
    if not is_refused:
        functions["distmagic_trust"](str(shared / "home"))
        return
    with golden.raises(OSError):
        functions["distmagic_trust"](str(shared / "home"))


ROOT, ME = "root:x:0:0:r:/:/bin/sh", "me:x:1000:7:M\xfc:/home/me:/bin/sh"
EVE, ALIAS = "eve:x:1001:7::/:/bin/sh", "again:x:1000:7::/:/bin/sh"
NOT_LISTED = "whoever is of group 7"


@pytest.mark.parametrize(
    ("group", "members", "primary", "passwd", "expected"),
    [
        ("me", [], 7, [ROOT, ME], ""),
        ("me", ["me", "root"], 7, [ROOT, ME, ALIAS, "+::::::"], ""),
        ("me", [], 7, [ROOT], ""),  # both of a directory, as are homes with umask 002
        ("users", [], 7, [ROOT, ME], ""),  # as in containers with one user
        ("users", [], 7, [ROOT, ME, EVE], "eve (of group 7)"),
        ("me", [], 7, [ROOT, ME, EVE], "eve (of group 7)"),
        ("me", ["eve"], 7, [ROOT, ME], "eve (of group 7)"),
        ("lab", ["eve", "me"], 1000, [ROOT, ME], "eve (of group 7)"),
        ("users", [], 7, [ROOT], NOT_LISTED),  # of a directory that lists nobody
        ("users", [], 7, [], NOT_LISTED),
        ("lab", [], 1000, [ROOT, ME.replace(":7:", ":1000:")], NOT_LISTED),
    ],
)
def test_who_else_is_of_a_group(monkeypatch, group, members, primary, passwd, expected):
    user = SimpleNamespace(pw_name="me", pw_uid=1000, pw_gid=primary)
    found = SimpleNamespace(gr_name=group, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: found)
    functions = of_the_first_program()
    lines = "".join(f"{line}\n" for line in passwd).encode("latin-1")
    functions["open"] = lambda path, mode: io.BytesIO(lines)
    assert functions["distmagic_others"](7) == expected


def test_the_group_of_root_and_one_without_a_name_are_nobody_else(monkeypatch):
    functions = of_the_first_program()
    assert functions["distmagic_others"](0) == ""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: {}[gid])
    assert functions["distmagic_others"](7) == ""

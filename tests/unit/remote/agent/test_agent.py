"""The agent's loop, with a torchrun, processes and a clock that are ours: why it stops, and whom it waits for."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distmagic.remote.agent import rank_table
from distmagic.remote.agent.patience import RESTART_S
from distmagic.remote.agent.rank_table import RankTable
from distmagic.remote.agent.reader_table import ReaderTable
from distmagic.remote.gang.channel import Cause
from distmagic.remote.gang.datagrams import OwnState
from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.records import listing, places
from distmagic.remote.records.journal import Journal, expand, log_name
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol
from tests.builders.agent_node import CHILD, ENGINE, JOB, LEASE_S, Node
from tests.builders.messages import START
from tests.lab.waiting import HANG_S

MEMBERSHIP = protocol.Membership(
    secret="00",
    address="127.0.0.1",
    lead_address="127.0.0.1",
    port=9,
    nodes=2,
    lost_after_s=10.0,
)
pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[protocol.StartNode]:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    places.job_dir(JOB, 0).mkdir(parents=True)
    yield replace(
        START, job=JOB, node_rank=0, terms=replace(START.terms, lease_s=LEASE_S)
    )
    shutil.rmtree(places.run_dir(JOB, 0), ignore_errors=True)


@pytest.fixture
def node(start: protocol.StartNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch, start)
    yield made
    made.close()


def connect_rank(node: Node, restart: int) -> tuple[socket.socket, list[int]]:
    """Have rank 0 say hello; return its connection and the writing ends of its two pipes."""
    hello = protocol.Worker(
        rank=0, local_rank=0, world_size=1, restart=restart, pid=ENGINE, local_world_size=1,
    )  # fmt: skip
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    conn.connect(str(node.agent.run_dir / places.RANKS))
    pipes = [os.pipe(), os.pipe()]
    readings = [reading for reading, _ in pipes]
    socket.send_fds(conn, [protocol.encode(hello)], readings)
    for reading in readings:
        os.close(reading)
    node.step()
    node.step()
    return conn, [writing for _, writing in pipes]


def connect_torchrun(node: Node) -> socket.socket:
    """Return torchrun's connection for reports."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    conn.connect(str(node.agent.run_dir / places.RANKS))
    conn.send(protocol.encode(protocol.RankExits()))
    node.step()
    node.step()
    return conn


def test_lines_of_a_restarted_rank_and_of_a_child_of_the_old_one_stay_whole(node):
    first, old = connect_rank(node, restart=0)
    os.write(old[0], b"old rank: step 1\n")
    node.step(1.0)
    second, new = connect_rank(node, restart=1)
    written = [(old, b"a child of the old rank\n"), (new, b"loss 0.25\n"), (new, b"loss 0.24\n")]  # fmt: skip
    for pipes, line in written:
        os.write(pipes[0], line)
        node.step(1.0)
    shown = [
        expand(protocol.encode(event, 1), node.agent.folder)
        for event in node.events(protocol.Output)
    ]
    texts = [cast(protocol.Output, protocol.decode(line)[1]).text for line in shown]
    whole = "old rank: step 1\na child of the old rank\nloss 0.25\nloss 0.24\n"
    assert "".join(texts) == whole
    assert (node.agent.folder / log_name(0, "stdout")).read_text() == whole
    for descriptor in (*old, *new):
        os.close(descriptor)
    for conn in (first, second):
        conn.close()


def test_a_job_that_ends_well(node):
    node.step()
    assert not node.agent.may_go()
    node.end()
    assert node.events(protocol.EngineEnded) == [protocol.EngineEnded(code=0)]
    assert node.events(protocol.Final) == [protocol.Final(reason="done")]
    assert node.events(protocol.NodeStopping) == []
    assert node.agent.may_go()
    assert not node.agent.run_dir.exists()


def test_a_report_counts_that_came_just_before_torchruns_end(node):
    """A busy host's agent reads nothing between the two."""
    exits = (protocol.Exit(rank=0, local_rank=0, pid=ENGINE + 2, code=-9),)
    ended = protocol.EngineEnded(code=1, exits=exits)
    with connect_torchrun(node) as torchrun:
        torchrun.send(protocol.encode(ended))
    node.end(code=1)
    assert node.events(protocol.EngineEnded) == [ended]


def test_the_end_of_a_rank_that_returned_counts_just_before_torchruns(node):
    """It comes over another connection, since the user's code has closed the first one."""
    conn, pipes = connect_rank(node, restart=0)
    conn.close()
    for pipe in pipes:
        os.close(pipe)
    returned = protocol.Ended(rank=0, restart=0, outcome="returned", result_bytes=7)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(node.agent.run_dir / places.RANKS))
        other.send(protocol.encode(returned))
    node.ended, node.tree = {ENGINE: 0}, ()
    node.agent._tick(node.now)
    assert node.events(protocol.Ended) == [returned]


def test_a_rank_that_died_before_a_stop_comes_first_in_the_journal(node):
    """Otherwise its end would look like an effect of the stop, and another rank like the cause."""
    conn, pipes = connect_rank(node, restart=0)
    conn.close()
    for pipe in pipes:
        os.close(pipe)
    exits = (protocol.Exit(rank=0, local_rank=0, pid=ENGINE, code=-9),)
    with connect_torchrun(node) as torchrun:
        torchrun.send(protocol.encode(protocol.RankExits(exits=exits)))
        node.agent.ending.stop(node.now, Cause("failed", 1))
    written = [type(event).__name__ for event in node.events(object)]
    assert written.index("Ended") < written.index("NodeStopping")
    assert node.events(protocol.Ended)[0].code == -9
    node.step()


def test_devices_are_kept_until_no_process_of_the_job_is_left(node):
    reading, device = os.pipe()
    node.agent.devices = (device,)
    node.agent.ending.got_sigterm = True
    node.step()
    os.write(device, b"kept")
    node.end()
    assert os.read(reading, 9) == b"kept"
    assert os.read(reading, 9) == b"", "the other end is closed"
    os.close(reading)


def test_sigterm_then_sigkill_and_the_first_cause_counts(node):
    node.agent.ending.got_sigterm = True
    node.step()
    assert node.signals == [signal.SIGTERM]
    node.step(2.9)
    assert node.signals == [signal.SIGTERM]
    conn = node.follow()
    node.send(conn, protocol.StopNode(grace_s=60.0, reason="interrupted"))
    assert set(node.signals[1:]) == {signal.SIGKILL}
    conn.close()
    node.end(1)
    reason = "the agent was asked to end"
    assert node.events(protocol.NodeStopping) == [
        protocol.NodeStopping(reason=reason, culprit=0)
    ]
    assert node.events(protocol.Final) == [protocol.Final(reason=reason)]


def test_ranks_leave_their_calls_before_they_are_ended_for_another_nodes_failure(node):
    conn, pipes = connect_rank(node, restart=0)
    file = node.agent.run_dir / f"calls-{ENGINE}"
    file.write_bytes(b"-")
    node.agent.ending.stop(node.now, Cause("failed", culprit=1))
    node.step(0.9)
    assert (file.read_bytes(), node.signals) == (b"", [])
    answer = protocol.Stacks(request_id="", rank=0, local_rank=0)
    file.write_bytes(protocol.encode(answer) + b"-\n")
    node.step()
    assert node.signals == [signal.SIGTERM]
    for descriptor in pipes:
        os.close(descriptor)
    conn.close()


def test_the_end_does_not_wait_long_for_the_calls_of_ranks(node):
    conn, pipes = connect_rank(node, restart=0)
    (node.agent.run_dir / f"calls-{ENGINE}").write_bytes(b"-")
    reader = node.follow()
    node.send(reader, protocol.StopNode(grace_s=3.0, reason="failed"))
    assert node.signals == []
    node.step(1.1)
    assert node.signals == [signal.SIGTERM]
    for descriptor in pipes:
        os.close(descriptor)
    for one in (conn, reader):
        one.close()


def test_a_process_that_survives_sigkill_is_named(node):
    node.agent.ending.got_sigterm = True
    node.step()
    node.step(14.0)
    (final,) = node.events(protocol.Final)
    assert final.survivors == (f"python (pid {CHILD.pid}, state S)",)


def test_a_torchrun_that_fails_ends_the_node(node):
    node.end(1)
    assert node.events(protocol.NodeStopping) == [
        protocol.NodeStopping(reason="failed", culprit=0)
    ]
    assert node.events(protocol.Final) == [protocol.Final(reason="failed")]


def test_a_job_ends_with_its_lease_and_a_request_renews_it(node):
    conn = node.follow()
    node.step(LEASE_S - 1)
    node.send(conn, protocol.RenewLease())
    node.step(LEASE_S - 1)
    assert node.events(protocol.NodeStopping) == []
    node.step(2.0)
    assert node.events(protocol.NodeStopping) == [protocol.NodeStopping(reason="lease")]
    conn.close()


class DetachedGang:
    """The channel of a node whose lead says that the job is detached."""

    is_detached, has_formed, may_leave, formations = True, False, True, 0
    has_paused_node = False
    gang = property(lambda self: self)

    def poll(self, *_: object, **__: object) -> None:
        return None


class LosingGang(DetachedGang):
    """The channel of a node that is told to form anew."""

    is_detached, has_formed, formations = False, True, 1


def test_ranks_that_were_to_meet_a_lost_node_are_killed_and_those_of_a_new_round_go_on(
    node, monkeypatch
):
    """A node may be lost just after the ranks have begun: nobody has heard of it since."""
    node.change_start(membership=replace(MEMBERSHIP, lost_after_s=3.0))
    heard_last_s = node.now - 3.0
    ranks = []
    for after_s in (-1.0, 0.2, 4.0):
        rank = SimpleNamespace(
            began=heard_last_s + after_s,
            is_over=False,
            is_replaced=False,
            process=f"a rank that began {after_s:g} s after it was heard",
        )
        ranks.append(rank)
    monkeypatch.setattr(node.agent.rank_table, "ranks", ranks)
    killed = []
    monkeypatch.setattr(
        rank_table.processes, "send", lambda process, _: killed.append(process)
    )
    node.agent.ending._form_anew_if_asked(node.now, LosingGang.formations)
    assert killed == [rank.process for rank in ranks[:2]]
    assert [rank.is_replaced for rank in ranks] == [True, True, False]


@pytest.mark.parametrize("is_lead", [False, True])
def test_torchrun_does_not_wait_for_a_lost_node_once_all_ranks_here_have_returned(
    node, monkeypatch, is_lead
):
    """The lead stays until the other nodes have ended, since its torchrun has the store of the rendezvous."""
    gang = LosingGang()
    gang.may_leave = False
    node.change_start(lead=is_lead, membership=MEMBERSHIP)
    monkeypatch.setattr(node.agent.ending, "channel", gang)
    node.agent.rank_table.codes = {0: 0, 1: None}
    node.step()
    assert node.signals == []
    node.agent.rank_table.codes = {0: 0, 1: 0}
    node.step()
    if is_lead:
        assert node.signals == []
        gang.may_leave = True
        node.step()
    assert node.signals == [signal.SIGTERM]
    node.end(code=143)
    assert node.events(protocol.NodeStopping) == []
    assert [one.code for one in node.events(protocol.EngineEnded)] == [0]
    assert [one.reason for one in node.events(protocol.Final)] == ["done"]
    gang.may_leave = True


class ReturnedGang(DetachedGang):
    """The channel of a node; `has_returned_node` says whether all ranks of another one have returned."""

    is_detached, has_formed, has_returned_node = False, True, False

    def poll(self, _: float, own: OwnState, *__: object, **___: object) -> None:
        self.told = own.has_returned


@pytest.fixture
def returned(node: Node, monkeypatch: pytest.MonkeyPatch) -> ReturnedGang:
    """The channel of `node` in a job of two nodes whose ranks may be started again, and which needs no notebook."""
    set_terms(node, max_restarts=3)
    gang = ReturnedGang()
    monkeypatch.setattr(node.agent.ending, "channel", gang)
    return gang


def set_terms(node: Node, **terms: Any) -> None:
    changed = replace(node.agent.start.terms, lease_s=1e6, **terms)
    node.change_start(terms=changed, membership=MEMBERSHIP)


def reasons(node: Node) -> list[str]:
    return [one.reason for one in node.events(protocol.NodeStopping)]


def test_a_node_tells_the_others_whether_all_its_ranks_have_returned(node, returned):
    node.agent.rank_table.codes = {0: 0}
    node.step()
    assert returned.told
    node.agent.rank_table.codes = {0: 1}
    node.step()
    assert not returned.told


@pytest.mark.parametrize(
    ("max_restarts", "max_nodes", "reason"),
    [(3, 0, ["failed"]), (0, 0, []), (3, 2, [])],
)
def test_a_failed_rank_that_can_not_be_started_again_ends_the_job_without_a_notebook(
    node: Node, returned: ReturnedGang, max_restarts: int, max_nodes: int, reason: list[str]
) -> None:  # fmt: skip
    """By itself torchrun would wait for ten minutes. In an elastic job ranks of a healthy node may return."""
    set_terms(node, max_restarts=max_restarts, max_nodes=max_nodes)
    returned.has_returned_node = True
    node.agent.rank_table.waits_since = node.now
    node.step()
    node.step(RESTART_S - 1.0)  # torchrun may yet start it again
    assert reasons(node) == []
    node.step(2.0)
    assert reasons(node) == reason


def test_a_node_that_returns_late_leaves_time_to_start_ranks_again(node, returned):
    node.agent.rank_table.waits_since = node.now
    node.step(RESTART_S + 1.0)  # torchrun waits for the other node, which goes on
    returned.has_returned_node = True
    node.step()
    node.step(RESTART_S - 1.0)
    assert reasons(node) == []
    node.step(2.0)
    assert reasons(node) == ["failed"]


def test_the_time_to_start_ranks_again_begins_anew_when_the_other_node_has_ranks_again(
    node, returned
):
    node.agent.rank_table.waits_since = node.now
    returned.has_returned_node = True
    node.step()
    node.step(RESTART_S - 1.0)
    returned.has_returned_node = False
    node.step()
    returned.has_returned_node = True
    node.step()
    node.step(RESTART_S - 1.0)
    assert reasons(node) == []
    node.step(2.0)
    assert reasons(node) == ["failed"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_time_to_start_ranks_again_begins_anew_when_they_were_and_one_fails_again(
    node, returned, is_seen
):
    """Both may happen within one turn of the loop."""
    node.agent.rank_table.waits_since = node.now
    returned.has_returned_node = True
    node.step()
    node.step(RESTART_S - 1.0)
    if is_seen:
        node.agent.rank_table.waits_since = None
        node.step()
    node.agent.rank_table.waits_since = node.now + 0.01
    node.step()
    node.step(RESTART_S - 1.0)
    assert reasons(node) == []
    node.step(2.0)
    assert reasons(node) == ["failed"]


@pytest.mark.parametrize("which", ["own", "peer"])
def test_a_lead_takes_in_no_host_once_all_ranks_of_a_node_have_returned(
    node, returned, which
):
    """For one more torchrun would start the ranks of the others again, beside those that have returned."""
    set_terms(node, max_restarts=3, max_nodes=3)
    node.agent.elastic_members = ElasticMembers(
        node.agent.start, lambda _: True, node.now
    )
    conn = node.follow()
    request = protocol.AddNode(host="gpu-new", request_id="a1")
    returned.has_returned_node = which == "peer"
    node.agent.rank_table.codes = {0: 0 if which == "own" else None}
    node.send(conn, request)
    refused = protocol.Refused(
        what="add_node", error="all ranks of one of its hosts have returned"
    )
    assert protocol.encode(refused) in conn.recv(1 << 16)
    assert node.events(protocol.NodeAdded) == []
    returned.has_returned_node = False
    node.agent.rank_table.codes = {0: None}
    node.send(conn, request)
    assert [one.request_id for one in node.events(protocol.NodeAdded)] == ["a1"]
    conn.close()


def test_every_host_of_a_detached_job_lists_it_so(node):
    listing.remember(node.agent.folder, node.agent.start)
    assert [one.is_detached for one in listing.jobs(JOB)] == [False]
    node.change_start(membership=MEMBERSHIP)
    node.agent.ending.channel = cast(Any, DetachedGang())
    node.step()
    assert [one.is_detached for one in listing.jobs(JOB)] == [True]
    node.step(LEASE_S + 1.0)
    assert node.events(protocol.NodeStopping) == []
    assert node.events(protocol.Detached) == []  # the lead's journal has it


def test_a_detached_job_needs_no_lease(node):
    conn = node.follow()
    node.send(conn, protocol.DetachJob())
    node.step(10 * LEASE_S)
    assert node.events(protocol.Detached) == [protocol.Detached(why="asked")]
    assert node.events(protocol.NodeStopping) == []
    conn.close()


def test_the_lead_ends_the_job_after_its_timeout(start, monkeypatch):
    node = Node(monkeypatch, replace(start, terms=replace(start.terms, timeout_s=10.0)))
    # A notebook that follows the job may ask the ranks where they are before it stops them.
    node.step(16.5)
    assert node.events(protocol.NodeStopping) == []
    node.step(1.0)
    assert node.events(protocol.NodeStopping) == [
        protocol.NodeStopping(reason="timeout")
    ]
    node.close()


def test_the_timeout_stands_still_while_a_rank_waits_for_somebody_to_type(
    start, monkeypatch
):
    node = Node(monkeypatch, replace(start, terms=replace(start.terms, timeout_s=10.0)))
    waits = True
    monkeypatch.setattr(
        type(node.agent.rank_table), "has_paused", property(lambda _: waits)
    )
    for _ in range(6):
        node.step(5.0)
    waits = False
    node.step(16.5)
    assert node.events(protocol.NodeStopping) == []
    node.step(1.0)
    assert node.events(protocol.NodeStopping) == [
        protocol.NodeStopping(reason="timeout")
    ]
    node.close()


def test_the_lead_ends_kept_ranks_after_their_time_without_a_cell(start, monkeypatch):
    """Without a notebook: its lease has run out, and the job goes on without it."""
    terms = replace(start.terms, goes_on_alone=True, stays=True, ends_idle_s=20.0)
    node = Node(monkeypatch, replace(start, terms=terms))
    runs = True
    monkeypatch.setattr(
        type(node.agent.rank_table), "is_at_cell", property(lambda _: runs)
    )
    node.agent.rank_table.last_cell = 1
    for _ in range(10):
        node.step(20.0)
    runs = False
    node.step(19.0)
    assert node.events(protocol.NodeStopping) == []
    node.step(2.0)
    assert node.events(protocol.NodeStopping) == [protocol.NodeStopping(reason="idle")]
    node.close()


def test_the_agent_waits_until_a_reader_has_everything(node):
    conn = node.follow()
    node.agent.journal.add(protocol.Notice(text="x" * 900_000))
    node.end()
    assert not node.agent.may_go()
    while not node.agent.may_go():
        assert conn.recv(1 << 20)
        node.step()
    conn.close()


def test_news_of_the_hardware_go_to_those_who_follow_and_into_no_journal(node):
    conn, idle = node.follow(), node.follow()
    live = socket.socket(socket.AF_UNIX)
    live.connect(node.path)
    follow = protocol.FollowJob(job=JOB, node_rank=0, live=True)
    node.send(live, follow)
    for one in (conn, idle):
        one.recv(1 << 20)
        one.setblocking(False)
    live.setblocking(False)
    news = protocol.Hardware(used_bytes=7)
    node.news.append(news)
    node.step()
    assert protocol.decode(conn.recv(1 << 20)) == (0, news)
    assert protocol.decode(idle.recv(1 << 20)) == (0, news)
    with pytest.raises(BlockingIOError):
        live.recv(1)
    assert node.events(protocol.Hardware) == []
    # One that takes nothing has no news waiting for it.
    node.agent.journal.add(protocol.Notice(text="x" * 900_000))
    node.step()
    waiting = len(node.agent.reader_table.readers[0]._unsent)
    assert waiting
    node.news.append(news)
    node.step()
    assert len(node.agent.reader_table.readers[0]._unsent) == waiting
    assert node.masks == [None]
    for one in (conn, idle, live):
        one.close()


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(node):
    """Its notebook has gone without a reset; another one renews the lease."""
    half_open, good = node.follow(), node.follow()
    node.agent.journal.add(protocol.Notice(text="x" * 900_000))
    node.end()
    good.setblocking(False)
    while node.agent.reader_table.readers[1].has_all(node.agent.journal) is False:
        good.recv(1 << 20)
        node.step()
    node.step(4.0)
    assert not node.agent.may_go()
    node.step(1.5)
    assert len(node.agent.reader_table.readers) == 1
    assert node.agent.may_go()
    half_open.close()
    good.close()


def test_a_stalled_reader_is_dropped_when_its_notebook_comes_back(node):
    half_open = node.follow()
    node.agent.journal.add(protocol.Notice(text="x" * 900_000))
    node.step()
    node.step(6.0)
    idle = node.follow(after=node.agent.journal.last)
    assert len(node.agent.reader_table.readers) == 1
    node.step(6.0)
    again = node.follow(after=node.agent.journal.last)
    assert len(node.agent.reader_table.readers) == 2, (
        "one that has everything is no stalled one"
    )
    for conn in (half_open, idle, again):
        conn.close()


def test_an_error_in_a_callback_is_noted_once_and_the_job_goes_on(
    node, monkeypatch, golden
):
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    node.step()
    with monkeypatch.context() as patch:
        patch.setattr(ReaderTable, "_accept", no_descriptor)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(node.path)
        node.step()
        node.step()
    texts = [notice.text for notice in node.events(protocol.Notice)]
    golden(*texts)
    node.send(waiting, protocol.FollowJob(job=JOB, node_rank=0))
    assert waiting.recv(100).startswith(b'{"t":"hello"')
    waiting.close()


def test_a_journal_that_can_not_be_read_costs_the_reader_alone(
    node, monkeypatch, golden
):
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "after", stale)
        for _ in range(2):
            conn = node.follow()
            assert conn.recv(100) == b""
            conn.close()
    texts = [notice.text for notice in node.events(protocol.Notice)]
    golden(*(text.replace(str(node.agent.folder), "FOLDER") for text in texts))
    again = node.follow()
    assert again.recv(100).startswith(b'{"t":"hello"')
    again.close()


def test_a_job_goes_on_without_its_folder(node):
    """The user has removed ~/.distmagic to make room: what is gone is told, what is in memory is sent."""
    for _ in range(200):
        node.agent.journal.add(protocol.Notice(text="x" * 30_000))
    last = node.agent.journal.last
    shutil.rmtree(node.agent.folder)
    conn = node.follow(after=0)
    data = b""
    while data.count(b"\n") < 1:
        data += conn.recv(1 << 16)
        node.step()
    number, first = protocol.decode(data.partition(b"\n")[0] + b"\n")
    assert number == 1
    assert isinstance(first, protocol.Skipped)
    assert 1 < first.through < last
    assert len(node.agent.reader_table.readers) == 1
    conn.close()


def test_the_sockets_look_used_to_a_cleaner_of_tmp(node):
    paths = (
        node.agent.run_dir,
        node.agent.run_dir / "readers",
        node.agent.run_dir / "ranks",
    )
    for path in paths:
        os.utime(path, (0, 0))
    node.step(31.0)
    assert all(time.time() - path.stat().st_mtime < 1000 for path in paths)


@pytest.mark.parametrize("removed", ["", "readers", "ranks", "pid"])
def test_what_a_cleaner_of_tmp_has_removed_is_made_anew(node, removed):
    run_dir = node.agent.run_dir
    shutil.rmtree(run_dir) if not removed else (run_dir / removed).unlink()
    node.step(1.1)
    places.check_run_dir(run_dir)
    assert processes.noted(run_dir / "pid") == processes.read(os.getpid())
    with (
        node.follow() as conn,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank,
    ):
        assert (
            protocol.decode(conn.recv(65536).splitlines()[0])[1]
            == node.events(protocol.Hello)[0]
        )
        rank.connect(str(run_dir / "ranks"))
    listeners = [
        key
        for key in node.agent.selector.get_map().values()
        if is_listening(key.fileobj)
    ]
    assert len(listeners) == 2


def is_listening(file: object) -> bool:
    return isinstance(file, socket.socket) and bool(
        file.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def test_only_what_has_to_be_looked_at_each_second_is(node, monkeypatch):
    """A home may be on a slow file server, and the gang waits for this loop."""
    node.step()
    touched: list[object] = []
    monkeypatch.setattr(places, "touch", touched.append)
    node.step(2.0)
    assert touched == []
    node.step(30.0)
    assert touched != []


def test_a_node_that_has_ranks_did_not_come_too_late(node):
    """A notebook that could not follow it says so all the same."""
    late = protocol.StopNode(grace_s=0.0, reason="too late")
    nobody: Any = None
    node.agent.rank_table.ranks = [nobody]
    node.agent._handle(nobody, late, node.now)
    assert node.events(protocol.NodeStopping) == []
    node.agent.rank_table.ranks = []
    node.agent._handle(nobody, late, node.now)
    assert [one.reason for one in node.events(protocol.NodeStopping)] == ["too late"]


def test_an_agent_whose_job_is_over_makes_no_socket_anew(node):
    node.end()
    assert not node.agent.run_dir.exists()
    node.step(2.0)
    assert not node.agent.run_dir.exists()


def test_the_agent_may_open_more_files_than_its_ranks(start, monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    node = Node(monkeypatch, start)
    assert node.limit_of_ranks == 512
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    node.close()


def test_too_many_ranks_for_the_hosts_limit_have_a_clear_error(
    tmp_path, node, monkeypatch, golden
):
    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    table = RankTable(tmp_path, node.agent.journal, node.agent.selector, lambda: 0.0)
    with golden.raises(RuntimeError):
        table._accept(Full())  # type: ignore[arg-type]


LEAVES_AN_ORPHAN = """
import subprocess
null = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=null, stderr=null).pid, flush=True)
"""
BREAKS_DOWN = """
import os, socket, subprocess, sys
from distmagic.remote.agent import agent, main
from distmagic.remote.agent.patience import RESTART_S
from distmagic.remote.engine import engine_start
from distmagic.remote.gang.elastic_members import ElasticMembers
from distmagic.remote.records import places
from distmagic.remote.wire import protocol

start = protocol.decode(sys.stdin.buffer.readline())[1]
places.job_dir(start.job, 0).mkdir(parents=True, exist_ok=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(places.make_run_dir(start.job, 0) / "readers"))

def start_engine(*_):
    # It leaves an orphan in a session of its own, as daemons do; no parent takes that along.
    engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
    engine.returncode = 0
    return engine.pid, os.pipe()[0], os.pipe()[0]

def run(self):
    os.waitid(os.P_PID, self.ending.engine_pid, os.WEXITED | os.WNOWAIT)
    assert [one.name for one in main.processes.descendants(os.getpid())] == ["sleep"]
    raise RuntimeError("broken")

engine_start.start_engine = start_engine
agent.Agent.run = run
main.serve(start, listener)
"""


def test_an_agent_that_breaks_down_takes_everything_along(start, marks):
    done = subprocess.run(
        [sys.executable, "-c", BREAKS_DOWN, LEAVES_AN_ORPHAN], input=protocol.encode(start), capture_output=True,
        env={**os.environ, **marks}, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stderr.decode().endswith("RuntimeError: broken\n")
    orphan = processes.read(int(done.stdout))
    assert orphan is None or orphan.state in "ZX"
    assert not places.run_dir(JOB, 0).exists()

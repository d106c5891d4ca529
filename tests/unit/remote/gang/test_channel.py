"""What agents say by the gang channel comes out at the others: two channels with their own sockets, and a clock of ours."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from distmagic.remote.gang.channel import Cause, GangChannel
from distmagic.remote.gang.datagrams import OwnState
from distmagic.remote.gang.liveness import News
from distmagic.remote.records.journal import Journal
from distmagic.remote.wire import protocol

LOCAL = "127.0.0.1"


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((LOCAL, 0))
        return int(taken.getsockname()[1])


def membership_of(nodes: int) -> protocol.Membership:
    return protocol.Membership(
        secret="5e" * 32,
        address=LOCAL,
        lead_address=LOCAL,
        port=free_port(),
        nodes=nodes,
        lost_after_s=10.0,
    )


@contextmanager
def open_channels(folder: Path, nodes: int) -> Iterator[list[GangChannel]]:
    """Open the channels of all nodes of a job that needs two of them, the lead's first."""
    membership = membership_of(nodes)
    with ExitStack() as stack:
        made = []
        for node_rank in range(nodes):
            own = folder / str(node_rank)
            own.mkdir()
            made.append(GangChannel(node_rank, membership, 2, Journal(own), 100.0))
            stack.callback(made[-1]._udp.socket.close)
        yield made


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[list[GangChannel]]:
    """The lead's and a member's."""
    with open_channels(tmp_path, 2) as made:
        yield made


@pytest.mark.parametrize("returned", [0, 1])
def test_a_node_whose_ranks_have_returned_says_so(channels, returned):
    """No datagram gets lost between two sockets of one machine, so a second by the clock is enough."""
    for turn in range(10):
        for node_rank, one in enumerate(channels):
            cause = one.poll(
                100.0 + 0.1 * turn,
                OwnState(has_returned=node_rank == returned),
                None,
                is_clear=False,
            )
            assert cause is None
    assert channels[0].gang.has_formed
    assert channels[1 - returned].gang.has_returned_node


@pytest.mark.parametrize("busy", [0, 1, 2])
def test_every_node_learns_of_a_rank_that_is_about_to_end_and_when_it_has_ended(
    tmp_path, busy
):
    with open_channels(tmp_path, 3) as made:
        for turn in range(40):
            for node_rank, one in enumerate(made):
                one.poll(
                    100.0 + 0.1 * turn,
                    OwnState(is_ending=node_rank == busy and turn < 20),
                    Cause("interrupted"),
                    is_clear=False,
                )
            if turn == 19:
                others = [one for i, one in enumerate(made) if i != busy]
                assert all(one.gang.has_ending_node for one in others)
        assert not any(one.gang.has_ending_node for one in made)


def test_one_host_that_is_lost_makes_the_others_form_anew_once(tmp_path):
    """A frozen one says itself that it has lost the others, and is silent after that; when it was back it counts again."""
    lead = GangChannel(0, membership_of(3), 1, Journal(tmp_path), 100.0)
    try:
        says_so = News(node_rank=1, kind="stops", reason="lost", culprit=0)
        silent = News(node_rank=1, kind="lost")
        back = News(node_rank=1, kind="back")
        for news in (says_so, says_so, silent):
            assert lead._judge(news, 101.0) is None
        assert lead._formations == 1
        # It was frozen: the first that is heard of it is that it lives, the second is its word of that same loss.
        for news in (back, says_so, silent):
            assert lead._judge(news, 130.0) is None
        assert lead._formations == 1
        for news in (back, silent, says_so):
            assert lead._judge(news, 150.0) is None
        assert lead._formations == 2
        assert lead._judge(back, 200.0) is None
        assert lead._judge(says_so, 210.0) is None
        assert lead._formations == 3
    finally:
        lead._udp.socket.close()


def test_a_member_that_was_frozen_and_thaws_makes_the_others_form_anew_no_second_time(
    tmp_path,
):
    causes: dict[int, Cause] = {}
    with open_channels(tmp_path, 3) as made:
        for turn in range(600):
            is_frozen = 30 <= turn < 330
            for node_rank, one in enumerate(made[: 2 if is_frozen else 3]):
                cause = one.poll(
                    100.0 + 0.1 * turn,
                    OwnState(),
                    causes.get(node_rank),
                    is_clear=False,
                )
                if cause is not None:
                    causes.setdefault(node_rank, cause)
        assert causes == {2: Cause("lost", 0)}
        assert [one.gang.formations for one in made[:2]] == [1, 1]

"""How a payload comes to all hosts: who sends what to whom, and what the notebook does when hosts answer otherwise."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.connection.link import Link
from distmagic.errors import DistmagicError, HostErrors, PreflightError, ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol as p
from distmagic.request.hosts import Host
from distmagic.runner import delivery
from distmagic.runner.delivery import Chain, Delivery, Routes, routes
from tests.builders.links import FakeProcess, lines

LARGE, SMALL = 100, 10
A, B, C = (
    p.Blob(sha256=letter * 64, size_bytes=size)
    for letter, size in (("a", LARGE), ("b", LARGE), ("c", SMALL))
)


def plan(
    blobs: tuple[p.Blob, ...],
    lacking: list[tuple[p.Blob, ...]],
    joins: list[bool] | None = None,
) -> Routes:
    names = [frozenset(blob.sha256 for blob in each) for each in lacking]
    return routes(blobs, names, joins or [True] * len(lacking), 50)


# ---- who sends what to whom


def test_all_lack_all():
    found = plan((A, C), [(A, C)] * 3)
    assert found == Routes(
        straight={}, chains=(Chain(blobs=(A, C), source=None, takers=(0, 1, 2)),)
    )
    assert found.chains[0].links == ((0, 1), (1, 2))
    assert found.chains[0].size_bytes == LARGE + SMALL


def test_nobody_lacks_anything():
    assert plan((A, C), [(), ()]) == Routes(straight={}, chains=())


def test_what_is_small_goes_straight():
    assert plan((A, C), [(C,), (C,)]) == Routes(straight={0: (C,), 1: (C,)}, chains=())


def test_who_has_it_begins_the_chain():
    assert plan((A,), [(A,), (), (A,)]).chains == (
        Chain(blobs=(A,), source=1, takers=(0, 2)),
    )
    assert plan((A,), [(), (A,)]).chains[0].links == ((0, 1),)


def test_one_host_alone_has_nobody_to_get_it_from():
    assert plan((A,), [(A,)]) == Routes(straight={0: (A,)}, chains=())
    assert plan((A,), [(A,), ()], [True, False]) == Routes(
        straight={0: (A,)}, chains=()
    )


def test_blobs_that_different_hosts_lack_have_chains_of_their_own():
    found = plan((A, B), [(A, B), (A,), (A,)])
    assert found.chains == (
        Chain(blobs=(A,), source=None, takers=(0, 1, 2)), Chain(blobs=(B,), source=1, takers=(0,)),
    )  # fmt: skip


def test_who_does_not_join_gets_it_straight():
    found = plan((A,), [(A,)] * 3, [True, False, True])
    assert found == Routes(
        straight={1: (A,)}, chains=(Chain(blobs=(A,), source=None, takers=(0, 2)),)
    )


@given(st.data())
def test_everybody_gets_what_it_lacks_exactly_once(data):
    blobs = [
        p.Blob(sha256=f"{n:064d}", size_bytes=data.draw(st.integers(0, 100)))
        for n in range(5)
    ]
    nodes = data.draw(st.integers(1, 6))
    lacking = [
        frozenset(data.draw(st.sets(st.sampled_from([b.sha256 for b in blobs]))))
        for _ in range(nodes)
    ]
    joins = data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes))
    found = routes(blobs, lacking, joins, 50)
    for node, names in enumerate(lacking):
        got = [blob.sha256 for blob in found.straight.get(node, ())]
        got += [
            blob.sha256
            for chain in found.chains
            if node in chain.takers
            for blob in chain.blobs
        ]
        assert sorted(got) == sorted(names)
    for chain in found.chains:
        assert all(joins[node] for pair in chain.links for node in pair)
        if chain.source is not None:
            assert not lacking[chain.source] & {blob.sha256 for blob in chain.blobs}


# ---- the conversation


def file(folder: Path, data: bytes) -> LocalBlob:
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / sha256).write_bytes(data)
    return LocalBlob(
        blob=p.Blob(sha256=sha256, size_bytes=len(data)), path=folder / sha256
    )


def link(name: str, *answers: bytes, hang: bool = False) -> tuple[Link, FakeProcess]:
    process = FakeProcess(*answers, hang=hang)
    return Link(Host(name=name), process), process


class Told:
    def __init__(self) -> None:
        self.notes: list[tuple[int, str]] = []
        self.received: list[tuple[int, int, int]] = []

    def deliver(
        self, links: list[tuple[Link, FakeProcess]], files: list[LocalBlob]
    ) -> None:
        addresses = [f"10.0.0.{n}" for n in range(len(links))]
        one_each = [each for each, _ in links]
        tell = lambda node, size, total: self.received.append((node, size, total))  # noqa: E731
        Delivery(
            one_each,
            addresses,
            files,
            tell,
            lambda node, text: self.notes.append((node, text)),
        ).run()


@pytest.fixture
def large(tmp_path, monkeypatch) -> LocalBlob:
    monkeypatch.setattr(delivery, "SPREAD_BYTES", 1000)
    monkeypatch.setattr(delivery, "_TELL_S", 0.0)
    monkeypatch.setattr(delivery, "_OTHERS_S", 0.05)
    return file(tmp_path, b"x" * 5000)


def wants(*blobs: LocalBlob) -> bytes:
    return lines(p.MissingBlobs(sha256=tuple(local.blob.sha256 for local in blobs)))


def need(local: LocalBlob, offset: int = 0, why: str = "") -> bytes:
    return lines(p.NeedBlob(sha256=local.blob.sha256, offset=offset, why=why))


def asked(process: FakeProcess) -> list[p.Message]:
    """Return the requests among what was written, whose last line may be followed by a file's bytes."""
    return [
        p.decode(line)[1]
        for line in process.written.splitlines()
        if line.startswith(b"{")
    ]


def test_a_chain_of_two(large):
    first = link(
        "gpu-a", wants(large), lines(p.Serving(port=4000)), need(large), wants()
    )
    second = link(
        "gpu-b", wants(large), lines(p.ReceivedBytes(size_bytes=2000)), wants()
    )
    told = Told()
    told.deliver([first, second], [large])
    check, serve, take = asked(first[1])
    assert check == p.CheckBlobs(blobs=(large.blob,))
    assert serve == p.ServeBlobs(
        blobs=(large.blob,), address="10.0.0.0", secret=serve.secret
    )
    assert take == p.ReceiveBlobs(blobs=(large.blob,), secret=serve.secret)
    assert first[1].written.endswith(b"x" * 5000)
    assert asked(second[1])[1] == p.ReceiveBlobs(
        blobs=(large.blob,), address="10.0.0.0", port=4000, secret=serve.secret
    )
    assert b"x" * 100 not in second[1].written  # fewer may be in the secret
    assert told.notes == []
    assert {(0, 0, 5000), (0, 5000, 5000), (1, 2000, 5000), (1, 5000, 5000)} <= set(
        told.received
    )


def test_the_rest_goes_straight_and_it_is_said_why(large, golden):
    first = link(
        "gpu-a", wants(large), lines(p.Serving(port=4000)), need(large), wants()
    )
    second = link("gpu-b", wants(large), need(large, 4990, "it hung up"), wants())
    told = Told()
    told.deliver([first, second], [large])
    assert second[1].written.endswith(b"}\n" + b"x" * 10)
    assert [node for node, _ in told.notes] == [1]
    golden(told.notes[0][1])


def test_a_host_that_can_not_serve(large, golden):
    first = link(
        "gpu-a",
        wants(large),
        lines(p.Serving(port=0, why="no ssl")),
        need(large),
        wants(),
    )
    second = link("gpu-b", wants(large), need(large), wants())
    told = Told()
    told.deliver([first, second], [large])
    assert asked(second[1])[1].port == 0
    assert [node for node, _ in told.notes] == [1]
    golden(told.notes[0][1])


def test_little_data_and_hosts_alone_are_not_asked_first(large, tmp_path):
    small = file(tmp_path, b"small")
    pair = [link("gpu-a", wants()), link("gpu-b", wants())]
    Told().deliver(pair, [small])
    assert [asked(process) for _, process in pair] == [
        [p.OfferBlobs(blobs=(small.blob,))]
    ] * 2
    alone = link("gpu-a", wants(large), wants())
    told = Told()
    told.deliver([alone], [large])
    assert asked(alone[1]) == [p.OfferBlobs(blobs=(large.blob,))]
    assert (told.received[0], told.received[-1]) == ((0, 0, 5000), (0, 5000, 5000))


@pytest.mark.parametrize(
    "answers",
    [lines(p.NeedBlob(sha256="f" * 64)), lines(p.NeedBlob(sha256="../../etc/passwd"))],
)
def test_a_host_that_asks_for_what_nobody_offered(large, answers, golden):
    first = link("gpu-a", wants(large), lines(p.Serving(port=4000)), answers, wants())
    second = link("gpu-b", wants(large), wants())
    with golden.raises(ProtocolError):
        Told().deliver([first, second], [large])
    assert len(first[1].written) < 3 * 5000


def test_a_failure_does_not_wait_for_the_others(large, golden):
    refused = lines(p.Refused(what="receive_blobs", error="No space left on device"))
    first = link("gpu-a", wants(large), lines(p.Serving(port=4000)), refused)
    second = link("gpu-b", wants(large), hang=True)
    with golden.raises(PreflightError):
        Told().deliver([first, second], [large])
    second[0].close()


def test_failures_of_one_cause_are_told_together(large, monkeypatch):
    monkeypatch.setattr(delivery, "_OTHERS_S", 20.0)
    refused = lines(p.Refused(what="check_blobs", error="Input/output error"))
    with pytest.raises(HostErrors) as caught:
        Told().deliver([link("gpu-a", refused), link("gpu-b", refused)], [large])
    assert "gpu-a" in str(caught.value)
    assert "gpu-b" in str(caught.value)


@given(st.binary(max_size=200))
def test_any_answer_is_an_error_that_names_a_host(data):
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "SPREAD_BYTES", 1)
        patch.setattr(delivery, "_OTHERS_S", 0.0)
        one = file(Path(folder), b"x")
        with pytest.raises(DistmagicError, match="gpu-"):
            Told().deliver(
                [link("gpu-a", wants(one), data), link("gpu-b", wants(one), data)],
                [one],
            )

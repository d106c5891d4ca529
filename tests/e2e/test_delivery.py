"""A large payload comes to several hosts: once out of the notebook, from host to host, and directly where it must."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.connection.link import Link
from distmagic.connection.prompts import asker_of
from distmagic.payload import blobs
from distmagic.payload.blobs import LocalBlob
from distmagic.request.hosts import parse_hosts
from distmagic.runner.delivery import Delivery
from distmagic.session.session import Session
from tests.e2e import runner
from tests.lab import Lab, LabHost, wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]
MB = 1 << 20
SIZE = 12 * MB
FOUR = ("dm1", "dm2", "dm3", "dm4")


@pytest.fixture(scope="module")
def four() -> Iterator[Lab]:
    with Lab(4) as lab:
        yield lab


@pytest.fixture
def hosts(four: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Four hosts that have nothing yet, and a notebook that has nothing either."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    four.mend()
    yield four
    four.mend()


@contextmanager
def links_to(lab: Lab, names: Sequence[str] = FOUR) -> Iterator[tuple[Link, ...]]:
    """Open a conversation with each host; in the end nothing of it is left anywhere."""
    session = Session()
    try:
        with_asker = asker_of(None)
        reaching = session.reach(
            parse_hosts(",".join(names)), runner.access(lab), with_asker
        )
        links = tuple(reaching.wait().values())
        yield links
        for link in links:
            link.finish()
    finally:
        session.close()
        with_asker.close()
    lab.assert_clean()


class Told:
    """What a delivery tells."""

    def __init__(self) -> None:
        self.received: dict[int, list[int]] = {}
        self.notes: list[tuple[int, str]] = []

    def tell(self, node: int, size_bytes: int, total_bytes: int) -> None:
        self.received.setdefault(node, []).append(size_bytes)
        assert total_bytes in (0, SIZE, SIZE + 1000, 2 * SIZE)

    def note(self, node: int, text: str) -> None:
        self.notes.append((node, text))


def deliver(links: Sequence[Link], files: Sequence[LocalBlob]) -> Told:
    told = Told()
    addresses = [link.facts.address for link in links]
    Delivery(links, addresses, files, told.tell, told.note).run()
    return told


def made(size: int = SIZE) -> LocalBlob:
    return blobs.keep(os.urandom(size), blobs.folder())


def kept(host: LabHost) -> set[str]:
    """Return what a host keeps, seen on the host itself."""
    return set(host.exec(["ls", ".distmagic/blobs"]).stdout.split())


def assert_has(host: LabHost, *files: LocalBlob) -> None:
    for file in files:
        said = host.exec(["sha256sum", f".distmagic/blobs/{file.blob.sha256}"]).stdout
        assert said.split()[0] == file.blob.sha256
    assert all(len(name) == 64 for name in kept(host)), "half a file"


def listening(host: LabHost) -> list[str]:
    """Return the ports of a host that somebody listens on, but SSH's."""
    text = host.exec(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    rows = [line.split() for line in text.splitlines()]
    return [
        row[1]
        for row in rows
        if len(row) > 3 and row[3] == "0A" and not row[1].endswith(":0016")
    ]


# ---- as it should be


@pytest.mark.quick
def test_it_leaves_the_notebook_once_and_the_second_time_not_at_all(hosts):
    files = [made(), made(1000)]
    with links_to(hosts) as links:
        before = hosts.sent_bytes()
        told = deliver(links, files)
        assert hosts.sent_bytes() - before < 1.1 * SIZE
        for host in hosts.hosts:
            assert_has(host, *files)
        assert told.notes == []
        between = hosts.sent_bytes()
        deliver(links, files)
        assert hosts.sent_bytes() - between < 100_000
        assert [listening(host) for host in hosts.hosts] == [[]] * 4


@pytest.mark.quick
def test_who_has_it_serves_the_others(hosts):
    file = made()
    with links_to(hosts, ["dm3"]) as links:
        deliver(links, [file])
    with links_to(hosts) as links:
        before = hosts.sent_bytes()
        told = deliver(links, [file])
        assert hosts.sent_bytes() - before < 200_000
        assert told.notes == []
        for host in hosts.hosts:
            assert_has(host, file)


def test_hosts_that_share_one_home(make_lab, tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    lab = make_lab(3, shared_home=True)
    files = [made(), made()]
    with links_to(lab, ["dm1", "dm2", "dm3"]) as links:
        told = deliver(links, files)
        assert told.notes == []
        assert_has(lab.hosts[0], *files)


# ---- the way from host to host is closed, or breaks


def test_a_firewall_between_two_hosts(hosts, golden):
    file = made()
    hosts.hosts[1].reject(source=hosts.hosts[2])
    with links_to(hosts) as links:
        before = hosts.sent_bytes()
        told = deliver(links, [file])
        # To dm1 and to dm3, which serves dm4.
        assert 2 * SIZE < hosts.sent_bytes() - before < 2.2 * SIZE
        assert [node for node, _ in told.notes] == [2]
        golden(told.notes[0][1])
    for host in hosts.hosts:
        assert_has(host, file)


def test_a_cable_that_is_cut_between_two_hosts_in_the_middle(hosts, monkeypatch):
    """The connection stands, and nothing comes any more; the notebook still reaches both."""
    file, done, pour = made(), threading.Event(), Link.pour

    def pour_half(self: Link, local: LocalBlob, offset: int = 0) -> Iterator[int]:
        if self.host.name == "dm1" and not done.is_set():
            done.set()
            half = LocalBlob(
                blob=replace(local.blob, size_bytes=SIZE // 2),
                path=local.path.with_name("half"),
            )
            half.path.write_bytes(local.path.read_bytes()[: SIZE // 2])
            yield from pour(self, half, offset)
            partial = f".distmagic/blobs/.{local.blob.sha256}.*"
            wait_until(
                lambda: size_on(hosts.hosts[1], partial) >= SIZE // 2,
                "half of it on dm2",
            )
            hosts.hosts[0].drop(source=hosts.hosts[1])
            offset = SIZE // 2
        yield from pour(self, local, offset)

    monkeypatch.setattr(Link, "pour", pour_half)
    with links_to(hosts) as links:
        before = hosts.sent_bytes()
        told = deliver(links, [file])
        assert (
            hosts.sent_bytes() - before < 1.7 * SIZE
        )  # the rest alone was sent to dm2
    assert [node for node, _ in told.notes] == [1]
    for host in hosts.hosts:
        assert_has(host, file)


def size_on(host: LabHost, pattern: str) -> int:
    said = host.exec(["sh", "-c", f"stat -c %s {pattern}"]).stdout.split()
    return max(map(int, said), default=0)


def test_a_file_that_has_rotted_is_no_source(hosts):
    """A host whose disk has rotted under the name is no source: it takes the file again, and serves the good one."""
    file = made()
    hosts.hosts[0].exec(
        [
            "sh",
            "-c",
            f"mkdir -p .distmagic/blobs; echo rotten > .distmagic/blobs/{file.blob.sha256}",
        ]
    )
    with links_to(hosts) as links:
        assert deliver(links, [file]).notes == []
    for host in hosts.hosts:
        assert_has(host, file)

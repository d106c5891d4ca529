"""A cluster of SkyPilot whose program is a script: found, refused, and its host keys kept a launch long."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.systems.skypilot import sky
from distmagic.systems.skypilot.cluster import Cluster, _ForwardedTransport
from distmagic.transports import local
from tests.builders.sky import Sky, entries
from tests.lab.waiting import HANG_S

OWNER = "ann@laptop:/home/ann/train.ipynb"
ASKER = NotebookAsker(can_ask=False)
TWO = entries("mine", ("10.0.0.1", "10.0.0.2"))
MINE = SkyRequest(name="mine")


@pytest.fixture
def skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sky:
    return Sky(tmp_path, monkeypatch)


def found(request: SkyRequest = MINE) -> Cluster:
    made = Cluster(request, OWNER)
    made.wait(ASKER, lambda _: None)
    return made


def refused(request: SkyRequest = MINE) -> DistmagicError:
    with pytest.raises(DistmagicError) as caught:
        found(request)
    return caught.value


def test_a_cluster_is_its_hosts(skypilot, golden):
    skypilot.has("mine", TWO)
    told: list[str] = []
    made = Cluster(MINE, OWNER)
    assert made.hosts == ()
    hosts = made.wait(ASKER, told.append)
    assert [host.name for host in hosts] == ["mine", "mine-worker1"]
    assert {host.allocation for host in hosts} == {made.source}
    assert [host.by_hand() for host in hosts] == ["ssh mine", "ssh mine-worker1"]
    golden(*told)
    assert skypilot.asked == ["status --output json"]
    assert made.wait(ASKER, told.append) == hosts
    assert len(told) == len(skypilot.asked) == 1
    assert made.fits(MINE)
    assert not made.fits(SkyRequest(name="other"))
    assert not made.fits(SlurmRequest())


def test_a_launch_has_a_file_of_host_keys_and_the_next_launch_another_one(skypilot):
    skypilot.has("mine", TWO)
    skypilot.has("mine-2", entries("mine-2", ("10.0.0.3",)))
    names = {}
    for key, request, launch in (
        ("first", MINE, 1), ("other", SkyRequest(name="mine-2"), 1), ("again", MINE, 1), ("next", MINE, 2),
    ):  # fmt: skip
        skypilot.has(request.name, launch=launch)
        made = found(request)
        Path(made._pins).write_text("a key")
        names[key] = made.source.name, Path(made._pins).name
    assert names["first"] == names["again"]
    assert names["first"][0] != names["next"][0]
    assert skypilot.pins() == sorted([names["other"][1], names["next"][1]])
    folder = skypilot.home / ".distmagic/known_hosts"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_clusters_that_cant_be_used(skypilot, golden):
    skypilot.has("mine", status="STOPPED")
    assert "is not up: SkyPilot reports STOPPED" in refused().message
    golden(refused(SkyRequest(name="other")))
    skypilot.has("mine")
    golden(refused())
    skypilot.has("mine", "Host other\n")
    golden(refused())


def test_skypilot_without_its_program(skypilot, monkeypatch, golden):
    monkeypatch.setenv("PATH", "/nowhere")
    with golden.raises(UsageError):
        Cluster(MINE, OWNER)
    skypilot.has("mine", TWO)
    first = found()
    assert [host.name for host in first.hosts] == ["mine", "mine-worker1"]
    assert found().source == first.source
    skypilot.has("mine", entries("mine", ("10.0.0.7",)))
    assert found().source != first.source  # other addresses: another launch


def test_a_program_that_fails(skypilot, golden):
    skypilot.does("status", "echo no such server >&2; exit 3")
    error = refused()
    assert isinstance(error, Unreachable)
    golden(error)


def test_a_program_that_hangs_is_ended(skypilot, monkeypatch, golden):
    skypilot.does("status", "trap '' TERM; echo $$ >&2; exec sleep 60")
    monkeypatch.setattr(sky, "STATUS_S", 0.3)
    monkeypatch.setattr(sky, "_END_S", 0.2)
    made = Cluster(MINE, OWNER)
    with golden.raises(Unreachable):
        made.wait(ASKER, lambda _: None)
    assert made._asked is not None
    assert made._asked._process.poll() is not None


def test_an_interrupt_ends_the_program(skypilot):
    skypilot.does("status", "exec sleep 60")
    made = Cluster(MINE, OWNER)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.wait(ASKER, interrupt)
    made.end()
    assert made._asked is not None
    assert made._asked._process.poll() is not None


def test_a_host_that_does_not_answer_makes_the_next_cell_ask_again(skypilot, golden):
    # Nothing listens on the discard port.
    skypilot.has("mine", entries("mine", ("127.0.0.1",), port=9))
    made = found()
    assert made.check(ASKER)
    with golden.raises(Unreachable):
        made.transport(made.hosts[0], Access(), ASKER)
    assert not made.check(ASKER)


def test_a_program_there_finds_its_address_towards_others(tmp_path, monkeypatch):
    """As a host runs what the transport starts; a leading ~/ is its home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "my python"
    program.write_text('#!/bin/sh\necho $DISTMAGIC_CLIENT; echo "$@"\n')
    program.chmod(0o755)
    for written in ("~/my python", str(program)):
        way = _ForwardedTransport(local.LocalTransport())
        process = way.start((written, "-u", "a 'b'"))
        assert process.wait(HANG_S) == 0
        assert process.read() == b"192.0.2.1\n-u a 'b'\n"
        way.close()

"""Cells on a cluster of SkyPilot: hosts of the lab, reached with files in SkyPilot's own form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distmagic
from distmagic import api
from distmagic.errors import HostErrors, HostKeyError
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest
from distmagic.session.session import Session
from tests.builders.sky import Sky, entries
from tests.e2e.runner import Watch, all_reduce, as_value
from tests.lab import Lab

pytestmark = pytest.mark.needs("lab")
WAY = Access()


@pytest.fixture
def kernel(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A kernel's session of its own; afterwards nothing is left on any host."""
    made = Session()
    monkeypatch.setattr(api, "session", lambda: made)
    yield made
    made.down()
    lab.assert_clean()


@pytest.fixture
def skypilot(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Sky:
    """A user of SkyPilot with a cluster `mine`: two hosts of the lab, each behind a command that forwards a port."""
    made = Sky(tmp_path, monkeypatch)
    addresses = tuple(host.address for host in lab.hosts[:2])
    # A host sees connections from itself, as those of Kubernetes do, to whose ports SkyPilot's server leads.
    options = (
        "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    proxy = f"ssh -i {lab.identity} {options} -W 127.0.0.1:%p root@%h"
    text = entries("mine", addresses, key=str(lab.identity), proxy=proxy)
    made.has("mine", text)
    return made


def run(screen: Watch | None = None) -> Any:
    return distmagic.run(
        as_value(all_reduce), allocation=SkyRequest(name="mine"), access=WAY, screen=screen or Watch(),
    )  # fmt: skip


@pytest.mark.quick
def test_a_cluster_of_skypilot_runs_a_cell_and_its_host_keys_are_those_seen_first(
    lab, kernel, skypilot
):
    found = run()
    hosts = [found.results[rank]["host"] for rank in range(2)]
    assert hosts == ["dm1", "dm2"]
    assert [node.host for node in found.state.nodes] == ["mine", "mine-worker1"]
    assert {float(found.results[rank]["total"]) for rank in range(2)} == {1.0}
    assert skypilot.asked == ["status --output json"]
    (name,) = skypilot.pins()
    pins = skypilot.home / ".distmagic/known_hosts" / name
    lines = sorted(pins.read_text().splitlines())
    shown = [host.known_hosts_line().split()[1:3] for host in lab.hosts[:2]]
    assert [line.split() for line in lines] == [
        ["mine", *shown[0]], ["mine-worker1", *shown[1]],
    ]  # fmt: skip

    # The same launch with another key is refused; the next launch may have new ones.
    kernel.down()
    lab.hosts[1].change_key()
    with pytest.raises((HostKeyError, HostErrors)) as caught:
        run()
    assert f"rm {pins}" in str(caught.value)
    skypilot.has("mine", launch=2)
    kernel.down()
    assert run().results[1]["host"] == "dm2"
    assert skypilot.pins() != [name]
    assert len(skypilot.pins()) == 1

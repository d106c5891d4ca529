"""Cells on a cluster of SkyPilot: hosts of the lab, reached with files in SkyPilot's own form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distmagic
from distmagic import api
from distmagic.clusters import sky, sky_words
from distmagic.errors import HostErrors, HostKeyError
from distmagic.request.allocation import ClusterRequest
from distmagic.request.spec import Access
from distmagic.session.names import owner
from distmagic.session.session import Session
from tests.builders.sky import Sky, entries
from tests.e2e.programs import count
from tests.e2e.runner import Watch, all_reduce, as_value
from tests.lab import Lab, wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(180)]
WAY = Access(warm_idle_s=0.0)


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
        as_value(all_reduce), allocation=ClusterRequest(name="mine"), access=WAY, screen=screen or Watch(),
    )  # fmt: skip


def test_a_cluster_of_skypilot_runs_a_cell_and_its_host_keys_are_those_seen_first(
    lab: Lab, kernel: Session, skypilot: Sky
) -> None:
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
    with pytest.raises((HostKeyError, HostErrors), match="has CHANGED") as caught:
        run()
    assert f"rm {pins}" in str(caught.value)
    skypilot.has("mine", launch=2)
    kernel.down()
    assert run().results[1]["host"] == "dm2"
    assert skypilot.pins() != [name]
    assert len(skypilot.pins()) == 1


# ---- a cluster that is launched

WANTED = ClusterRequest(nodes=2, idle_s=1.0)
# What SkyPilot's cloud and queue do: the files of the new cluster, and a command that runs on its head for itself.
_LAUNCH = """
echo Launching on Lab.
mkdir -p {home}/.sky/generated/ssh
cp {folder}/entries {home}/.sky/generated/ssh/{name}
echo '[{{"name": "{name}", "status": "UP", "cluster_hash": "7c9f", "launched_at": 1}}]' >{folder}/status.json
"""
_EXEC = """
for last; do :; done
ssh -i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@{address} "$last" </dev/null >{folder}/queue 2>&1 &
"""


def test_a_launched_cluster_is_held_as_long_as_a_detached_job_runs_there(
    lab: Lab, kernel: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skypilot = Sky(tmp_path, monkeypatch)
    monkeypatch.setattr(sky, "_LEAST_S", 1.0)
    name = sky_words.name_for(owner(), WANTED)
    addresses = tuple(host.address for host in lab.hosts[:2])
    (tmp_path / "entries").write_text(entries(name, addresses, key=str(lab.identity)))
    words = {"home": skypilot.home, "folder": tmp_path, "name": name}
    skypilot.does("launch", _LAUNCH.format(**words))
    skypilot.does("exec", _EXEC.format(key=lab.identity, address=addresses[0], **words))
    head = lab.hosts[0]

    def is_held() -> bool:
        return any("distmagic-hold" in one.cmdline for one in head.processes())

    screen = Watch()
    left = distmagic.run(
        as_value(count), 15.0, allocation=WANTED, access=WAY, detach=True, screen=screen,
    )  # fmt: skip
    assert kernel.clusters == (name,)
    commands = [line.partition(" ")[0] for line in skypilot.asked]
    assert commands == ["status", "launch", "exec", "status"]
    # It was idle for longer than its time when this job has ended, and still held.
    found = left.attach()
    assert dict(found.results) == {0: 150, 1: 150}
    assert is_held()
    wait_until(lambda: not is_held(), "the cluster not to be held", 30)
    kernel.down()
    assert skypilot.asked[-1] == f"down --yes {name}"

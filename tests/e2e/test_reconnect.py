"""Connections that break while ranks go on: the run goes on too, nothing is lost and nothing comes twice."""

from __future__ import annotations

import pytest

from distmagic.state.model import RunState
from tests.e2e import runner
from tests.e2e.programs import count
from tests.e2e.runner import as_value
from tests.lab.host import LabHost
from tests.lab.processes import HostProcess
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab")


def counted(state: RunState, rank: int) -> list[int]:
    return [
        int(line.text)
        for line in state.lines
        if line.rank == rank and line.stream == "stdout"
    ]


def written(host: LabHost) -> int:
    """Return how many numbers a host has of what its rank printed, whether or not anybody reads them."""
    (log,) = host.home.glob(".distmagic/jobs/*/*/rank1.stdout.log")
    return len(log.read_text().splitlines())


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            "contact killed",
            marks=pytest.mark.promise(
                "a broken connection is restored while the ranks continue"
            ),
        ),
        "contact killed after a cleaner of /tmp was there",
    ],
)
def test_broken_connection_is_made_again(lab, fault):
    host = lab.hosts[1]

    def contacts() -> list[HostProcess]:
        return [p for p in host.processes() if p.cmdline[1:3] == ("-u", "-c")]

    def break_it() -> None:
        found = contacts()
        assert found
        pids = [str(p.pid) for p in found]
        if (
            "/tmp" in fault
        ):  # then the next connection comes before the agent has made its sockets anew
            host.exec(
                ["sh", "-c", f"rm -rf /tmp/distmagic-*; kill -9 {' '.join(pids)}"]
            )
            return
        host.exec(["kill", "-9", *pids])
        wait_until(lambda: not contacts(), "the end of the connection")
        before = written(host)
        # The run's own thread waits here: nobody connects before it goes on.
        wait_until(lambda: written(host) > before + 5, "ranks that go on")
        assert contacts() == []

    screen = runner.Watch(
        lambda state: any((w.step or 0) > 5 for w in state.workers.values()), break_it
    )
    run = runner.run(lab, "dm1:1,dm2:1", as_value(count), 5.0, screen=screen)
    assert run.state.phase == "done"
    assert dict(run.results) == {0: 50, 1: 50}
    assert counted(run.state, 1) == list(range(50))
    assert [row["value"] for row in run.metrics if row["rank"] == 1] == list(range(50))
    assert run.state.nodes[1].broken == ""


class Cable(runner.Watch):
    """Pulls a host's cable when its rank works, and puts it back when the launcher has noticed."""

    def __init__(self, host: LabHost) -> None:
        super().__init__(
            lambda state: any((w.step or 0) > 5 for w in state.workers.values()),
            host.cut,
        )
        self._host = host
        self.why = ""

    def show(self, state: RunState) -> None:
        """Put the cable back."""
        if state.nodes[1].broken and not self.why:
            self.why = state.nodes[1].broken
            self._host.heal()
        super().show(state)


def test_ranks_that_end_while_the_cable_of_their_host_is_pulled(lab):
    screen = Cable(lab.hosts[1])
    run = runner.run(
        lab,
        "dm1:1,dm2:1",
        as_value(count),
        3.0,
        screen=screen,
        node_lost_after_s=60.0,
    )
    assert screen.why.startswith("dm2: ")
    assert run.state.phase == "done"
    assert dict(run.results) == {0: 30, 1: 30}
    assert counted(run.state, 1) == list(range(30))

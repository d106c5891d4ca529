"""An interrupt at any moment from the first look to the last word: it is told truthfully, and nothing is left."""

from __future__ import annotations

import os

import pytest

from distmagic.connection.link import Link
from distmagic.errors import Cancelled
from distmagic.outcome.run import Run
from distmagic.state.model import RunState
from tests.builders.golden import Golden
from tests.builders.jobs import press
from tests.e2e import runner
from tests.e2e.runner import as_value
from tests.lab import Lab

pytestmark = pytest.mark.needs("lab")

HOSTS = "dm1:1,dm2:1"


def wait_long(_: bytes = b"") -> None:
    import time

    time.sleep(1000)


@pytest.mark.parametrize("phase", ["connecting", "sending", "running"])
def test_an_interrupt_says_what_it_interrupted(
    lab: Lab, phase: str, golden: Golden
) -> None:
    # So that it can be seen on its way.
    much = os.urandom(48 << 20) if phase == "sending" else b""
    screen = runner.Watch(lambda state: state.phase == phase, press)
    error = runner.failure(lab, HOSTS, wait_long, much, screen=screen)
    assert isinstance(error, Cancelled)
    golden(error.message)
    assert screen.last is not None
    assert screen.last.phase == "stopped"
    jobs = [
        path for host in lab.hosts for path in host.files("/home/node/.distmagic/jobs")
    ]
    assert bool(jobs) == (phase == "running")


def test_a_host_that_does_not_confirm_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Link.start

    def start_frozen(self: Link, request: object) -> None:
        if self.host.name == "dm2":
            lab.hosts[1].freeze()
            press()
        start(self, request)

    monkeypatch.setattr(Link, "start", start_frozen)
    way = runner.access(lab, lease_s=3.0)
    with pytest.raises(Cancelled) as caught:
        runner.distmagic.run(
            as_value(wait_long), hosts=HOSTS, access=way, screen=runner.Watch()
        )
    assert "dm2 did not confirm" in caught.value.message
    assert " dm2 " in caught.value.hint
    lab.hosts[1].thaw()
    lab.assert_clean()


class Late(runner.Watch):
    """Interrupts when the last state is shown."""

    def finish(self, state: RunState) -> None:
        super().finish(state)
        press()

    def can_type(self) -> bool:
        return False

    def requests(self) -> tuple[str, ...]:
        return ()


def test_an_interrupt_of_a_run_that_is_over_keeps_the_run(
    lab: Lab, golden: Golden
) -> None:
    error = runner.failure(lab, HOSTS, int, screen=Late())
    assert isinstance(error, Cancelled)
    golden(error.message)
    assert isinstance(error.run, Run)
    assert dict(error.run.results) == {0: 0, 1: 0}

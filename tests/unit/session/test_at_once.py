"""No host waits for another: whatever is done on many hosts is under way on all of them at the same time.

Each host goes on only when all others are as far, so that an act that is done on some of them first never ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.connection.connections import Connections
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, NodeLost
from distmagic.outcome.run import Run
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec
from distmagic.session.session import Session
from distmagic.state.model import RunState
from tests.builders.hosts import FakeHost, connector, runs_on, runs_to_its_end
from tests.builders.jobs import PressingScreen, begun, payload_in
from tests.builders.runs import FakeScreen

COUNT = 40
COLD = Access(cold=True)


class Fleet:
    """Many fake hosts, and a session that reaches them."""

    def __init__(self, folder: Path) -> None:
        self.hosts = tuple(
            FakeHost(f"gpu-{number}", runs_on) for number in range(COUNT)
        )
        self.session = Session(Connections(connector(*self.hosts)))
        self._payload = payload_in(folder)
        self._meetings: dict[object, threading.Event] = {}

    def hold(self, *acts: object, hosts: tuple[FakeHost, ...] | None = None) -> None:
        """Have hosts, all if none are named, go on with each of these acts only when all of them are in it."""
        hosts = hosts or self.hosts
        for act in acts:
            self._meetings[act] = threading.Event()
            barrier = threading.Barrier(len(hosts), self._meetings[act].set)
            for host in hosts:
                host.barriers[act] = barrier

    def let_go(self) -> None:
        """Have no host wait for others any more."""
        held = [barrier for host in self.hosts for barrier in host.barriers.values()]
        for host in self.hosts:
            host.barriers.clear()
        for barrier in held:
            barrier.abort()

    @property
    def unmet(self) -> list[object]:
        """The acts in which not all of the hosts have been at the same time yet."""
        return [act for act, meeting in self._meetings.items() if not meeting.is_set()]

    def reach(self, access: Access = COLD, spec: JobSpec | None = None) -> FirstLinks:
        hosts = tuple(one.host for one in self.hosts)
        return self.session.reach(hosts, access, NotebookAsker(can_ask=False), spec)

    def launch(self, screen: FakeScreen | None = None, access: Access = COLD) -> Run:
        reaching = self.reach(access, JobSpec())
        run = self.session.launch(
            reaching, JobSpec(), self._payload, screen or FakeScreen()
        )
        assert isinstance(run, Run)
        return run


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.let_go()
    fleet.session.close()


def are_there(state: RunState) -> bool:
    return len(state.workers) == COUNT


# ---- a run


def test_a_run_from_connecting_to_its_results(fleet):
    for host in fleet.hosts:
        host.begins = runs_to_its_end
    fleet.hold("connect", "boot", p.OfferBlobs, p.StartNode, p.GetFile)
    fleet.hold(p.GetRoute, hosts=fleet.hosts[1:])  # these dial the first one
    assert fleet.launch().state.phase == "done"
    assert fleet.unmet == []


def test_an_interrupt_stops_all_nodes(fleet):
    fleet.hold(p.StopNode)
    with pytest.raises(Cancelled):
        fleet.launch(PressingScreen(are_there))
    assert fleet.unmet == []


def test_what_agents_left_is_swept(fleet):
    def agents_are_killed(state: RunState) -> None:
        if are_there(state) and not state.lost:
            for host in fleet.hosts:
                host.processes[0].put(p.AgentGone(error="Killed"))

    fleet.hold(p.SweepJob)
    with pytest.raises(NodeLost):
        fleet.launch(FakeScreen(agents_are_killed))
    assert fleet.unmet == []


def test_leases_are_renewed(fleet):
    fleet.hold(p.RenewLease)

    def have_met(_: RunState) -> bool:
        return not fleet.unmet

    with pytest.raises(Cancelled):
        fleet.launch(PressingScreen(have_met), Access(cold=True, lease_s=1.0))


def test_a_job_is_followed(fleet):
    job = begun(*fleet.hosts)
    fleet.hold("connect", "boot", p.FollowJob, p.StopNode)
    with pytest.raises(Cancelled):
        fleet.session.attach(fleet.reach(), job, PressingScreen(are_there))
    assert fleet.unmet == []


# ---- apart from a run


ASKS: dict[type, Callable[[Fleet, FirstLinks], object]] = {
    p.ListJobs: lambda fleet, reaching: fleet.session.housekeeping.jobs(reaching),
    p.StopNode: lambda fleet, reaching: fleet.session.housekeeping.stop(reaching, begun(*fleet.hosts)),
    p.GetFile: lambda fleet, reaching: fleet.session.housekeeping.logs(reaching, begun(*fleet.hosts), 0),
    p.DumpStacks: lambda fleet, reaching: fleet.session.housekeeping.stacks(reaching, begun(*fleet.hosts)),
    p.RemoveJob: lambda fleet, reaching: fleet.session.housekeeping.remove(reaching, [begun(*fleet.hosts)]),
    p.PruneBlobs: lambda fleet, reaching: fleet.session.housekeeping.cached(reaching),
    p.ListTemplates: lambda fleet, reaching: fleet.session.housekeeping.templates(reaching),
}  # fmt: skip


@pytest.mark.parametrize("request_type", ASKS, ids=lambda kind: kind.__name__)
def test_all_hosts_are_asked(fleet, request_type):
    for host in fleet.hosts:
        host.answers[p.DumpStacks] = lambda request: [
            p.StacksDone(request_id=request.request_id, ranks=0)
        ]
    fleet.hold("connect", "boot", request_type)
    ASKS[request_type](fleet, fleet.reach())
    assert fleet.unmet == []

"""`--devices` that other jobs have: whom a launch asks for them, what is shown meanwhile, and what an interrupt leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distmagic.errors import Cancelled, PreflightError, Unreachable
from distmagic.planning.devices import waits_for
from distmagic.remote.wire import protocol as p
from distmagic.request.spec import JobSpec
from distmagic.runner import connect, run_loop
from tests.builders.hosts import HANG_UP, FakeHost, reach
from tests.builders.jobs import assert_left, launched, press, two
from tests.builders.runs import FakeScreen

DEVICES = JobSpec(devices=("0", "1"))
TEMPLATE = p.TemplateRequest(owner="nb", idle_s=900.0, lease_s=60.0, env={}, defaults={})  # fmt: skip


class Queue:
    """What a host answers who is asked for devices: `others` have them, one job less each time it is asked."""

    def __init__(self, *others: p.DeviceClaim) -> None:
        self.others = list(others)
        self.asked: list[str] = []

    def __call__(self, request: p.Message) -> list[p.Message] | None:
        assert isinstance(request, p.ClaimDevices)
        if not request.devices:
            self.asked.append("give back")
            return [p.DevicesClaimed()]
        assert (request.job, request.devices) == ("j", ("0", "1"))
        self.asked.append("take")
        answer = p.DevicesClaimed(others=tuple(self.others))
        del self.others[:1]
        return [answer]


OLD = p.DeviceClaim(device="0", job="j-1", owner="ann@laptop:train.ipynb")
OLDER = p.DeviceClaim(device="1", job="j-0")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly a pause between two questions, or between two states that are shown."""
    monkeypatch.setattr(connect, "_PAUSE_S", 0.01)
    monkeypatch.setattr(run_loop, "BEAT_S", 0.0001)


def hosts_with(first: Queue, second: Queue) -> tuple[FakeHost, FakeHost]:
    """Return two hosts with two devices each."""
    hosts = two()
    for host, queue in zip(hosts, (first, second), strict=True):
        host.facts = replace(host.facts, gpus=2)
        host.answers[p.ClaimDevices] = queue
    return hosts


@pytest.fixture(autouse=True)
def shown_at_once(monkeypatch):
    """Show the first state of each run, although no time passes."""
    monkeypatch.setattr(run_loop, "_FIRST_SHOWN_S", 0.0)


def test_a_run_asks_all_hosts_at_once_and_begins_if_the_devices_are_free(tmp_path):
    queues = Queue(), Queue()
    hosts = hosts_with(*queues)
    screen = FakeScreen()
    followed = launched(tmp_path, *hosts, spec=DEVICES, screen=screen)
    assert followed.state.phase == "done"
    assert [queue.asked for queue in queues] == [["take"], ["take"]]
    assert not any(state.phase == "waiting" for state in screen.shown)
    for host in hosts:
        kinds = [type(request) for request in host.requests]
        assert kinds.index(p.ClaimDevices) < kinds.index(p.OfferBlobs)


def test_a_run_without_devices_asks_for_none(tmp_path):
    queues = Queue(OLD), Queue(OLD)
    assert launched(tmp_path, *hosts_with(*queues)).state.phase == "done"
    assert [queue.asked for queue in queues] == [[], []]


def test_a_run_asks_again_until_all_hosts_have_them_free_and_shows_for_whom(tmp_path):
    first, second = Queue(OLD), Queue(OLDER, OLD)
    screen = FakeScreen()
    hosts = hosts_with(first, second)
    followed = launched(tmp_path, *hosts, spec=DEVICES, screen=screen)
    assert followed.state.phase == "done"
    # Nothing is kept of one host while another one's devices are waited for: else two runs might wait in a circle.
    again = ["take", "give back"]
    assert [first.asked, second.asked] == [[*again, *again, "take"]] * 2
    shown = [
        (state.nodes[0].waits_for, state.nodes[1].waits_for, state.phase)
        for state in screen.shown
        if any(node.waits_for for node in state.nodes)
    ]
    assert (waits_for([OLD]), waits_for([OLDER, OLD]), "waiting") in shown
    assert ("", waits_for([OLD]), "waiting") in shown
    assert screen.finished[-1].phase == "done"


def test_a_run_that_is_to_be_detached_says_that_it_needs_the_notebook_while_it_waits(
    tmp_path, golden
):
    hosts = hosts_with(Queue(), Queue(OLD))
    screen = FakeScreen()
    followed = launched(
        tmp_path, *hosts, spec=replace(DEVICES, detach=True), screen=screen
    )
    shown = {node.waits_for for state in screen.shown for node in state.nodes}
    (text,) = shown - {""}
    golden(text.replace(waits_for([OLD]), "DEVICES"))
    assert followed.state.phase == "done"


def test_a_run_that_is_not_to_wait_fails_and_its_links_rest_without_devices(tmp_path):
    queues = Queue(OLD), Queue()
    hosts = hosts_with(*queues)
    reaching = reach(*hosts)
    for link in reaching.wait().values():
        link.kept = TEMPLATE
    with pytest.raises(PreflightError) as caught:
        launched(tmp_path, reaching=reaching, spec=replace(DEVICES, no_wait=True))
    assert caught.value.message.endswith(f" {waits_for([OLD])}.")
    assert [queue.asked for queue in queues] == [["take", "give back"]] * 2
    assert [host.requests_of(p.StartNode) for host in hosts] == [[], []]
    assert [host.is_left for host in hosts] == [False, False]
    reaching.opener.connections.close()


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_hangs_up_which_gives_devices_back(tmp_path, at):
    class Interrupted(Queue):
        def __call__(self, request: p.Message) -> list[p.Message] | None:
            answer = super().__call__(request)
            if len(self.asked) == at:
                press()
            return answer

    hosts = hosts_with(Interrupted(OLD, OLD, OLD), Interrupted(OLD, OLD, OLD))
    screen = FakeScreen()
    with pytest.raises(Cancelled) as caught:
        launched(tmp_path, *hosts, spec=DEVICES, screen=screen)
    assert str(caught.value) == "Interrupted; nothing was started."
    assert [state.phase for state in screen.finished] == ["stopped"]
    assert_left(*hosts)


class Breaking(Queue):
    """A host that hangs up when it is asked for devices for the second time."""

    def __call__(self, request: p.Message) -> list[p.Message] | None:
        answer = super().__call__(request)
        return HANG_UP if len(self.asked) == 3 else answer


def test_a_run_whose_connection_breaks_while_it_waits_waits_on_over_a_new_one(tmp_path):
    first, second = Breaking(), Queue(OLDER, OLD)
    hosts = hosts_with(first, second)
    reaching = reach(*hosts)
    for link in reaching.wait().values():
        link.warm = link.kept = TEMPLATE
    followed = launched(tmp_path, reaching=reaching, spec=DEVICES)
    assert followed.state.phase == "done"
    assert [len(host.processes) for host in hosts] == [2, 2]
    assert hosts[0].requests_of(p.TemplateRequest) == [TEMPLATE]
    assert [one.warm for one in hosts[0].requests_of(p.StartNode)] == [TEMPLATE]
    reaching.opener.connections.close()


def test_a_host_that_does_not_answer_in_time_while_a_run_waits_does_not_end_the_waiting(
    tmp_path, monkeypatch
):
    class Silent(Queue):
        """A host that gives no answer when it is asked for devices for the second time."""

        def __call__(self, request: p.Message) -> list[p.Message] | None:
            answer = super().__call__(request)
            return [] if len(self.asked) == 3 else answer

    monkeypatch.setattr("distmagic.connection.link.BOOT_TIMEOUT_S", 1.0)
    first = Silent()
    followed = launched(tmp_path, *hosts_with(first, Queue(OLD)), spec=DEVICES)
    assert followed.state.phase == "done"
    assert len(first.asked) > 3


def test_a_host_that_is_gone_ends_the_waiting_and_what_others_kept_is_given_back(
    tmp_path,
):
    hosts = hosts_with(Breaking(), Queue(OLDER, OLD))
    reaching = reach(*hosts)
    reaching.wait()
    hosts[0].error = Unreachable("gpu-a", "port 22 refused the connection.")
    with pytest.raises(Unreachable):
        launched(tmp_path, reaching=reaching, spec=DEVICES)
    assert_left(*hosts)

"""GPUs that a run holds and does not use: a note after 30 minutes, by looks that are dated here."""

from __future__ import annotations

import pytest

from distmagic.remote.wire import protocol as p
from distmagic.render.notes import notes
from distmagic.state.events import Event, Gone
from distmagic.state.fold import fold
from distmagic.state.model import RunState
from distmagic.state.standstill import idle_hosts, uses_gpus
from tests.builders.events import at, begun, progress

AT_WORK, IDLE = 0.5, 0.04


def looks(
    *shares: float | None,
    node: int = 0,
    from_s: float = 0.0,
    until_s: float = 1900.0,
    every_s: float = 50.0,
) -> list[Event]:
    """Return a look every so often, at which the GPUs of a host are used so much."""
    gpus = tuple(p.Gpu(utilization=share) for share in shares)
    count = int((until_s - from_s) / every_s)
    times = [from_s + every_s * number for number in range(count + 1)]
    return [at(p.Hardware(gpus=gpus), node, at_s) for at_s in times]


def on_gpus(*events: Event) -> RunState:
    """Return a run whose ranks 0 and 2 use the first GPU of their hosts, and others the second."""
    devices = [
        progress(rank, rank // 2, device=f"cuda:{rank % 2}", step=1.0)
        for rank in range(4)
    ]
    return begun(*devices, *events)


def test_gpus_that_are_idle_for_long_get_a_note_that_names_the_hosts(golden):
    both = [*looks(IDLE, IDLE), *looks(IDLE, 0.0, node=1)]
    state = on_gpus(*sorted(both, key=lambda event: event.at_s))
    assert idle_hosts(state) == {"gpu-a": 1900.0, "gpu-b": 1900.0}
    golden(*notes(state))


@pytest.mark.parametrize(
    "events",
    [
        looks(IDLE, AT_WORK),
        looks(IDLE, None),
        looks(IDLE, IDLE, until_s=1750.0),
        [*looks(IDLE, IDLE, until_s=1000.0), *looks(AT_WORK, IDLE, from_s=1000.0, until_s=1000.0), *looks(IDLE, IDLE, from_s=1050.0)],
        [*looks(IDLE, IDLE, until_s=1000.0), *looks(IDLE, IDLE, from_s=1200.0, until_s=2900.0)],
        looks(),
    ],
    ids=["one works", "nothing tells", "not for long", "it worked", "nobody looked", "none"],
)  # fmt: skip
def test_gpus_that_may_have_worked_get_none(events):
    assert idle_hosts(on_gpus(*events)) == {}


def test_only_the_gpus_of_its_own_ranks_count():
    mine = begun(progress(0, device="cuda:0", step=1.0), *looks(IDLE, AT_WORK))
    assert idle_hosts(mine) == {"gpu-a": 1900.0}
    on_cpus = begun(progress(0, step=1.0), *looks(IDLE, IDLE))
    assert idle_hosts(on_cpus) == {}


def test_after_its_end_a_run_holds_nothing():
    state = on_gpus(*looks(IDLE, IDLE))
    assert idle_hosts(fold(state, [at(Gone(), node) for node in (0, 1)])) == {}


@pytest.mark.parametrize(("shares", "since_s", "found"), [
    ((AT_WORK, 0.0), 0.0, True),
    ((IDLE, IDLE), 0.0, False),
    ((None, None), 0.0, False),
    ((), 0.0, False),
    ((AT_WORK, AT_WORK), 1900.0, False),
    ((IDLE, IDLE, AT_WORK), 0.0, False),
], ids=["one works", "idle", "unknown", "none", "nothing new", "another's"])  # fmt: skip
def test_whether_the_gpus_of_ranks_work(shares, since_s, found):
    assert uses_gpus(on_gpus(*looks(*shares)), since_s) is found

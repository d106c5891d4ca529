"""Which events show that a rank has advanced, and when a run is called hung."""

from __future__ import annotations

import pytest

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Broken, Event, Lost, Mended, StopRequested
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.progress import is_hung
from tests.builders.events import HOSTS, at, begun, ended, output, progress, worker


def after(*events: Event, now: float = 100.0) -> RunState:
    return begun(*events, at(None, at_s=now))


BAR = p.Bar(id=1, n=3.0, total=9.0)
RETRYING = """\
[W1125 14:24:25.903884914 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 10.99.0.11:47647 - retrying
"""
FRAMES = """\
Exception raised from tryConnect at /pytorch/torch/csrc/distributed/c10d/socket.cpp:925 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f5705b66b8d in /torch/lib/libc10.so)
<omitting python frames>
frame #44: _start + 0x21 (0x55c3ed675081 in /usr/bin/python3)

"""


@pytest.mark.parametrize(("event", "advances"), [
    (progress(0, at_s=1.0, step=2.0), True),
    (progress(0, at_s=1.0, step=1.0), False),  # where it is already
    (progress(0, at_s=1.0, device="cuda:0"), False),
    (progress(0, at_s=1.0, points=p.points_of([p.MetricRow(at_s=1.0, metrics={"loss": 1.0})])), True),
    (progress(0, at_s=1.0, bars=(BAR,)), True),
    (progress(2, 1, at_s=1.0, restart=1, step=5.0), False),  # of a rank that is no more
    (ended(1), True),
    (worker(1, 0, restart=1, local=1), True),
    (output("step 3\n", 1), True),  # it has never reported: how else could it show that it goes on
    (output(f"{RETRYING}{FRAMES}", 1), False),  # as torch does while it waits
    (output(FRAMES, 1), False),  # it may come in pieces
    (output(f"{FRAMES}step 3\n", 1), True),
    (output("[W1125 14:24:25.903884914 init.cpp:9] CUDA is slow\n", 1), True),
    (output("still here\n", 0), False),
    (output("warning\n", -1), False),
    (at(Mended(), 1), True),
    (at(p.Notice(text="x"), 1), False),
    (at(p.Stacks(request_id="ask1", rank=0, local_rank=0), 0), False),
])  # fmt: skip
def test_what_counts_as_an_advance(event, advances):
    state = begun(progress(0, step=1.0))
    later = fold(state, [Event(node_rank=event.node_rank, at_s=50.0, what=event.what)])
    assert (later.advanced_at_s, is_hung(fold(later, [at(None, at_s=61.0)]), 20.0)) == (
        (50.0, False) if advances else (1.0, True)
    )


def test_a_bar_that_is_only_drawn_anew_has_not_moved():
    state = begun(progress(0, bars=(BAR,)))
    again = p.Bar(id=1, n=3.0, total=9.0, rate=0.1, postfix="later")
    assert (
        fold(
            state, [Event(node_rank=0, at_s=9.0, what=progress(0, bars=(again,)).what)]
        ).advanced_at_s
        == 1.0
    )


@pytest.mark.parametrize(("events", "timeout_s", "hangs_"), [
    ([], None, False),
    ([], 98.0, True),
    ([], 99.5, False),
    ([at(Broken(why="cut"), 1)], 10.0, False),
    ([at(Broken(why="cut"), 1), at(Lost(why="switched off"), 1)], 10.0, True),  # an elastic job goes on without it
    ([at(StopRequested(reason="failed"))], 10.0, False),
    ([*(ended(rank, rank // 2) for rank in range(4))], 10.0, False),  # torchrun alone is slow to end
])  # fmt: skip
def test_when_a_run_hangs(events, timeout_s, hangs_):
    assert is_hung(after(*events), timeout_s) == hangs_


def test_hosts_that_only_start_do_not_hang():
    assert not is_hung(fold(begin("j", HOSTS), [at(None, at_s=999.0)]), 10.0)

"""The beginning of a run, without which hosts a job begins; and its end, the sweep of lost hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.errors import ConnectionLost, PreflightError
from distmagic.planning.plan import make_plan
from distmagic.request.spec import JobSpec
from distmagic.runner import launch
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.launch import lost_at_start
from distmagic.runner.run_loop import RunLoop
from distmagic.state.events import Lost
from tests.builders.events import at, begun
from tests.builders.plans import A, B, reached
from tests.builders.runs import FakeScreen

C = reached("gpu-c", "10.0.0.3", "eth1", slots="gpu", gpus=4)
GONE = ConnectionLost("gpu-b: the connection ended.", "")


@pytest.mark.parametrize(
    ("spec", "errors", "lost"),
    [
        ({}, [None, GONE, None], {1: "gpu-b: the connection ended."}),
        ({}, [None, None, None], {}),
        ({}, [GONE, None, None], {}),
        ({"nnodes": (3, 4)}, [None, GONE, None], {}),
        ({"max_restarts": 0}, [None, GONE, None], {}),
        ({}, [None, GONE, PreflightError("gpu-c", "has no room", "")], {}),
        ({}, [None, GONE, KeyboardInterrupt()], {}),
    ],
)
def test_an_elastic_job_begins_without_hosts_that_are_lost_in_the_moment_of_its_start(spec, errors, lost):
    plan = make_plan(
        JobSpec(**{"nnodes": (1, 4), "max_restarts": 3, **spec}),
        (A, B, C),
        job="j-1",
        lease_s=60.0,
        owner="nb",
        local_cwd="/nb",
    )
    assert lost_at_start(plan, errors) == lost


def test_a_bug_in_the_sweep_of_a_lost_host_takes_no_run_away():
    class Broken:
        def link(self, *_: object, **__: object) -> Any:
            raise RuntimeError("a bug")

    def clock() -> float:
        return 1.0

    state = begun(at(Lost(why="cut off"), 0), at(Lost(why="cut off"), 1))
    loop = RunLoop(state, EventQueue(clock), FakeScreen(), lambda longest_s: None, Interrupts(), clock, lambda: "id")
    table: Any = SimpleNamespace(rows=[SimpleNamespace(host_index=index, link=None) for index in range(2)])
    reaching: Any = Broken()
    launch._sweep(loop, reaching, table)
    assert loop.state.lost == state.lost

"""The beginning of a run: without which hosts a job begins."""

from __future__ import annotations

import pytest

from distmagic.errors import ConnectionLost, PreflightError
from distmagic.planning.plan import make_plan
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import lost_at_start
from tests.builders.plans import A, B, reached

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

"""`--devices`: which GPUs of a shared host a job may use, and how many ranks it has there."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from distmagic.errors import PreflightError, UsageError
from distmagic.planning.devices import missing_at_join, refusal, waits_for
from distmagic.planning.plan import ranks_of, warming
from distmagic.remote.wire.protocol import DeviceClaim
from distmagic.request import flags
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec
from tests.builders.plans import A, plan_for

FOUR = replace(A, facts=replace(A.facts, gpus=4))


def test_a_rank_for_each_device_and_no_other_device():
    spec = flags.parse_line("--devices 3,1", flags.Defaults()).spec
    plan = plan_for(spec, FOUR)
    (node,) = plan.nodes
    assert node.nproc_per_node == 2
    assert ("CUDA_VISIBLE_DEVICES", "3,1") in node.env
    kept = warming(spec, Access(), FOUR.host, FOUR.facts, "nb")
    assert kept is not None
    assert kept.env == {"CUDA_VISIBLE_DEVICES": "3,1"}, (
        "what is kept loaded has them, too"
    )


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("--devices 0,1 --nproc-per-node 6", 6),
        ("--devices 0,1 --nproc-per-node gpu", 2),
        ("--devices GPU-1b2c,MIG-3/7/0", 2),
        ("", 4),
    ],
)
def test_what_is_said_of_ranks_counts_more(line, ranks):
    spec = flags.parse_line(line, flags.Defaults()).spec
    assert ranks_of(FOUR.host, FOUR.facts, spec) == ranks


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_a_device_that_a_host_does_not_have_is_named(gpus, golden):
    with golden.raises(PreflightError):
        ranks_of(FOUR.host, replace(FOUR.facts, gpus=gpus), JobSpec(devices=("0", "3")))


@pytest.mark.parametrize(
    "line",
    [
        "--devices 0,,1",
        "--devices '0 1'",
        "--devices 0,0",
        "--no-wait",
        "--devices 0 --env CUDA_VISIBLE_DEVICES=1",
    ],
)
def test_a_wrong_list_says_so(line, golden):
    with golden.raises(UsageError):
        flags.parse_line(line, flags.Defaults())


# ---- devices that other jobs have


def claim(device: str, job: str, **more) -> DeviceClaim:
    at_noon = time.mktime((2026, 11, 22, 12, 5, 59, 0, 0, -1))
    return DeviceClaim(device=device, job=job, **{"since_s": at_noon, **more})


HELD = claim("0", "j-1", owner="ann@laptop:train.ipynb")


def test_what_a_run_waits_for(golden):
    for claims in (
        [HELD],
        [claim("1", "j-1"), claim("0", "j-1")],
        [claim("0", "")],
        [claim("0", "j-1"), claim("1", "j-2")],
        [claim("0", "j-1"), claim("1", "j-2"), claim("2", "j-3"), claim("3", "j-3")],
    ):  # fmt: skip
        golden(waits_for(claims))


def test_a_run_that_is_not_to_wait_says_who_has_the_devices_and_what_to_do(golden):
    golden(refusal("gpu-a", [HELD]))
    golden(refusal("gpu-a", [claim("0", "")]))
    golden(missing_at_join("gpu-a", [claim("0", "j-1")]))

"""What may be asked for, and what is said of what may not."""

import math

import pytest

from distmagic.api import from_options
from distmagic.errors import UsageError
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec, split_endpoint


@pytest.mark.parametrize(
    "asked",
    [
        {"nproc_per_node": 0},
        {"nproc_per_node": -1},
        {"nproc_per_node": "all"},
        {"nnodes": (0, 2)},
        {"nnodes": (-1, -1)},
        {"nnodes": (3, 2)},
        {"max_restarts": -1},
        {"rdzv_backend": "etcd"},
        {"nnodes": (1, 2), "rdzv_backend": "static"},
        {"master_port": 0},
        {"master_port": 65536},
        {"rdzv_endpoint": "a:b"},
        {"timeout_s": 0.0},
        {"timeout_s": -2.5},
        {"timeout_s": math.nan},
        {"hang_timeout_s": 0.0},
        {"hang_timeout_s": 9.0, "detach": True},
        {"env": (("2X", "1"),)},
        {"env": (("A", "1"), ("", "1"))},
        {"env": (("A\n", "1"),)},
        {"env": (("A", "1\0"),)},
    ],
    ids=str,
)
def test_what_can_not_be_asked_for(asked, golden):
    with golden.raises(UsageError):
        JobSpec(**asked)


def test_elastic_is_a_range_of_two_ends():
    assert JobSpec(nnodes=(1, 2)).is_elastic
    assert not JobSpec(nnodes=(2, 2), rdzv_backend="static").is_elastic
    assert not JobSpec().is_elastic


def test_values_of_env_are_not_shown():
    assert "hunter2" not in repr(JobSpec(env=(("PASSWORD", "hunter2"),)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("gpu-a", ("gpu-a", None)),
        ("fd00::1", ("fd00::1", None)),
        ("[fd00::1]", ("fd00::1", None)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
    ],
)
def test_an_endpoint(text, parts):
    assert split_endpoint(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":29500",
        "a:",
        "a:0",
        "a:70000",
        "a b:1",
        "[]:1",
        "[fd00::1]1",
        "a:²",
        "$(x):1",
    ],
)
def test_what_is_no_endpoint(text):
    with pytest.raises(UsageError) as caught:
        split_endpoint(text)
    assert (
        str(caught.value)
        == f"--rdzv-endpoint {text!r} is not address:port.\nWrite 10.0.0.1:29500."
    )


def test_a_python_for_one_host_and_for_all_others():
    access = Access(pythons=(("", "python3.11"), ("gpu-a", "/opt/bin/python")))
    assert (access.python_of("gpu-a"), access.python_of("gpu-b")) == (
        "/opt/bin/python",
        "python3.11",
    )
    assert Access().python_of("gpu-a") is None


@pytest.mark.parametrize(
    "asked",
    [
        {"connect_timeout_s": 0.0},
        {"connect_timeout_s": math.inf},
        {"lease_s": 0.5},
        {"warm_idle_s": -1},
        {"lease_s": math.nan},
    ],
    ids=str,
)
def test_times_that_are_none(asked, golden):
    with golden.raises(UsageError):
        Access(**asked)


def test_options_become_a_job_and_a_way_to_the_hosts():
    options = {
        "nproc_per_node": 2,
        "env": {"A": "1"},
        "python": "/p",
        "ssh_config": "c",
        "lease_s": 5.0,
    }
    job, way = from_options(options, Access(ssh_command="ssh"))
    assert (job.nproc_per_node, job.env) == (2, (("A", "1"),))
    assert way == Access(
        ssh_command="ssh", ssh_config="c", lease_s=5.0, pythons=(("", "/p"),)
    )
    assert (
        from_options({"python": {"gpu-a": "/a"}}, Access())[1].python_of("gpu-a")
        == "/a"
    )
    assert from_options({}, way) == (JobSpec(), way)


def test_a_variable_that_torchrun_sets_itself(golden):
    with golden.raises(UsageError):
        JobSpec(env=(("RANK", "7"),))


@pytest.mark.parametrize("options", [
    pytest.param({"max_restarts": "9" * 5000}, id="5,000 digits"),
    {"max_restarts": True},
    {"timeout_s": "2m"},
    {"detach": 1},
    {"cwd": 3},
    {"nproc_per_node": 2.5},
], ids=str)  # fmt: skip
def test_an_option_of_a_wrong_kind(options, golden):
    with golden.raises(UsageError):
        from_options(options, Access())


def test_options_of_the_right_kinds_are_taken():
    options = {
        "max_restarts": 0,
        "timeout_s": 5,
        "cwd": None,
        "nnodes": (1, 2),
        "env": {},
        "detach": False,
        "lease_s": None,
    }
    assert from_options(options, Access())[0].timeout_s == 5


def test_debug_sets_variables_that_env_does_not_set():
    usual = dict(JobSpec(debug=True).variables)
    assert usual["NCCL_DEBUG"] == usual["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert usual["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    own = JobSpec(debug=True, env=(("NCCL_DEBUG", "WARN"), ("A", "1")), devices=("0",))
    assert dict(own.variables) == {
        **usual,
        "NCCL_DEBUG": "WARN",
        "A": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert JobSpec().variables == ()

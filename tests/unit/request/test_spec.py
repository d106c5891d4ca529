"""What may be asked for, and what is said of what may not."""

from __future__ import annotations

import math

import pytest

from distmagic.errors import SpecError
from distmagic.request.spec import Access, JobSpec, from_options, split_endpoint


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        (
            {"nproc_per_node": 0},
            "--nproc-per-node 0: a host runs at least 1 rank.",
            "Use 1 or more.",
        ),
        (
            {"nproc_per_node": -1},
            "--nproc-per-node -1: a host runs at least 1 rank.",
            "Use 1 or more.",
        ),
        (
            {"nproc_per_node": "all"},
            "--nproc-per-node 'all' is not a number of ranks.",
            "Use a number, or gpu, cpu or auto.",
        ),
        ({"nnodes": (0, 2)}, "--nnodes 0:2 is not a range.", "Write --nnodes MIN:MAX."),
        (
            {"nnodes": (-1, -1)},
            "--nnodes -1:-1 is not a range.",
            "Write --nnodes MIN:MAX.",
        ),
        ({"nnodes": (3, 2)}, "--nnodes 3:2 is not a range.", "Write --nnodes MIN:MAX."),
        ({"max_restarts": -1}, "--max-restarts -1 is negative.", "Use 0 or more."),
        (
            {"rdzv_backend": "etcd"},
            "--rdzv-backend 'etcd' is not known.",
            "Use static or c10d.",
        ),
        (
            {"nnodes": (1, 2), "rdzv_backend": "static"},
            "--rdzv-backend static can't change the number of nodes.",
            "Use --rdzv-backend c10d.",
        ),
        ({"master_port": 0}, "--master-port 0 is not a port.", "Use 1 to 65535."),
        (
            {"master_port": 65536},
            "--master-port 65536 is not a port.",
            "Use 1 to 65535.",
        ),
        (
            {"rdzv_endpoint": "a:b"},
            "--rdzv-endpoint 'a:b' is not address:port.",
            "Write 10.0.0.1:29500.",
        ),
        (
            {"timeout_s": 0.0},
            "--timeout 0 is not a time.",
            "Use a number of seconds above 0.",
        ),
        (
            {"timeout_s": -2.5},
            "--timeout -2.5 is not a time.",
            "Use a number of seconds above 0.",
        ),
        (
            {"timeout_s": math.nan},
            "--timeout nan is not a time.",
            "Use a number of seconds above 0.",
        ),
        (
            {"hang_timeout_s": 0.0},
            "--hang-timeout 0 is not a time.",
            "Use a number of seconds above 0.",
        ),
        (
            {"hang_timeout_s": 9.0, "detach": True},
            "--hang-timeout needs a notebook that follows the job, and --detach lets go of it.",
            "Leave one of them out; %distributed stacks says at any time where the ranks are.",
        ),
        (
            {"env": (("2X", "1"),)},
            "--env '2X' is not a variable's name.",
            "Write --env NAME=VALUE.",
        ),
        (
            {"env": (("A", "1"), ("", "1"))},
            "--env '' is not a variable's name.",
            "Write --env NAME=VALUE.",
        ),
        (
            {"env": (("A\n", "1"),)},
            "--env 'A\\n' is not a variable's name.",
            "Write --env NAME=VALUE.",
        ),
        (
            {"env": (("A", "1\0"),)},
            "--env A: the value has a zero byte in it.",
            "Variables can't hold one.",
        ),
    ],
)
def test_what_can_not_be_asked_for(asked, message, hint):
    with pytest.raises(SpecError) as caught:
        JobSpec(**asked)
    assert (caught.value.message, caught.value.hint) == (message, hint)


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
    with pytest.raises(SpecError) as caught:
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
    ("asked", "text"),
    [
        (
            {"connect_timeout_s": 0.0},
            "--connect-timeout 0 is not a time.\nUse seconds, up to a day.",
        ),
        (
            {"connect_timeout_s": math.inf},
            "--connect-timeout inf is not a time.\nUse seconds, up to a day.",
        ),
        ({"lease_s": 0.5}, "--lease 0.5 is not a lease.\nUse 1 second to a day."),
        ({"warm_idle_s": -1}, "--warm-idle -1 is not a time.\nUse 0 (never) to a day."),
        ({"lease_s": math.nan}, "--lease nan is not a lease.\nUse 1 second to a day."),
    ],
)
def test_times_that_are_none(asked, text):
    with pytest.raises(SpecError) as caught:
        Access(**asked)
    assert str(caught.value) == text


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


def test_a_variable_that_torchrun_sets_itself():
    with pytest.raises(SpecError) as caught:
        JobSpec(env=(("RANK", "7"),))
    assert (
        str(caught.value)
        == "--env RANK: torchrun sets this variable itself.\nLeave it out."
    )


@pytest.mark.parametrize(("options", "text"), [
    ({"max_restarts": "9" * 5000}, "max_restarts='999999999999...9999999999999' is not a whole number."),
    ({"max_restarts": True}, "max_restarts=True is not a whole number."),
    ({"timeout_s": "2m"}, "timeout_s='2m' is not a number."),
    ({"detach": 1}, "detach=1 is not True or False."),
    ({"cwd": 3}, "cwd=3 is not a text."),
    ({"nproc_per_node": 2.5}, "nproc_per_node=2.5 is not a whole number or a text."),
    ({"lease_s": None}, "lease_s=None is not a number."),
])  # fmt: skip
def test_an_option_of_a_wrong_kind(options, text):
    with pytest.raises(SpecError) as caught:
        from_options(options, Access())
    assert caught.value.message == text


def test_options_of_the_right_kinds_are_taken():
    options = {
        "max_restarts": 0,
        "timeout_s": 5,
        "cwd": None,
        "nnodes": (1, 2),
        "env": {},
        "detach": False,
    }
    assert from_options(options, Access())[0].timeout_s == 5


@pytest.mark.parametrize(("name", "hint"), [
    ("nproc", "Did you mean nproc_per_node?"),
    ("pythons", "Did you mean python?"),
    ("xyzzy", ""),
])  # fmt: skip
def test_an_option_that_does_not_exist(name, hint):
    with pytest.raises(SpecError) as caught:
        from_options({name: 1}, Access())
    assert (caught.value.message, caught.value.hint) == (
        f"There is no option {name!r}.",
        hint,
    )

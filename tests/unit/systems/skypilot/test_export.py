"""SkyPilot's tasks: what is in them, and that its own package, where it is installed, takes every one of them."""

import json
import re

import pytest
import yaml

from distmagic.errors import UsageError
from distmagic.exports import systems
from tests import REPOSITORY
from tests.builders.exports import HOSTILE, job, shown, texts
from tests.builders.shell import completed, refusal
from tests.builders.sky import PYTHON, needs_skypilot

GOLDEN = REPOSITORY / "tests/golden/exports"
FORMS = ("task.yaml", "task-c10d.yaml")
ENV = (
    *((f"MY_{place}", value) for place, value in enumerate(HOSTILE)),
    ("HF_TOKEN", "it's $x\n"),
)
JOBS = {
    "plain": job("skypilot"),
    "hostile": job("skypilot", spec={"env": ENV}, setup="echo '\u2028'\n  x\t\n"),
    "large": job(
        "skypilot",
        nodes=3,
        options=(("gpus-per-node", "L4:4"), ("cpus-per-task", "8"), ("mem", "64G")),
        setup="pip install a",
        spec={"max_restarts": 2},
    ),
}
# What of its schema a task of ours uses: each key with the type that it must have there.
SCHEMA = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": dict,
    "envs": dict,
    "secrets": dict,
    "setup": str,
    "run": str,
}


def test_the_files_of_a_job_with_gpus():
    assert shown(systems.files(JOBS["large"])) == (GOLDEN / "skypilot.txt").read_text()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one", JOBS.values(), ids=list(JOBS))
def test_a_task_has_only_known_keys_of_their_types(one, form):
    task = yaml.safe_load(texts(systems.files(one))[form])
    assert {key: type(value) for key, value in task.items()} == {
        key: SCHEMA[key] for key in task
    }
    for key in ("envs", "secrets", "resources"):
        for name, value in task.get(key, {}).items():
            assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
            assert isinstance(value, str)


@pytest.mark.parametrize("form", FORMS)
def test_variables_and_secrets_are_in_the_places_for_them(form):
    files = systems.files(JOBS["hostile"])
    task = yaml.safe_load(texts(files)[form])
    assert task["envs"] == dict(ENV[:-1])
    assert task["secrets"] == {"HF_TOKEN": "it's $x\n"}
    assert {file.path for file in files if file.is_private} == set(FORMS)


def test_a_kind_of_gpu_is_needed(golden):
    with golden.raises(UsageError):
        systems.files(job("skypilot", options=(("gpus-per-node", "4"),)))


_LOAD = """
import json, sys, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    if not any(resources.accelerators for resources in task.resources):
        task.validate()  # with accelerators it asks the network for their prices
    secrets = {name: value.get_secret_value() for name, value in task.secrets.items()}
    print("found " + json.dumps([task.num_nodes, task.envs, secrets, task.run]))
"""


@needs_skypilot
def test_skypilots_own_package_takes_every_task(tmp_path):
    paths = []
    for name, one in JOBS.items():
        folder = tmp_path / name
        folder.mkdir()
        for form in FORMS:
            (folder / form).write_text(texts(systems.files(one))[form])
            paths.append(str(folder / form))
    command = [PYTHON, "-c", _LOAD, *paths]
    where = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = completed(command, env=where, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = [json.loads(line.removeprefix("found ")) for line in lines]
    assert [one[0] for one in found] == [1, 1, 1, 1, 3, 3]
    assert found[2][1:3] == [dict(ENV[:-1]), {"HF_TOKEN": "it's $x\n"}]
    text = texts(systems.files(JOBS["large"]))["task-c10d.yaml"]
    assert found[5][3] == yaml.safe_load(text)["run"]


@pytest.mark.parametrize("form", ["task.yaml", "task-c10d.yaml"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS: is not set: SkyPilot sets it"),
        ({"SKYPILOT_NUM_NODES": None}, "SKYPILOT_NUM_NODES: is not set"),
        ({"SKYPILOT_NODE_RANK": None}, "SKYPILOT_NODE_RANK: is not set"),
        ({"SKYPILOT_TASK_ID": None}, "SKYPILOT_TASK_ID: is not set"),
        ({"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK is 2, of 2 nodes"),
        ({"SKYPILOT_NODE_RANK": "-1"}, "SKYPILOT_NODE_RANK is -1, of 2 nodes"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": ""}, "SKYPILOT_NUM_GPUS_PER_NODE: is not set"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": "all"}, "SKYPILOT_NUM_GPUS_PER_NODE is all, which is not a number"),
        ({"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES is two, which is not a number"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1"}, "SKYPILOT_NUM_NODES is 2, and the number of addresses in SKYPILOT_NODE_IPS is 1"),
    ],
)  # fmt: skip
def test_what_a_run_block_lacks_is_named_at_once(form, change, message):
    files = texts(systems.files(job("skypilot", nodes=2)))
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    script = yaml.safe_load(files[form])["run"]
    assert message in refusal(script, given, change)

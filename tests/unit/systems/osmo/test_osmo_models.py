"""Exported workflows pass OSMO's own models, where these are at hand.

    OSMO_SOURCE=~/OSMO python -m pytest tests/unit/systems/osmo/test_osmo_models.py

OSMO_SOURCE is a checkout of NVIDIA/OSMO. Its models want Python 3.12 or later and what src/requirements.txt names:
OSMO_PYTHON is an interpreter that has this, if it is not the one that runs the tests. Without OSMO_SOURCE the table in
tests/builders/osmo_rules.py stands for them. All forms passed the models of August 2026, under Python 3.12.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from distmagic.exports.job import ExportedProgram, File
from distmagic.systems.osmo import export as osmo
from tests.builders.exports import HOSTILE, job, texts
from tests.builders.osmo_rules import rules_broken
from tests.builders.shell import completed

# As OSMO's service takes a workflow: its sections, its template, then its models.
CHECK = """
import json
import sys

import jinja2.sandbox
import yaml

from src.lib.utils.workflow import is_templated_workflow, parse_workflow_spec
from src.utils.job.workflow import VersionedWorkflowSpec

found = {}
for name, text in json.load(sys.stdin).items():
    try:
        section, defaults = parse_workflow_spec(text)
        for token in ("output", "host:master"):
            section = section.replace("{{" + token + "}}", "{{ tokens['" + token + "'] }}")
        tokens = {token: "{{" + token + "}}" for token in ("output", "host:master")}
        rendered = jinja2.sandbox.SandboxedEnvironment().from_string(section).render(tokens=tokens, **(defaults or {}))
        spec = VersionedWorkflowSpec(**yaml.safe_load(rendered))
        spec.workflow._validate_groups()
        found[name] = [is_templated_workflow(text), [[task.name, task.lead] for task in spec.workflow.groups[0].tasks]]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def exported() -> dict[str, str]:
    """Return workflows of many kinds, by what is particular about them."""
    secret = {"env": (("MY_TOKEN", HOSTILE[4]), ("MY_1", HOSTILE[12]))}
    hostile = ExportedProgram(
        files=(File(path="a b/cell.py", data="\n".join(HOSTILE).encode()),),
        words=("cell.py", *HOSTILE),
    )
    made = {
        "alone": job("osmo", nodes=1),
        "three": job("osmo", nodes=3, image="registry.example/torch:2.13"),
        "hostile": job("osmo", nodes=2, spec=secret, program=hostile, setup="echo {{x}}"),
        "resources": job(
            "osmo",
            nodes=2,
            results="s3://bucket/kept",
            options=(("gpus-per-node", "L40:8"), ("cpus-per-task", "16"), ("mem", "64G")),
        ),
        "run": job(
            "osmo",
            nodes=2,
            program=ExportedProgram(
                files=(File(path="start", data=b"{}"),),
                words=(),
                launcher=("-u", "/tmp/distmagic/program/distmagic.zip", "task", "/tmp"),
            ),
        ),
        "c10d": job("osmo", nodes=2, spec={"rdzv_backend": "c10d", "max_restarts": 1}),
    }  # fmt: skip
    found = {}
    for name, one in made.items():
        for path, text in texts(osmo.files(one)).items():
            if path.endswith(".yaml"):
                found[f"{name} {path}"] = text
    return found


def checked(workflows: dict[str, str]) -> dict[str, object]:
    """Return what OSMO's models make of workflows. Skips the test where nobody says where they are."""
    source = os.environ.get("OSMO_SOURCE", "")
    if not source:
        pytest.skip("OSMO_SOURCE names no checkout of NVIDIA/OSMO")
    python = os.environ.get("OSMO_PYTHON", sys.executable)
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = completed(
        [python, "-c", CHECK],
        input=json.dumps(workflows),
        env={**os.environ, "PYTHONPATH": paths},
        cwd=source,
        check=False,
    )
    assert done.returncode == 0, f"OSMO's models can't be loaded: {done.stderr}"
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_osmos_own_models_take_every_workflow():
    workflows = exported()
    found = checked(workflows)
    assert set(found) == set(workflows)
    for name, one in found.items():
        nodes = 1 if name.startswith("alone") else 3 if name.startswith("three") else 2
        tasks = [[task, place == 0] for place, task in enumerate(osmo.names(nodes))]
        assert one == [True, tasks], name


def test_a_dataset_is_an_output_for_models_of_before_june_2026_alone():
    one = job("osmo", nodes=2, results="kept")
    (found,) = checked({"dataset": texts(osmo.files(one))["workflow.yaml"]}).values()
    if isinstance(found, str):
        assert "outputs.0.url\n  Field required" in found
        assert "outputs.0.dataset\n  Extra inputs are not permitted" in found
    else:
        assert found == [True, [["master", True], ["worker-1", False]]]


def test_osmos_own_models_refuse_what_our_table_refuses():
    good = exported()["three workflow.yaml"]
    wrong = {
        "two leads": good.replace("name: worker-1", "name: worker-1\n      lead: true"),
        "no lead": good.replace("      lead: true\n", ""),
        "one name": good.replace("name: worker-2", "name: Worker_1"),
        "version": good.replace("version: 2", "version: 3"),
        "a strange key": good.replace("      lead: true\n", "      lead: true\n      x: 1\n"),
        "a bad name": good.replace("name: worker-2", "name: worker-"),
    }  # fmt: skip
    for name, text in wrong.items():
        assert rules_broken(text), name
    found = checked(wrong)
    # The service reads the section `workflow` alone, so that a version never comes to its models.
    taken = {name for name, one in found.items() if not isinstance(one, str)}
    assert taken <= {"version"}

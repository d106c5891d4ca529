"""Run blocks, tasks and entry points of exported folders, run on hosts of the lab with what each platform sets there."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.exports import HOSTILE
from tests.e2e.exports import Node, at_once, check_four_ranks, results
from tests.lab import Lab
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab")


# ---- SkyPilot

OF_SLURM = {
    "SLURM_JOB_ID": "9",
    "SLURM_JOB_NODELIST": "other[1-7]",
    "SLURM_NNODES": "7",
}


def sky_nodes(lab: Lab, folder: Path, form: str, more: dict[str, str]) -> list[Node]:
    """Return what SkyPilot runs on two nodes: the set-up, then the run block, in the folder, with its variables."""
    task = yaml.safe_load((folder / form).read_text())
    hosts = lab.hosts[:2]
    own = {
        "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": "sky-2026-11-22-11-00-00-000000_cell_1-1",
        **task.get("envs", {}),
        **task.get("secrets", {}),
        **more,
    }
    line = f"cd {folder} && {{ {task['setup']}\n}} && {{ {task['run']}\n}}"
    return [Node(line, {**own, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(2)]


@pytest.mark.parametrize(
    ("form", "ranks", "more"),
    [
        ("task.yaml", ("--nproc-per-node", "2"), OF_SLURM),
        ("task-c10d.yaml", (), {"SKYPILOT_NUM_GPUS_PER_NODE": "2"}),
    ],
    ids=["on Slurm", "a rank a GPU"],
)
def test_run_blocks_of_skypilot(lab, export, form, ranks, more):
    variables = ("--env", f"MY_1={HOSTILE[3]}", "--env", f"MY_TOKEN={HOSTILE[4]}")
    folder = export(lab, "skypilot", *ranks, *variables, args=HOSTILE)
    done = at_once(lab.hosts[:2], sky_nodes(lab, folder, form, more))
    assert [one.returncode for one in done] == [0, 0], done
    found = results(folder)
    check_four_ranks(found)
    assert found[3]["args"] == list(HOSTILE)
    assert found[3]["variables"] == {"MY_1": HOSTILE[3], "MY_TOKEN": HOSTILE[4]}


# ---- OSMO


def osmo_nodes(lab: Lab, folder: Path, form: str) -> list[Node]:
    """Lay each task's files where it wants them, and return its command: names and folders stand for OSMO's tokens."""
    workflow = yaml.safe_load((folder / form).read_text())
    tasks = workflow["workflow"]["groups"][0]["tasks"]
    hosts = lab.hosts[: len(tasks)]
    tokens = {"{{output}}": "/tmp/output"}
    for task, host in zip(tasks, hosts, strict=True):
        tokens[f"{{{{host:{task['name']}}}}}"] = host.name
    nodes = []
    for task in tasks:
        lines = ["mkdir -p /tmp/output"]
        for file in task["files"]:
            path = shlex.quote(file["path"])
            staged = folder / "staged" / file["path"].lstrip("/")
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(base64.b64decode(file["contents"]))
            lines.append(f"mkdir -p $(dirname {path}) && cp {staged} {path}")
        variables = {
            name: tokens.get(value, value)
            for name, value in task["environment"].items()
        }
        for keys in task.get("credentials", {}).values():
            for name, key in keys.items():
                variables[name] = (folder / "secrets" / key).read_text()
        lines.append(shlex.join([*task["command"], *task["args"]]))
        lines.append("code=$?; cat /tmp/output/program/rank-*.json 2>/dev/null")
        lines.append("rm -rf /tmp/output /tmp/distmagic; exit $code")
        nodes.append(Node("\n".join(lines), variables))
    return nodes


def osmo_results(done: list[subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """Return what ranks have left in the output folders of their tasks."""
    text = "".join(one.stdout for one in done)
    decoder, found, place = json.JSONDecoder(), [], text.find('{"total"')
    while place >= 0:
        one, end = decoder.raw_decode(text, place)
        found.append(one)
        place = text.find('{"total"', end)
    return found


@pytest.mark.parametrize("form", ["workflow.yaml", "workflow-ranks.yaml"])
def test_tasks_of_osmo(lab, export, form):
    variables = ("--env", f"MY_1={HOSTILE[3]}", "--env", f"MY_TOKEN={HOSTILE[1]}")
    more = ("--nodes", "2", "--nproc-per-node", "2")
    folder = export(lab, "osmo", *more, *variables, args=HOSTILE)
    done = at_once(lab.hosts[:2], osmo_nodes(lab, folder, form))
    assert [one.returncode for one in done] == [0, 0], done
    found = osmo_results(done)
    check_four_ranks(dict(enumerate(found)))
    assert found[3]["args"] == list(HOSTILE)
    assert found[3]["variables"] == {"MY_1": HOSTILE[3], "MY_TOKEN": HOSTILE[1]}


# ---- SING Cloud

SUFFIX = "test-service.demo-project.svc.cluster.local"


def sing_nodes(lab: Lab, folder: Path, named: dict[str, str]) -> list[Node]:
    """Return what SING Cloud starts on two nodes, and the variables that it sets there."""
    nodes = []
    for rank, host in enumerate(lab.hosts[:2]):
        own = {"SING_RANK": str(rank), "SING_HOST_ADDR": host.address}
        known = {"SING_WORLD_SIZE": "2", **named}
        nodes.append(Node(f"exec python3 {folder}/dist.py", {**known, **own}))
    return nodes


def test_entry_points_of_sing_wait_for_a_name_that_is_known_late(lab, export):
    ranks = ("--nproc-per-node", "2", "--env", f"MY_1={HOSTILE[4]}")
    folder = export(lab, "sing", *ranks, args=HOSTILE)
    named = {"SING_JOB_NAME": "test", "SING_HOSTNAME_SUFFIX": SUFFIX}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            at_once, lab.hosts[:2], sing_nodes(lab, folder, named), 120
        )
        for host in lab.hosts[:2]:
            wait_until(
                lambda host=host: any(
                    "node.sh" in " ".join(process.cmdline)
                    for process in host.processes()
                ),
                "the entry point",
            )
        assert not running.done()
        line = f"{lab.hosts[0].address} test-0.{SUFFIX}"
        for host in lab.hosts[:2]:
            host.exec(["sh", "-c", f"echo '{line}' >>/etc/hosts"])
        done = running.result()
    for host in lab.hosts:
        host.mend()
    assert [one.returncode for one in done] == [0, 0], done
    found = results(folder)
    check_four_ranks(found)
    assert found[3]["args"] == list(HOSTILE)
    assert found[3]["variables"] == {"MY_1": HOSTILE[4]}


def test_an_entry_point_of_sing_with_the_masters_address_and_c10d(lab, export):
    folder = export(lab, "sing", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    named = {"SING_MASTER_ADDR": lab.hosts[0].address}
    done = at_once(lab.hosts[:2], sing_nodes(lab, folder, named))
    assert [one.returncode for one in done] == [0, 0], done
    check_four_ranks(results(folder))

"""Nodes of SkyPilot, SING Cloud, OSMO and torchrun, played on hosts of the lab: every node at once, with its variables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.nodes import RUN, SECRET, TRAIN, on_all
from tests.lab import Lab, wait_until

pytestmark = pytest.mark.needs("lab")

ALL = {"DISTMAGIC_SECRET": SECRET}


@pytest.fixture
def folder(lab: Lab) -> Iterator[Path]:
    """A folder that all hosts see, with a program in it; afterwards nothing is left on any host."""
    found = lab.folder / "inside"
    found.mkdir(exist_ok=True)
    (found / "train.py").write_text(TRAIN)
    yield found
    lab.assert_clean()


def skypilot(lab: Lab, node: int, count: int = 2) -> dict[str, str]:
    addresses = "\n".join(host.address for host in lab.hosts[:count])
    return ALL | {
        "SKYPILOT_NODE_IPS": addresses,
        "SKYPILOT_NUM_NODES": str(count),
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": "sky-2026-11-22-10-11-12-000000_train-1",
    }


def sing(_lab: Lab, node: int) -> dict[str, str]:
    suffix = "test-service.demo-project.svc.cluster.local"
    return ALL | {
        "SING_RANK": str(node),
        "SING_WORLD_SIZE": "2",
        "SING_JOB_NAME": "test",
        "SING_HOSTNAME_SUFFIX": suffix,
        "SING_MASTER_ADDR": f"test-0.{suffix}",
        "SING_HOST_ADDR": f"test-{node}.{suffix}",
    }


def osmo(_lab: Lab, node: int) -> dict[str, str]:
    return ALL | {
        "DISTMAGIC_WORKFLOW": "train-7",
        "DISTMAGIC_NODE_RANK": str(node),
        "DISTMAGIC_NNODES": "2",
        "DISTMAGIC_MASTER_ADDR": "dm1",
    }


def by_hand(lab: Lab, node: int) -> dict[str, str]:
    return ALL | {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": lab.hosts[0].address,
        "PET_MASTER_PORT": "29500",
    }


def seen(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what ranks have said of themselves."""
    return sorted(re.findall(r"SEEN (.*)$", done.stdout, re.MULTILINE))


def run(
    lab: Lab, folder: Path, variables: Sequence[Mapping[str, str]], *words: str
) -> list[subprocess.CompletedProcess[str]]:
    hosts = lab.hosts[: len(variables)]
    return on_all(hosts, folder, variables, [*RUN, *words])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (skypilot, "SkyPilot task sky-2026-11-22-10-11-12-000000_train-1"),
        (osmo, "OSMO workflow train-7"),
        (by_hand, "torchrun"),
    ],
    ids=["skypilot", "osmo", "torchrun"],
)
def test_a_script_on_every_node(lab, folder, variables, words):
    nodes = [variables(lab, node) for node in (0, 1)]
    lead, other = run(lab, folder, nodes, "--nproc-per-node", "2", "train.py", "50")
    for done in (lead, other):
        assert (done.returncode, done.stderr) == (0, ""), done
    assert lead.stdout.startswith(f"inside {words}, node 0 of 2: leads 1 other node.")
    assert seen(lead) == [f"rank {rank} of 4, sum 6, args ['50']" for rank in range(4)]
    assert other.stdout.startswith(f"inside {words}, node 1 of 2: follows node 0, ")
    assert other.stdout.endswith("reports that all went well.\n")


DIST = """\
import distmagic

def train(bias):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank()) + bias])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()

if __name__ == "__main__":
    run = distmagic.run(train, 1.0, nproc_per_node=2)
    print("RESULTS", dict(run.results))
"""


def test_a_plain_program_that_calls_run(lab, folder):
    (folder / "dist.py").write_text(DIST)
    nodes = [osmo(lab, node) for node in (0, 1)]
    lead, other = on_all(lab.hosts[:2], folder, nodes, [sys.executable, "dist.py"])
    assert (lead.returncode, other.returncode) == (0, 0), (lead, other)
    assert "RESULTS {0: 10.0, 1: 10.0, 2: 10.0, 3: 10.0}\n" in lead.stdout
    assert "RESULTS {2: 10.0, 3: 10.0}\n" in other.stdout, "its own ranks'"


def test_names_of_sing_cloud_that_resolve_late(lab, folder):
    lines = "".join(
        f"{host.address} {sing(lab, node)['SING_HOST_ADDR']}\n"
        for node, host in enumerate(lab.hosts[:2])
    )
    first, second, _ = lab.hosts
    before = second.exec(["cat", "/etc/hosts"]).stdout
    try:
        with ThreadPoolExecutor(1) as pool:
            nodes = [sing(lab, node) for node in (0, 1)]
            running = pool.submit(run, lab, folder, nodes, "train.py")
            wait_until(
                lambda: any(
                    "distmagic.cli" in one.cmdline for one in second.processes()
                ),
                "node 1 to look for node 0",
            )
            assert not running.done()
            for host in (first, second):
                host.exec(["sh", "-c", "cat >> /etc/hosts"], stdin=lines)
            lead, other = running.result()
    finally:
        for host in (first, second):
            host.exec(["sh", "-c", "cat > /etc/hosts"], stdin=before)
    assert seen(lead) == [f"rank {rank} of 2, sum 1, args []" for rank in range(2)]
    assert (lead.returncode, other.returncode) == (0, 0), other
    assert "inside SING Cloud job test, node 1 of 2: " in other.stdout


def test_torchrun_by_hand_starts_a_process_a_rank(lab, folder):
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={lab.hosts[0].address}:29512", "--rdzv-id=job1", "-m", "distmagic.cli", "run", "train.py",
        "alone",
    ]  # fmt: skip
    done = on_all(lab.hosts[:2], folder, [ALL, ALL], words)
    assert [one.returncode for one in done] == [0, 0], done
    assert sorted(seen(done[0]) + seen(done[1])) == [
        f"rank {rank} of 4, sum 6, args ['alone']" for rank in range(4)
    ]

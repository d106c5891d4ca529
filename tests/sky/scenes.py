"""What is launched for real: exported tasks in both forms, then cells of a notebook that say `--on sky`."""

from __future__ import annotations

import re

from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook
from tests.sky.lab import CLOUD, HOME, Clock, SkyLab

LAUNCH_S = 900.0  # two nodes install a hundred packages each, on two cores
# A cell that trains with gradients that are averaged over all ranks. The variable FAIL names a rank that fails.
_TRAIN = """\
def train(steps):
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if os.environ.get("FAIL") == str(rank):
        raise SystemExit(7)
    torch.manual_seed(rank)
    inputs = torch.randn(256, 4)
    targets = inputs.sum(1, keepdim=True)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = model.module.weight.detach().sum().clone()
    dist.all_reduce(total)
    same = bool(torch.isclose(total / size, model.module.weight.sum()))
    print(f"rank {rank} of {size} on {os.uname().nodename}: loss below 0.01: {loss.item() < 0.01}, same weights: {same}", flush=True)
    dist.destroy_process_group()
    return rank, os.uname().nodename

train(200)
"""
_LINE = re.compile(
    r"rank (\d) of (\d) on (\w+): loss below 0.01: True, same weights: True"
)


def exported_tasks(lab: SkyLab, clock: Clock) -> None:
    """Launch an exported cell in both forms on one new cluster, have a rank of it fail, and take the cluster down."""
    with live_notebook(HOME) as notebook:
        notebook.run(
            "%%distributed --export skypilot exported --nodes 2 --nproc-per-node 2 --setup true\n"
            + _TRAIN
        )
    folder = HOME / "exported"
    size = ("--infra", f"slurm/{CLOUD}", "--cpus", "2", "--memory", "4")
    hosts = {host.name for host in lab.slurm.nodes}
    for form in ("task.yaml", "task-c10d.yaml"):
        said = lab.sky(
            "launch", "--yes", "--cluster", "exported", *size, form, cwd=folder,
            timeout_s=LAUNCH_S,
        )  # fmt: skip
        found = _LINE.findall(said)
        assert sorted(rank for rank, _, _ in found) == ["0", "1", "2", "3"], said
        assert {world_size for _, world_size, _ in found} == {"4"}
        assert {host for _, _, host in found} == hosts
        clock.tell(f"sky launch {form}: four ranks on {' and '.join(sorted(hosts))}")
    said = lab.sky(
        "exec", "exported", "--env", "FAIL=3", "task.yaml", cwd=folder, code=100
    )
    assert "exitcode  : 7" in said, said
    clock.tell("sky exec task.yaml with a rank that fails: exit code 100")
    lab.sky("down", "--yes", "exported")
    assert lab.clusters() == {}
    wait_until(lambda: not lab.slurm.jobs(), "the job of SkyPilot to end")
    clock.tell("sky down: no job is left")


def cells_of_a_notebook(lab: SkyLab, clock: Clock) -> None:
    """Run two cells on a cluster that the first one launches, and take it down."""
    (HOME / "hosts.yaml").write_text(
        f"resources:\n  infra: slurm/{CLOUD}\n  cpus: 2\n  memory: 4\n"
    )
    # A connection to a node is a websocket of SkyPilot's server, an SSH to the log-in node, an srun and an sshd.
    ways = "--sky hosts.yaml --connect-timeout 60"
    line = f"%%distributed --on sky --nodes 2 {ways} --nproc-per-node 2 -o run"
    cell = f"{line}\n{_TRAIN}"
    with live_notebook(HOME, lab.env, timeout_s=int(LAUNCH_S)) as notebook:
        notebook.run(cell)
        first_s = clock.tell("--on sky: launched, and trained on")
        hosts = [host.name for host in lab.slurm.nodes]
        ranks = [(0, hosts[0]), (1, hosts[0]), (2, hosts[1]), (3, hosts[1])]
        assert notebook.run("list(run.results.values())") == str(ranks)

        ((name, first),) = lab.clusters().items()
        assert name.startswith("dm-")
        assert first["status"] == "UP"
        assert first["autostop"] == 5, first  # minutes
        assert first["to_down"] is True, first
        held = lab.sky("queue", name)
        assert re.search(r"distmagic-hold .*RUNNING", held), held
        clock.tell("autostop is set, and a job of the queue holds it off")

        notebook.run(cell)
        took_s = clock.tell("the second cell, on the same cluster")
        assert took_s < first_s / 3
        assert notebook.run("list(run.results.values())") == str(ranks)
        ((again, second),) = lab.clusters().items()
        assert again == name
        assert second["launched_at"] == first["launched_at"], "it was launched anew"
        assert name in notebook.run("%distributed allocations")

        notebook.run(f"%distributed down --cluster {name}")
        assert lab.clusters() == {}
        clock.tell("%distributed down --cluster: SkyPilot has no cluster")
    wait_until(lambda: not lab.slurm.jobs(), "the job of SkyPilot to end")
    # Slurm has killed what was kept loaded. Its directories in /tmp go with the next connection to these nodes.
    wait_until(lambda: not _has_processes(lab), "the end of what was kept loaded")
    clock.tell("no job and no process is left")


def _has_processes(lab: SkyLab) -> bool:
    hosts = lab.slurm.lab.hosts
    return any(one.is_of_distmagic for host in hosts for one in host.processes())


SCENES = (exported_tasks, cells_of_a_notebook)

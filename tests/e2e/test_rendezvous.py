"""Rendezvous beyond the plain case: restarts on several nodes, a range of nodes, IPv6, hosts as users write them."""

from __future__ import annotations

import pytest

from distmagic.api import session
from tests.e2e import runner
from tests.lab.waiting import HANG_S

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


def flaky(until: int) -> tuple[int, int]:
    """Fail on rank 1 before restart number `until`; the others wait for it."""
    import os

    import torch
    import torch.distributed as dist

    import distmagic

    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    distmagic.report(step=restart + 1)
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1" and restart < until:
        raise RuntimeError(f"attempt {restart}")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return int(os.environ["RANK"]), restart


def test_ranks_on_several_nodes_start_again_together(warm_lab):
    run = runner.run_warm(warm_lab, "dm1:2,dm2:1", flaky, 1, max_restarts=5)
    assert [run.results[rank][0] for rank in run.results] == [0, 1, 2]
    # torchrun counts restarts on each node by itself: rank 2 may have seen none.
    assert run.results[1][1] >= 1
    assert run.state.workers[1].restart == run.results[1][1]
    assert run.state.phase == "done"


def test_restarts_do_not_use_up_the_agents_descriptors(warm_lab):
    def fail_often(until: int) -> int:
        import os
        from pathlib import Path

        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        agent = (
            Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        )
        if restart < until:
            raise RuntimeError(f"attempt {restart}")
        return len(list(Path(f"/proc/{agent}/fd").iterdir()))

    few, many = (
        runner.run_warm(warm_lab, "dm1:2", fail_often, until, max_restarts=4).results[0]
        for until in (0, 4)
    )
    # The other rank is there or not yet; 8 ranks of before would be 56.
    assert many <= few + 14


def tutorial(init: str) -> float:
    """Sum over gloo, with an address for the process group that was written for one machine."""
    import os

    import torch
    import torch.distributed as dist

    def setup(rank: int, world_size: int) -> None:
        if init == "variables":
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
        else:
            dist.init_process_group(
                "gloo", init_method=init, rank=rank, world_size=world_size
            )

    setup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


@pytest.mark.parametrize("init", ["variables", "tcp://localhost:23456"])
def test_an_address_for_one_machine_does_not_keep_ranks_from_meeting(warm_lab, init):
    run = runner.run_warm(warm_lab, "dm1:1,dm2:2", tutorial, init, timeout_s=HANG_S)
    assert set(run.results.values()) == {6.0}
    assert "leave both as they are" in run.logs(0, "stderr")
    assert "leave both" not in run.logs(1, "stderr")


@pytest.mark.quick
def test_this_machine_and_another_one(lab):
    hosts = "localhost:1,dm1:1"
    run = runner.run_warm(lab, hosts, runner.all_reduce, timeout_s=HANG_S)
    session().close()  # and with it what both keep loaded
    lab.assert_clean()
    assert [float(run.results[rank]["total"]) for rank in run.results] == [1.0, 1.0]
    assert run.results[1]["host"] == "dm1"

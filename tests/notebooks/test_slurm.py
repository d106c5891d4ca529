"""`%%distributed --on slurm:LOGIN` in a notebook: two cells in one allocation, jobs on its nodes, and its end."""

import re

import pytest

from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook

pytestmark = pytest.mark.needs("lab", "slurm")

CELL = """\
%%distributed --on slurm:dm1 --nodes 2 --slurm cpus-per-task=2
import os
def where():
    return os.environ["RANK"], os.uname().nodename
where()
"""


def test_cells_on_nodes_of_slurm(slurm, tmp_path):
    one, two = slurm.names
    with live_notebook(tmp_path) as notebook:
        notebook.run(f"%config Distmagic.ssh_config = {str(slurm.lab.ssh_config)!r}")
        nothing = notebook.run("%distributed allocations slurm:dm1")
        assert "You have no allocation of distmagic in Slurm" in nothing
        shown = notebook.run(CELL)
        assert re.search(rf"{one}.*\n.*{two}", shown)
        assert (
            notebook.run("dict(_run.results)") == "{0: ('0', 'dm2'), 1: ('1', 'dm3')}"
        )
        (job,) = slurm.jobs()
        notebook.run(CELL)
        assert slurm.jobs() == (job,)
        assert re.search(
            rf"{job} +running +{one},{two} .*this notebook",
            notebook.run("%distributed allocations slurm:dm1"),
        )
        assert (
            len(re.findall(rf"done +{one}, {two}", notebook.run("%distributed jobs")))
            >= 2
        )
        refused = notebook.fail(CELL.replace("--nodes 2", "--nodes 2 --partition nope"))
        assert "UsageError: Slurm refused the request" in refused
        assert "invalid partition specified: nope" in refused
        notebook.run("%distributed down")
        wait_until(lambda: not slurm.jobs(), "the allocation to end")
    slurm.assert_clean()


def test_ranks_stay_on_nodes_of_slurm_and_give_them_back(slurm, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f"%config Distmagic.ssh_config = {str(slurm.lab.ssh_config)!r}")
        notebook.run("""\
%%ranks --on slurm:dm1 --nodes 2
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = torch.ones(1) * (dist.get_rank() + 1)
""")
        (job,) = slurm.jobs()
        text = notebook.run("""\
%%ranks
dist.all_reduce(kept)
os.uname().nodename, int(kept)
""")
        assert text.endswith("rank 0: ('dm2', 3)\nrank 1: ('dm3', 3)\n")
        assert notebook.run("ranks['kept'][1]").strip() == "tensor([3.])"
        assert notebook.run("%distributed end") == "The ranks have ended.\n"
        assert slurm.jobs() == (job,), "the next cell has its nodes"
        notebook.run("%distributed down")
        wait_until(lambda: not slurm.jobs(), "the allocation to end")
        notebook.run(
            "%%ranks again --on slurm:dm1 --nodes 2 --idle 20s --stay-idle 1s\nkept = 1"
        )
        wait_until(lambda: not slurm.jobs(), "the allocation to end without a cell")
        lost = notebook.fail("%%ranks again\nkept")
        assert "The ranks of again have ended: no cell ran on them for 1 s" in lost
    slurm.assert_clean()

"""`%distributed jobs | attach | stop | logs | clean` in a notebook."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.e2e import faults
from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(120)]


def test_the_commands_about_jobs(lab: Lab, tmp_path: Path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f"%load_ext distmagic\n%config Distmagic.ssh_config = {str(lab.ssh_config)!r}")
        notebook.run("%distributed hosts dm1:1 dm2:1")
        assert "no jobs on these hosts" in notebook.run("%distributed jobs")
        notebook.run(
            "%%distributed\nimport os\ndef name():\n    print('I am', os.environ['RANK'])\n    return 7\nname()"
        )

        jobs = notebook.run("%distributed jobs")
        job = re.search(r"(\d{4}-\d{6}-\w+)  done   dm1, dm2  0 min ago", jobs)[1]
        assert notebook.run(f"%distributed logs {job} 1") == "I am 1\n"
        assert "[rank 1 dm2] I am 1" in notebook.run(f"%distributed attach {job[:-2]} seen")
        assert notebook.run("dict(seen.results)") == "{0: 7, 1: 7}"

        assert f"Job {job} has ended already (done)." in notebook.fail(f"%distributed stop {job}")
        assert "There is no job 'nothing' on these hosts." in notebook.fail("%distributed attach nothing")
        notebook.run(f"%distributed logs {job} -1")  # torchrun's own
        assert f"Job {job} has no rank 9." in notebook.fail(f"%distributed logs {job} 9")
        assert "'1bad' is not a variable's name." in notebook.fail(f"%distributed attach {job} 1bad")
        assert "'x' is not a rank." in notebook.fail(f"%distributed logs {job} x")
        assert "%distributed stop needs the name of a job." in notebook.fail("%distributed stop")

        sent = [path for host in lab.hosts[:2] for path in (host.home / ".distmagic/blobs").iterdir()]
        for path in sent:
            os.utime(path, times=(1e9, 1e9))  # nobody has used it for long
        said = notebook.run("%distributed clean")
        assert re.search(r"kept of what was sent for jobs that are over: \d+\.\d MB\nRemove all of it with", said)
        assert len([path for path in sent if path.exists()]) == len(sent)
        assert re.search(r"removed: \d+\.\d MB", notebook.run("%distributed clean all"))
        assert len([path for path in sent if path.exists()]) == 2, "the bundle of each host, which is in use"
        assert "no jobs on these hosts" in notebook.run("%distributed jobs")
        notebook.run("%distributed down")
    lab.assert_clean()


WAITING = """\
%%distributed --hosts dm1:1 --nnodes 1:2 --max-restarts 1 --detach
import os, time
from pathlib import Path

def wait():
    while not Path("~/go").expanduser().exists():
        time.sleep(0.05)
    return os.environ["WORLD_SIZE"]

wait()
"""


def test_a_host_comes_to_a_job_that_was_left_alone(lab: Lab, tmp_path: Path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f"%load_ext distmagic\n%config Distmagic.ssh_config = {str(lab.ssh_config)!r}")
        notebook.run("%distributed hosts dm1:1 dm2:1")
        job = re.search(r"job (\S+) runs on dm1 without this notebook", notebook.run(WAITING))[1]
        assert f"dm1 can't come to job {job}: it has a node of this job, which runs." in notebook.fail(
            f"%distributed add {job} dm1"
        )
        assert "%distributed add needs the name of a job and a list of hosts." in notebook.fail("%distributed add x")
        said = notebook.run(f"%distributed add {job} dm2:1")
        assert said == f"dm2 has come to {job} as node 1; its ranks begin when the nodes have met anew\n"
        wait_until(lambda: bool(faults.pids(lab.hosts[1], "rank", "*")), "a rank on dm2", 60)
        for host in lab.hosts[:2]:
            (host.home / "go").touch()
        notebook.run(f"%distributed attach {job} run")
        assert notebook.run("dict(run.results)") == "{0: '2', 1: '2'}"
        assert f"Job {job} has ended already (done)." in notebook.fail(f"%distributed add {job} dm2")
        notebook.run("%distributed down")
    lab.assert_clean()

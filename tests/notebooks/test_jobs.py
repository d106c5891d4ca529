"""`%distributed jobs | attach | stop | add | clean` in notebooks: whose jobs they list, and who may end them."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket

import pytest
from nbclient.exceptions import DeadKernelError

from tests.e2e import faults
from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, live_notebook

pytestmark = pytest.mark.needs("lab")


RUN = "%%distributed --hosts dm1:1\ndef seven():\n    return 7\nseven()"
WAIT = """\
%%distributed --hosts dm1:1,dm2:1 --lease 300 --cold
import time
def wait():
    print("here")
    time.sleep(600)
wait()
"""


def job_of(table: str, owner: str) -> str:
    """Return the name of the one job in a table of jobs that has this owner."""
    (job,) = re.findall(rf"(?m)^(\d{{4}}-\d{{6}}-\w+) .* {re.escape(owner)}$", table)
    return job


def begin(notebook: LiveNotebook, lab: Lab) -> None:
    notebook.run(
        f"%config Distmagic.ssh_config = {str(lab.ssh_config)!r}\n%distributed hosts dm1:1 dm2:1"
    )


def test_notebooks_on_one_account_see_each_other_s_jobs_with_their_owners_and_remove_only_their_own(
    lab, tmp_path
):
    """Plain kernels: nobody has told them the name of their notebook."""
    with live_notebook(tmp_path) as mine, live_notebook(tmp_path) as theirs:
        for notebook in (mine, theirs):
            begin(notebook, lab)
            assert notebook.run(RUN)
        owner = theirs.run("from distmagic.names import owner; print(owner())").strip()
        table = mine.run("%distributed jobs")
        own, other = job_of(table, "this notebook"), job_of(table, owner)
        assert re.fullmatch(r"\w+@[\w.-]+:notebook \(kernel [\w-]+\)", owner)

        said = mine.run("%distributed clean all")
        assert own in said
        assert other not in said
        assert theirs.run("_run.results[0]") == "7"
        assert other in theirs.run("%distributed jobs")
        mine.run(f"%distributed clean {other}")  # by its name it goes
        assert "no jobs on these hosts" in theirs.run("%distributed jobs")
        for notebook in (mine, theirs):
            notebook.run("%distributed down")
    lab.assert_clean()


def test_a_notebook_whose_kernel_is_gone_has_its_jobs_and_is_told_of_those_that_still_run(
    lab, tmp_path
):
    env = {"JPY_SESSION_NAME": "/home/me/train.ipynb"}
    with live_notebook(tmp_path, env, tmp_path / "kernel-1.json") as first:
        begin(first, lab)

        def kill_when_both_run() -> None:
            wait_until(
                lambda: all(host.ranks_that_printed() for host in lab.hosts[:2]),
                "the first words of both ranks",
            )
            os.kill(first.pid, signal.SIGKILL)

        with first.meanwhile(kill_when_both_run), pytest.raises(DeadKernelError):
            first.run(WAIT)
    other = {"JPY_SESSION_NAME": "/home/me/other.ipynb"}
    with live_notebook(tmp_path, other, tmp_path / "kernel-2.json") as notebook:
        begin(notebook, lab)
        table = notebook.run("%distributed jobs")
        assert job_of(
            table, f"{getpass.getuser()}@{socket.gethostname()}:/home/me/train.ipynb"
        )
        assert notebook.run(RUN)  # somebody else's job is not in the way
        notebook.run("%distributed down")
    with live_notebook(tmp_path, env, tmp_path / "kernel-3.json") as again:
        begin(again, lab)
        job = job_of(again.run("%distributed jobs"), "this notebook")
        said = again.fail(RUN)
        assert f"Job {job}, which this notebook started" in said
        assert f"%distributed attach {job} " in said
        assert "within 300 s." in said
        assert f"{job} was stopped on dm1, dm2" in again.run(f"%distributed stop {job}")
        assert again.run(RUN)
        again.run("%distributed down")
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


def test_a_host_comes_to_a_job_that_was_left_alone(lab, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(
            f"%load_ext distmagic\n%config Distmagic.ssh_config = {str(lab.ssh_config)!r}"
        )
        notebook.run("%distributed hosts dm1:1 dm2:1")
        job = re.search(
            r"job (\S+) runs on dm1 without this notebook", notebook.run(WAITING)
        )[1]
        refused = notebook.fail(f"%distributed add {job} dm1")
        assert f"dm1 can't join job {job}" in refused
        assert "%distributed add needs" in notebook.fail("%distributed add x")
        said = notebook.run(f"%distributed add {job} dm2:1")
        assert said.startswith(f"dm2 has joined job {job} as node 1")
        wait_until(
            lambda: bool(faults.pids(lab.hosts[1], "rank", "*")), "a rank on dm2"
        )
        for host in lab.hosts[:2]:
            (host.home / "go").touch()
        notebook.run(f"%distributed attach {job} run")
        assert notebook.run("dict(run.results)") == "{0: '2', 1: '2'}"
        assert f"Job {job} has already ended (done)." in notebook.fail(
            f"%distributed add {job} dm2"
        )
        notebook.run("%distributed down")
    lab.assert_clean()

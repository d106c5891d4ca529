"""Ranks that outlive their kernel: another kernel attaches to them, or their idle time ends them."""

from __future__ import annotations

import os
import signal

import pytest
from nbclient.exceptions import DeadKernelError

from tests.e2e.faults import host_of, send
from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook

pytestmark = pytest.mark.needs("lab")

KEPT = "--warm-idle 0 --lease 3 --on-disconnect keep --stay-idle"
FIRST = f"""\
%%ranks exp --hosts dm1:1,dm2:1 {KEPT} 1h
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
kept = [int(os.environ["RANK"])]
os.getpid()
"""
SUM = """\
%%ranks exp
total = torch.ones(1)
dist.all_reduce(total)
kept.append(total.item())
os.getpid(), kept
"""


def test_another_kernel_goes_on_with_ranks_that_were_kept(lab: Lab, tmp_path) -> None:
    setup = f'%config Distmagic.ssh_config = "{lab.ssh_config}"'
    env = {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}
    with live_notebook(tmp_path, env) as first, live_notebook(tmp_path, env) as second:
        first.run(setup)
        pids = [line.split(": ")[1] for line in first.run(FIRST).splitlines()[-2:]]
        first.run('exp[1]["lr"] = 0.5')
        said = first.fail("%%ranks exp --stay-idle 2h\nkept")
        assert "after the time of their first cell, 1 h 00 min" in said
        second.run(setup)
        assert "%%ranks exp" in second.run("%distributed jobs")
        # Both kernels live: the second one takes the ranks.
        text = second.run("%distributed attach exp")
        assert "<ranks exp: 2 on dm1, dm2, running, 1 cell>" in text
        assert "names: dist, kept, lr, os, torch" in text
        # Of the line that started them, only the hosts are known here.
        again = "%%ranks exp --hosts {} --on-disconnect keep --stay-idle 1h\nlr = 0.5"
        second.run(again.format("dm1:1,dm2:1"))
        assert "are on dm1, dm2, and this line asks" in second.fail(
            again.format("dm1:1")
        )
        text = second.run(SUM)
        assert f"rank 0: ({pids[0]}, [0, 2.0])" in text
        assert f"rank 1: ({pids[1]}, [1, 2.0])" in text
        said = first.fail(SUM)
        assert "Another kernel has attached to the ranks of exp" in said
        assert "another kernel has them" in first.run("%distributed stay")
        # The first one takes them back, and sees what was done.
        assert "3 cells>" in first.run("%distributed attach exp")
        assert f"({pids[0]}, [0, 2.0, 2.0])" in first.run(SUM)
        assert "Another kernel has" in second.fail('exp["kept"]')
        os.kill(first.pid, signal.SIGKILL)
        assert "4 cells>" in second.run("%distributed attach exp")
        assert second.run('exp[1]["lr"]') == "0.5"
        assert second.run("exp.history[2] == exp.history[3]") == "True"
        assert "kept = [int" in second.run("print(exp.history[0])")
    # The end of that kernel, which is none by force, leaves them too.
    with live_notebook(tmp_path, env) as third:
        third.run(setup)
        third.run("%distributed attach exp")
        assert f"({pids[1]}, [1, 2.0, 2.0, 2.0])" in third.run(SUM)
        assert third.run("%distributed end exp") == "The ranks of exp have ended.\n"
        third.run("%distributed down")
    lab.assert_clean()


def test_ranks_that_were_kept_end_without_a_cell_or_with_one_of_them(
    lab: Lab, tmp_path
) -> None:
    setup = f'%config Distmagic.ssh_config = "{lab.ssh_config}"'
    env = {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}
    with live_notebook(tmp_path, env) as first:
        first.run(setup)
        text = first.run(
            f"%%ranks lost --hosts dm2:1 {KEPT} 1h\nimport os\nos.getpid()"
        )
        first.run(f"%%ranks idle --hosts dm1:1 {KEPT} 2s\nkept = 7")
        os.kill(first.pid, signal.SIGKILL)
    send(host_of(lab, "dm2"), [int(text.split()[-1])], signal.SIGKILL)
    lab.assert_clean()  # nobody is attached
    with live_notebook(tmp_path, env) as second:
        second.run(setup)
        said = second.fail("%distributed attach idle")
        assert "no cell ran on them for the time of --stay-idle" in said
        said = second.fail("%distributed attach lost")
        assert "rank 0 (dm2, local_rank 0) was ended by signal 9" in said
        second.run("%distributed down")
    lab.assert_clean()


LONG = """\
%%ranks exp
import time
from pathlib import Path

print("begun", flush=True)
while not Path.home().joinpath("go").exists():
    time.sleep(0.05)
kept = "to the end"
"""


def test_a_cell_goes_on_without_its_kernel_and_the_next_one_waits_for_it(
    lab: Lab, tmp_path
) -> None:
    setup = f'%config Distmagic.ssh_config = "{lab.ssh_config}"'
    host = host_of(lab, "dm1")
    env = {"DISTMAGIC_HOSTS": "dm1:1"}
    with live_notebook(tmp_path, env) as first:
        first.run(setup)
        first.run(f"%%ranks exp {KEPT} 1h\nnothing = None")

        def kill_when_it_runs() -> None:
            wait_until(lambda: host.ranks_that_printed() == 1, "the first word")
            os.kill(first.pid, signal.SIGKILL)

        with first.meanwhile(kill_when_it_runs), pytest.raises(DeadKernelError):
            first.run(LONG)
    with live_notebook(tmp_path, env) as second, second.overheard() as messages:
        second.run(setup)

        def go_when_it_waits() -> None:
            for message in messages:
                if "still run a cell" in message["content"].get("text", ""):
                    host.home.joinpath("go").touch()
                    return

        with second.meanwhile(go_when_it_waits):
            assert "2 cells>" in second.run("%distributed attach exp")
        assert second.run('exp["kept"]') == "['to the end']"
        assert "Path.home()" in second.run("print(exp.history[1])")
        second.run("%distributed end exp")
        second.run("%distributed down")
    lab.assert_clean()


def test_a_host_that_is_lost_while_nobody_is_attached_is_named_afterwards(
    lab: Lab, tmp_path
) -> None:
    setup = f'%config Distmagic.ssh_config = "{lab.ssh_config}"'
    env = {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}
    with live_notebook(tmp_path, env) as first:
        first.run(setup)
        first.run(f"%%ranks exp {KEPT} 1h\nkept = 7")
        os.kill(first.pid, signal.SIGKILL)
    host_of(lab, "dm2").kill()
    lab.assert_clean()
    with live_notebook(tmp_path, env) as second:
        second.run(setup)
        said = second.fail("%distributed attach exp")
        assert "A host was lost, and the others were stopped. dm2:" in said
    lab.assert_clean()

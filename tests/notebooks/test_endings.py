"""A cell that is interrupted, ranks that die, a kernel that ends or is killed: no rank lives on."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.e2e.faults import host_of, pids, send
from tests.lab import Lab, LabHost
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import live_notebook

pytestmark = pytest.mark.needs("lab")

LONG = """\
%%distributed --hosts dm1:2,dm2:1 --lease 3 --warm-idle 0
import signal
import subprocess
import time

import distmagic

def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    for step in range(1000):
        distmagic.report(step=step, total=1000)
        time.sleep(1)

work()
"""


def children(lab: Lab) -> int:
    """Return how many ranks have started the program that they leave running."""
    return sum(
        "1234" in process.cmdline for host in lab.hosts for process in host.processes()
    )


@pytest.mark.quick
def test_an_interrupt_stops_all_ranks_and_the_next_cell_runs(lab, tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')

        def interrupt() -> None:
            wait_until(lambda: children(lab) == 3, "three ranks at work")
            notebook.interrupt()

        with notebook.meanwhile(interrupt):
            shown = notebook.fail(LONG)
        assert "\nstopped " in f"\n{shown}"
        view = notebook.node.cells[-1].outputs[0].data
        assert set(view) == {"text/plain", "text/html"}
        assert " · interrupted<" in view["text/html"]
        assert shown.count("The run was interrupted") == 1
        assert "Cancelled: " in shown.splitlines()[-1]
        assert children(lab) == 0
        lab.assert_clean()
        assert notebook.run("_run.state.phase") == "'stopped'"
        assert notebook.run(
            "%%distributed --hosts dm1:1 --warm-idle 0\nprint('again')"
        ).endswith("[rank 0 dm1] again")


def test_a_rank_that_dies_between_two_cells_ends_all_with_its_cause(lab, tmp_path):
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        text = notebook.run("%%ranks pair\nimport os\nkept = 7\nos.getpid()")
        pid = int(text.splitlines()[-1].rpartition(" ")[2])
        send(host_of(lab, "dm2"), [pid], signal.SIGKILL)
        assert "was ended by signal 9" in notebook.fail('pair["kept"]')
        assert notebook.run("pair.done") == "True"
        assert "Lost with the ranks of pair: kept" in notebook.fail('pair["kept"]')
        text = notebook.fail("%%ranks pair\nkept")
        assert text.count("Lost with") == 1
        assert "pair.logs(1)" in text
        assert notebook.run("pair.logs(1)") == "''"
        assert "rank 1 (dm2, local_rank 0) was ended by signal 9" in text
        assert "Lost with the ranks of pair: kept, os." in text
        assert notebook.run("%%ranks pair\n1 + 1").endswith("ranks 0-1: 2\n")
        text = notebook.fail("%%ranks pair\nimport os\nos.kill(os.getpid(), 9)")
        assert "was ended by signal 9" in text
        assert "Lost with the ranks of pair: nothing." in text
        text = notebook.run("%%ranks pair\nimport os\nos.getpid()")
        pid = int(text.splitlines()[-1].rpartition(" ")[2])
        send(host_of(lab, "dm2"), [pid], signal.SIGKILL)
        wait_until(lambda: notebook.run("pair.done") == "True", "the end")
        assert "was ended by signal 9" in notebook.fail("%distributed end pair")
        assert "no ranks stay" in notebook.run("%distributed stay")
    lab.assert_clean()


WORKS = """\
%%ranks pair
import time
from pathlib import Path

(Path.home() / "begun").touch()
time.sleep(3600)
"""


def strike(host: LabHost, process: str, job: str) -> None:
    if process == "cable":
        host.cut()
    else:
        send(host, pids(host, process, job), signal.SIGKILL)


@pytest.mark.parametrize("is_at_work", [True, False], ids=["in a cell", "between two"])
@pytest.mark.parametrize(
    ("process", "cause"),
    [
        ("torchrun", "torchrun on dm2 was ended by signal 9"),
        ("agent", "dm2: its agent exited without an error message"),
        ("cable", "dm2: none of its heartbeats reached the other hosts"),
    ],
)
def test_what_a_host_loses_ends_the_ranks_of_all_with_its_cause(
    lab: Lab, tmp_path, process: str, cause: str, is_at_work: bool
) -> None:
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        flags = "--node-lost-after 3 --lease 6 --warm-idle 0"
        notebook.run(f"%%ranks pair {flags}\nkept = 7")
        job = notebook.run("pair.job").strip("'")

        def strike_when_all_work() -> None:
            begun = [host.home / "begun" for host in lab.hosts[:2]]
            wait_until(lambda: all(file.exists() for file in begun), "all at work")
            strike(host_of(lab, "dm2"), process, job)

        if is_at_work:
            with notebook.meanwhile(strike_when_all_work):
                text = notebook.fail(WORKS)
        else:
            strike(host_of(lab, "dm2"), process, job)
            wait_until(lambda: notebook.run("pair.done") == "True", "the end")
            text = notebook.fail("%%ranks pair\nkept")
        assert cause in text
        assert "Lost with the ranks of pair: kept" in text
        if process == "cable":
            host_of(lab, "dm2").heal()
        assert notebook.run("%%ranks pair\n1 + 1").endswith("ranks 0-1: 2\n")
    lab.assert_clean()


def test_the_end_of_the_kernel_ends_the_ranks(lab, tmp_path):
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        assert notebook.run("%%ranks\n6 * 7").endswith("rank 0: 42\n")
    lab.assert_clean()


def test_ranks_end_with_a_kernel_that_is_killed(lab, tmp_path):
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        notebook.run("%%ranks --lease 3 --warm-idle 0\n6 * 7")
        os.kill(notebook.pid, signal.SIGKILL)
    lab.assert_clean()


def test_ranks_that_stay_without_a_cell_end_after_their_idle_time(
    lab: Lab, tmp_path
) -> None:
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1,dm2:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        notebook.run("%%ranks --stay-idle 10h\nkept = 7")
        text = notebook.run("%distributed stay")
        assert re.search("they end in (10 h 00|9 h 59) min unless a cell runs", text)
        assert notebook.run("%%ranks --stay-idle 1s\nkept").endswith(": 7\n")
        wait_until(lambda: notebook.run("ranks.done") == "True", "the end")
        cause = "no cell ran on them for 1 s (--stay-idle, --idle)"
        assert cause in notebook.fail('ranks["kept"]')
        text = notebook.fail("%%ranks\nkept")
        assert cause in text
        assert "Lost with the ranks: kept." in text
        assert notebook.run("%%ranks\n1 + 1").endswith("ranks 0-1: 2\n")
        assert "they end in" not in notebook.run("%distributed stay")
    lab.assert_clean()


def test_a_notice_comes_before_the_idle_end_and_a_command_keeps_the_ranks(
    lab: Lab, tmp_path
) -> None:
    """On the kernel's own thread of these ranks, whose clock the test sets, while no cell runs."""
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "dm1:1"}) as notebook:
        notebook.run(f'%config Distmagic.ssh_config = "{lab.ssh_config}"')
        notebook.run("%%ranks exp\nkept = 7")
        notebook.run("now = [0.0]\nexp.idle._clock = lambda: now[0]")
        with notebook.overheard() as messages:
            notebook.run("%%ranks exp --stay-idle 1h\nkept")
            notebook.run("now[0] = 3300.0")
            cells = {}  # by the request that ran them
            for message in messages:
                request = message["parent_header"].get("msg_id")
                if message["msg_type"] == "execute_input":
                    cells[request] = message["content"]["code"]
                text = message["content"].get("text", "")
                if "because no cell runs" in text:
                    break
        assert text == (
            "The ranks of exp (1 on dm1) end in 5 min, because no cell runs on them. "
            "%distributed stay exp keeps them.\n"
        )
        assert cells[request].startswith("%%ranks exp")
        assert "they end in 1 h 00 min" in notebook.run("%distributed stay exp")
        notebook.run("now[0] += 3599.0")
        assert notebook.run("%%ranks exp\nkept").endswith("rank 0: 7\n")
        notebook.run("now[0] += 3600.0")
        wait_until(lambda: notebook.run("exp.done") == "True", "the end")
        assert "ran on them for 1 h 00 min" in notebook.fail("%distributed stay exp")
    lab.assert_clean()

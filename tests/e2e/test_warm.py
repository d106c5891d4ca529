"""Warm hosts: what is kept loaded serves the next runs, ends with its notebook, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.connection import idle_links
from distmagic.connection.prompts import NotebookAsker
from distmagic.outcome.run import Run
from distmagic.remote.wire.protocol import Template
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from tests.builders.wheels import unpacked
from tests.e2e import runner
from tests.e2e.runner import as_value, at_work
from tests.lab import Lab
from tests.lab.processes import HostProcess
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.needs("lab")

ENDS_WITH_IT = pytest.mark.promise("warm processes end with the kernel")


@pytest.fixture
def warm(lab: Lab) -> Iterator[Lab]:
    """The lab, in which nothing is kept loaded after the test. The kernel forgets hosts of labs that are gone."""
    session().down()
    yield lab
    session().close()
    lab.assert_clean()


def run(lab: Lab, hosts: str, fn: Callable[..., Any], *args: Any, **more: Any) -> Run:
    way = runner.access(
        lab,
        warm_idle_s=more.pop("warm_idle_s", 900.0),
        lease_s=more.pop("lease_s", 60.0),
        preload=more.pop("preload", ()),
    )
    screen = more.pop("screen", None) or runner.Watch()
    return distmagic.run(
        as_value(fn), *args, hosts=hosts, access=way, screen=screen, **more
    )


def who() -> list[int]:
    """Return the pids of this rank, its parent, and so on."""
    import os

    pids = [os.getpid()]
    while pids[-1] > 1:
        with open(f"/proc/{pids[-1]}/stat") as file:
            pids.append(int(file.read().rpartition(")")[2].split()[1]))
    return pids


def templates(lab: Lab, host: int = 0) -> list[HostProcess]:
    return [
        one for one in lab.hosts[host].processes() if one.cmdline[-1:] == ("template",)
    ]


def kept(lab: Lab, hosts: str) -> tuple[tuple[Template, ...] | None, ...]:
    access = runner.access(lab, warm_idle_s=900.0)
    return session().housekeeping.templates(
        session().reach(parse_hosts(hosts), access, NotebookAsker(can_ask=False))
    )


def open_files() -> list[tuple[str, str]]:
    """Return (soft, hard) limit of open files of this rank, of its torchrun, and of the agent."""
    import os

    pids = [os.getpid(), os.getppid()]
    with open(f"/proc/{pids[-1]}/stat") as file:
        pids.append(int(file.read().rpartition(")")[2].split()[1]))
    found = []
    for pid in pids:
        with open(f"/proc/{pid}/limits") as file:
            line = next(line for line in file if line.startswith("Max open files"))
        found.append((line.split()[3], line.split()[4]))
    return found


@pytest.mark.parametrize("is_cold", [False, True])
def test_ranks_keep_the_limit_of_open_files_that_a_log_in_has_and_the_agent_has_the_highest(
    warm, *, is_cold
):
    (warm.hosts[0].home / ".bashrc").write_text("ulimit -Sn 300\n")
    rank, torchrun, agent = run(
        warm, "dm1:1", open_files, warm_idle_s=0.0 if is_cold else 900.0
    ).results[0]
    assert rank == torchrun == ("300", agent[1])
    assert agent[0] == agent[1]


@pytest.mark.promise("hosts keep torch loaded for the next run")
def test_torch_stays_loaded(warm):
    for _ in range(2):
        found = run(warm, "dm1:2,dm2:2", runner.all_reduce).results
        assert [float(found[rank]["total"]) for rank in found] == [6.0] * 4
        assert [len(templates(warm, host)) for host in (0, 1, 2)] == [1, 1, 0]
    (template,) = templates(warm)
    found = [run(warm, "dm1:2", who).results[rank] for rank in (0, 1)]
    # Rank, torchrun, agent, template.
    assert [pids.index(template.pid) for pids in found] == [3, 3]
    assert len({pids[0] for pids in found}) == 2, "fresh processes"
    assert template.pid not in run(warm, "dm1:2", who, cold=True).results[0]
    assert [one.pid for one in templates(warm)] == [template.pid]


def importing() -> dict[str, bool]:
    """Return which packages this rank has found imported, and which it imports itself."""
    import os

    import mine  # type: ignore[import-not-found]
    import slow  # type: ignore[import-not-found]
    import slow.part  # type: ignore[import-not-found]
    import threader  # type: ignore[import-not-found]

    modules = (mine, slow, slow.part, threader)
    return {module.__name__: os.getpid() != module.PID for module in modules}


def test_packages_that_ranks_import_are_loaded_for_the_next_run(warm):
    site = warm.hosts[0].home / "site"
    note = "import os\nPID = os.getpid()\n"
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    slow = {"slow/__init__.py": note, "slow/part.py": note}
    unpacked(site, "slow", files=slow)
    unpacked(site, "threader", files={"threader.py": note + thread})
    unpacked(site, "more", files={"more.py": note})
    (site / "mine.py").write_text(note)
    env = {"PYTHONPATH": "/home/node/site"}
    cold = dict.fromkeys(("mine", "slow", "slow.part", "threader"), False)
    assert run(warm, "dm1:2", importing, env=env).results[1] == cold

    def loaded(*packages: str) -> bool:
        (found,) = kept(warm, "dm1")
        return any(one.packages == packages for one in found or ())

    wait_until(partial(loaded, "slow"), "a package that is loaded")
    (template,) = kept(warm, "dm1")[0] or ()
    wait_until(lambda: [one.refused for one in kept(warm, "dm1")[0] or ()] == [("threader (starts threads)",)],
               "a package that is refused")  # fmt: skip
    again = run(warm, "dm1:2", importing, env=env).results[1]
    assert again == {**cold, "slow": True, "slow.part": True}
    assert [one.pid for one in templates(warm)] == [template.pid]
    # What a setting names is loaded by another template, before a run has imported it.
    assert run(warm, "dm1:2", who, env=env, preload=("more",)).state.phase == "done"
    wait_until(partial(loaded, "more"), "what a setting names")


def variables_at_import(is_set: bool) -> tuple[str, str]:
    """Return what a package and torch have read when they were imported."""
    import os

    if is_set:
        os.environ["SLOW_HOME"] = "/set/here"
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    import slow
    import torch.distributed as dist

    return slow.HOME, dist.get_debug_level().name


def is_loaded() -> bool:
    """Return whether this rank finds a package imported."""
    import os

    import slow

    return bool(os.getpid() != slow.PID)


def test_what_a_package_reads_when_it_is_imported_is_what_the_program_has_set(warm):
    text = "import os\nPID = os.getpid()\nHOME = os.environ.get('SLOW_HOME', 'none')\n"
    # A process that has only inherited what an import has set is not new.
    text += "os.environ['SLOW_HOME'] = 'inherited'\n"
    unpacked(warm.hosts[0].home / "site", "slow", files={"slow.py": text})
    env = {"PYTHONPATH": "/home/node/site"}

    def loaded() -> bool:
        return run(warm, "dm1:2", is_loaded, env=env).results[1]

    def is_kept() -> bool:
        (found,) = kept(warm, "dm1")
        return bool(found) and len(found) == 1 and found[0].packages == ("slow",)

    def seen(*, is_set: bool) -> Any:
        found = run(warm, "dm1:2", variables_at_import, is_set, env=env)
        return found.results[1]

    assert seen(is_set=True) == ("/set/here", "DETAIL")
    wait_until(is_kept, "the package to be loaded")
    assert loaded()
    assert seen(is_set=True) == ("/set/here", "DETAIL")
    assert seen(is_set=False) == ("none", "OFF")
    assert loaded()


def test_its_memory_and_age_are_told_and_down_ends_it(warm, monkeypatch):
    # However busy the machine is.
    monkeypatch.setattr(idle_links, "_FINISH_S", 60.0)
    run(warm, "dm1:2", who)
    ((told,), ()) = kept(warm, "dm1:2,dm2:2")
    assert [one.pid for one in templates(warm)] == [told.pid]
    assert 20e6 < told.size_bytes < 2e9
    assert 0 <= told.idle_s < told.age_s < 240
    session().close()
    assert templates(warm) == []
    warm.assert_clean(within_s=0)


def test_a_program_for_the_start_of_every_process_runs_in_every_rank(warm, golden):
    def seen() -> str:
        import sitecustomize

        return str(sitecustomize.RANK)

    folder = warm.hosts[0].home / "start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nRANK = os.environ.get('RANK')\n"
    )
    for _ in range(2):
        found = run(warm, "dm1:2", seen, env={"PYTHONPATH": "/home/node/start"})
        assert [found.results[rank] for rank in (0, 1)] == ["0", "1"]
        (notice,) = found.state.notices
        golden(notice)
    assert templates(warm) == []


def test_other_variables_get_another_template_and_cold_gets_none(warm):
    def colour() -> tuple[str | None, str | None]:
        import os
        import subprocess

        child = subprocess.run(
            ["printenv", "COLOUR"], capture_output=True, text=True, check=False
        )
        return os.environ.get("COLOUR"), child.stdout.strip() or None

    assert run(warm, "dm1:2", colour).results[1] == (None, None)
    (first,) = templates(warm)
    assert run(warm, "dm1:2", colour, env={"COLOUR": "red"}).results[1] == (
        "red",
        "red",
    )
    assert len(templates(warm)) == 2
    assert run(warm, "dm1:2", colour).results[1] == (None, None)
    assert first.pid in [one.pid for one in templates(warm)]
    run(warm, "dm1:2", colour, env={"COLOUR": "blue"})
    # The one unused for longest made room; its process may take a moment to end.
    wait_until(lambda: len(templates(warm)) == 2, "two templates")
    before = {one.pid for one in templates(warm)}
    assert run(warm, "dm1:2", colour, cold=True).results[1] == (None, None)
    assert {one.pid for one in templates(warm)} == before


def test_killing_the_template_leaves_the_run_alone_and_a_stopped_one_is_replaced(warm):
    def work() -> int:
        import os
        import time

        import distmagic

        distmagic.report(step=1)
        while "go" not in os.listdir("/home/node"):
            time.sleep(0.01)
        return 7

    def kill() -> None:
        for one in templates(warm):
            os.kill(one.outer_pid, signal.SIGKILL)
        (warm.hosts[0].home / "go").touch()

    assert dict(
        run(warm, "dm1:2", work, screen=runner.Watch(at_work(2), kill)).results
    ) == {0: 7, 1: 7}
    assert templates(warm) == []
    assert dict(run(warm, "dm1:2", work).results) == {0: 7, 1: 7}  # a new one
    (stopped,) = templates(warm)
    os.kill(stopped.outer_pid, signal.SIGSTOP)
    stat = Path(f"/proc/{stopped.outer_pid}/stat")
    wait_until(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T",
        "a template that is stopped",
    )
    assert dict(run(warm, "dm1:2", work).results) == {0: 7, 1: 7}, "nobody waits for it"
    # The one that was stopped is killed, which takes a moment.
    wait_until(lambda: len(templates(warm)) == 1, "one template")
    (another,) = templates(warm)
    assert another.pid != stopped.pid


def test_a_template_that_its_host_asks_to_end_leaves_nothing(warm):
    def handler() -> object:
        import signal

        return int(signal.getsignal(signal.SIGTERM))

    assert dict(run(warm, "dm1:1", handler).results) == {0: int(signal.SIG_DFL)}
    (one,) = templates(warm)
    os.kill(one.outer_pid, signal.SIGTERM)
    wait_until(lambda: not warm.hosts[0].leftovers(), "a host with nothing of ours")


def test_what_was_removed_from_a_host_meanwhile_is_sent_again(warm):
    def measure(value: bytes) -> int:
        return len(value)

    value = os.urandom(9 << 20)  # so large that it goes from host to host
    for _ in range(2):
        assert dict(run(warm, "dm1:1,dm2:1", measure, value).results) == {
            0: len(value),
            1: len(value),
        }
        for host in warm.hosts[:2]:
            wait_until(partial(is_removed, host.home / ".distmagic"), "its removal")


def is_removed(folder: Path) -> bool:
    """Remove a folder in which others may write meanwhile, and say whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("exit", marks=ENDS_WITH_IT),
        "exit beside a run",
        pytest.param("SIGKILL", marks=ENDS_WITH_IT),
    ],
)
def test_end_of_the_kernel_releases_hosts(lab, end):
    program = textwrap.dedent(f"""
        import sys, os, signal, time
        sys.path.insert(0, {str(Path.cwd())!r})
        import distmagic
        from distmagic.connection import idle_links
        from distmagic.request.access import Access
        from distmagic.session import background
        from tests.e2e.runner import Watch
        if __name__ == "__main__":
            idle_links._FINISH_S = background._LAST_WAIT_S = 60.0  # however busy the machine is
            way = Access(ssh_config={str(lab.ssh_config)!r}, lease_s=4.0)
            if {end!r} == "exit beside a run":  # the only one, so no connection has rested yet
                run = distmagic.run(signal.pause, hosts="dm1:2,dm2:1", access=way, background=True)
                while len(run.state.workers) < 3:
                    time.sleep(0.02)
            else:
                for _ in range(2):
                    distmagic.run(os.getpid, hosts="dm1:2,dm2:1", access=way, screen=Watch())
            print("done", flush=True)
            sys.stdin.readline()
            if {end!r} == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
    """)
    kernel = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert kernel.stdin is not None
    assert kernel.stdout is not None
    with kernel.stdin, kernel.stdout:
        assert kernel.stdout.readline() == "done\n"
        if end != "exit beside a run":
            assert len(templates(lab)) == len(templates(lab, 1)) == 1
        kernel.stdin.write("\n")
    kernel.wait()
    if end == "SIGKILL":
        lab.assert_clean()  # when their lease has ended
    else:
        lab.assert_clean(within_s=0)


@pytest.mark.promise("warm processes end after 15 idle minutes")
def test_idle_hosts_are_released(lab):
    """They are what is asked for where nothing is said; here a second is."""
    assert Access().warm_idle_s == 15 * 60
    run(lab, "dm1:2", who, warm_idle_s=1.0)
    lab.assert_clean()
    session().close()

"""Runs that go nowhere: who waits for whom is said, by the run itself and to a second kernel."""

from __future__ import annotations

import atexit
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import distmagic
from distmagic.api import session
from distmagic.errors import Hung, UsageError
from distmagic.state.explanation import Explanation
from distmagic.state.model import RunState
from tests.e2e import runner, scripts
from tests.e2e.runner import as_value, reach, the_job
from tests.lab import Lab
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

HERE = __file__
ROOT = Path(__file__).parents[2]


def train(late: int, path: str) -> float:
    """Sum over gloo, after the batch of one rank has come: when there is a file of this name, never without one."""
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import distmagic

    def load_batch() -> None:
        while not (path and Path(path).exists()):
            time.sleep(0.02)  # MARK load

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    distmagic.report(step=1, total=2)
    print("at work", flush=True)
    if dist.get_rank() == late:
        load_batch()
    dist.all_reduce(total)  # MARK reduce
    dist.barrier()
    dist.destroy_process_group()
    return float(total)


def flood(path: str) -> int:
    """Print without pause until a file appears, and never report."""
    from pathlib import Path

    lines = 0
    while not Path(path).exists():
        print("x" * 99, lines, flush=True)
        lines += 1
    return 7


ODD = "rank 2 (dm2, local_rank 0) is in load_batch at {here}, line {load}"
REST = "ranks 0, 1 wait in all_reduce at {here}, line {reduce}"


def filled(text: str) -> str:
    return text.format(
        here=HERE, load=line_of("MARK load"), reduce=line_of("MARK reduce")
    )


def line_of(mark: str) -> int:
    """Return the number of this file's line that ends with a mark."""
    return next(
        i
        for i, line in enumerate(Path(HERE).read_text().splitlines(), 1)
        if line.endswith(f"# {mark}")
    )


@pytest.mark.promise("`--hang-timeout` ends a hang and names the rank that stands out")
def test_hang_ends_the_run(lab):
    """Of ranks that are forked from a template; those of the other kernels below are cold."""
    way = runner.access(lab, warm_idle_s=900.0)
    with pytest.raises(Hung) as caught:
        distmagic.run(
            as_value(train),
            2,
            "",
            hosts="dm1:2,dm2:1",
            access=way,
            screen=runner.Watch(),
            hang_timeout_s=12.0,
        )
    session().close()  # and with it what hosts keep loaded
    lab.assert_clean()
    error = caught.value
    found = re.search(r"advanced for (\d+) s before", error.message)
    assert found, error.message
    assert int(found[1]) >= 3
    assert error.message.endswith(f": {filled(f'{ODD}; {REST}')}.")
    assert "rank 2 (dm2, local_rank 0) first" in error.hint
    for level in ("warning:", "error:"):
        assert level not in error.hint, "the doctor finds nothing on healthy hosts"
    load, reduce = error.stacks.split("\n\n")
    where = [
        f"  {HERE}, line {line_of('MARK load')}, in load_batch",
        "    time.sleep(0.02)  # MARK load",
    ]
    assert load.splitlines()[-2:] == where
    assert "  torch/distributed/distributed_c10d.py, line " in reduce
    assert "distmagic/remote" not in error.stacks
    assert error.run.state.phase == "stopped"


def test_a_flood_of_output_disturbs_no_roll_call_and_is_no_hang(warm_lab):
    paths = [host.home / "enough" for host in warm_lab.hosts[:2]]
    asked = []

    def ask() -> None:
        job, hosts = the_job(warm_lab, "dm1,dm2")
        asked.append(session().housekeeping.stacks(reach(warm_lab, hosts), job))
        for path in paths:
            path.touch()

    def has_printed_for_long(state: RunState) -> bool:
        return (
            len({line.rank for line in state.lines if line.rank >= 0}) == 3
            and state.at_s > 8
        )

    screen = runner.Watch(has_printed_for_long, ask)
    run = runner.run_warm(
        warm_lab,
        "dm1:2,dm2:1",
        flood,
        "/home/node/enough",
        hang_timeout_s=5.0,
        screen=screen,
    )
    assert (run.state.phase, dict(run.results)) == ("done", {0: 7, 1: 7, 2: 7})
    (found,) = asked
    assert sorted(rank for group in found.groups for rank in group.ranks) == [0, 1, 2]
    assert all(group.threads for group in found.groups)
    for group in found.groups:
        assert "flood" in [frame.function for frame in group.threads[0].frames]


# ---- from another kernel

KERNEL = """
import distmagic
from distmagic.request.access import Access
from tests.e2e import runner, scripts
from tests.e2e.test_hangs import train
from tests.e2e.runner import as_value
way = Access(ssh_config={config!r}, warm_idle_s=0.0)
run = distmagic.run(
    as_value(train), 2, {path!r}, hosts="dm1:2,dm2:1", access=way, screen=runner.Watch(), hang_timeout_s={hang_timeout_s}
)
print(dict(run.results), len(run.state.stack_dumps))
"""


@contextmanager
def another_kernel(
    lab: Lab, path: str, hang_timeout_s: float | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a job of three ranks in another process, and wait until all of them have said that they work."""
    script = KERNEL.format(
        path=path, hang_timeout_s=hang_timeout_s, config=str(lab.ssh_config)
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: sum(host.ranks_that_printed() for host in lab.hosts[:2]) == 3,
            "three ranks at work",
        )
        yield kernel
    finally:
        kernel.kill()
        kernel.communicate()


def test_a_second_kernel_asks_a_job_that_then_goes_on(
    lab, monkeypatch, tmp_path, capsys
):
    """Torch, gloo and Python's sleep survive the signal: the sum is right in the end."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with another_kernel(lab, "/home/node/batch") as kernel:
        job, hosts = the_job(lab, "dm1,dm2")
        for _ in range(5):
            found = asked_until(
                lambda: session().housekeeping.stacks(reach(lab, hosts), job),
                filled(f"{ODD}; {REST}"),
            )
        assert "rank 2 (dm2, local_rank 0) first" in found.advice
        said = the_magic(lab, capsys, "stacks")
        assert said.startswith(
            filled(f"{job.name}: 3 ranks at 2 places: {ODD}; {REST}\nLook at rank 2")
        )
        assert "\n    time.sleep(0.02)  # MARK load\n" in said
        (lab.hosts[1].home / "batch").touch()
        assert kernel.communicate(timeout=120)[0] == "{0: 3.0, 1: 3.0, 2: 3.0} 4\n"
    assert "has already ended (done)" in the_magic(lab, capsys, "stacks", job.name)
    assert "No job runs" in the_magic(lab, capsys, "stacks")
    lab.assert_clean()


def asked_until(ask: Callable[[], Explanation], sentence: str) -> Explanation:
    """Ask until the ranks have come to where they wait: they may only just have begun."""
    last = [ask()]
    while last[-1].sentence != sentence:
        assert len(last) < 30, f"{last[-1].sentence} is not {sentence}"
        last.append(ask())
    return last[-1]


def the_magic(lab: Lab, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `%distributed ...` says in a notebook of its own, an error's message included."""
    settings = {
        "HistoryManager": {"hist_file": ":memory:"},
        "Distmagic": {"ssh_config": str(lab.ssh_config)},
    }
    shell = InteractiveShell(config=Config(settings))
    shell.run_line_magic("load_ext", "distmagic")
    shell.run_line_magic("distributed", "hosts dm1 dm2")
    capsys.readouterr()
    try:
        shell.run_line_magic("distributed", " ".join(words))
    except UsageError as error:
        return str(error)
    finally:
        shell.run_line_magic("unload_ext", "distmagic")
        atexit.unregister(shell.atexit_operations)
        shell.atexit_operations()
    return capsys.readouterr().out


SPAWNS = """
import os, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    print("at work", flush=True)
    dist.init_process_group("gloo", rank=rank, world_size=world)
if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""


def test_a_program_that_starts_its_own_ranks_is_named_before_it_starts_and_when_it_hangs(
    lab, tmp_path, monkeypatch
):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    monkeypatch.chdir(tmp_path)
    unnamed: list[bool] = []
    screen = runner.Watch(
        lambda state: bool(state.workers) and not state.notices,
        lambda: unnamed.append(True),
    )
    with pytest.raises(Hung) as found:
        # None of them advances while it imports torch.
        scripts.run(lab, "--hang-timeout 30 spawns.py", screen=screen)
    assert screen.last is not None
    assert unnamed == []
    assert any("spawns.py, line 8 starts" in text for text in screen.last.notices)
    assert "mp.spawn" in found.value.hint
    assert "network" not in str(found.value)
    session().close()
    lab.assert_clean()

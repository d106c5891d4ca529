"""`--on osmo`, end to end: a program `osmo` as the public one behaves, whose service runs the tasks on hosts of the lab."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distmagic.errors import NoResult, WorkerFailed
from distmagic.outcome.run import Run
from distmagic.payload.pack import pack_call
from distmagic.request import flags
from distmagic.systems.osmo import run as osmo
from tests.builders.osmo_service import Service, playing
from tests.e2e.runner import Watch, as_value
from tests.lab import Lab
from tests.lab.host import LabHost

pytestmark = pytest.mark.needs("lab")

LINE = "--on osmo --nodes 2 --nproc-per-node 2 --python python3"
ONE_A_NODE = "--on osmo --nodes 2 --python python3"


class OnHost:
    """A host of the lab in place of a container."""

    root = ""

    def __init__(self, host: LabHost) -> None:
        self._host = host
        self.address = host.name

    def start(
        self, command: Sequence[str], variables: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command there."""
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.Popen(
            self._host.command([*words, *command]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> None:
        """Send SIGTERM to the task: `process` only stands for it outside of the host."""
        for one in self._host.processes():
            if "task" in one.cmdline and "-u" in one.cmdline:
                with suppress(ProcessLookupError):
                    os.kill(one.outer_pid, signal.SIGTERM)


@pytest.fixture
def service(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    """A service of OSMO with two hosts; afterwards neither has a process or a file of ours."""
    hosts = lab.hosts[:2]
    monkeypatch.chdir(tmp_path)
    seen_by_all = lab.folder / "exports" / tmp_path.name
    seen_by_all.mkdir(parents=True)
    with playing(seen_by_all, [OnHost(host) for host in hosts], monkeypatch) as made:
        yield made
    shutil.rmtree(seen_by_all)
    assert made.broken == []
    for host in hosts:
        host.exec(["rm", "-rf", "/tmp/distmagic", "/tmp/output"])
    lab.assert_clean()


def submit(fn: Callable[[], Any], screen: Watch, line: str = LINE) -> Run:
    """Run a function as a workflow."""
    request = flags.parse_line(line, flags.Defaults())
    osmo.check(request)
    call = as_value(fn)
    payload = pack_call(call, limit_bytes=1 << 30, labels={}, title="train()")
    return osmo.run(request, payload, screen)


def notices(watch: Watch) -> str:
    assert watch.last is not None
    return "\n".join(watch.last.notices)


@pytest.mark.quick
def test_a_run_on_osmo_is_a_run_as_any_other(service, tmp_path):
    """Progress, output, foreign lines, rank 0's result and files; the log breaks off, and nothing is seen twice."""

    def train():
        import torch
        import torch.distributed as dist

        import distmagic

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for step in range(5):
            distmagic.report(step=step + 1, total=5, loss=1 / (step + 1))
        total = torch.tensor([rank])
        dist.all_reduce(total)
        print(f"rank {rank} has {int(total)}")
        with open(f"model-{rank}.pt", "w") as file:
            file.write("weights")
        dist.destroy_process_group()
        return {"total": int(total), "bytes": bytes(range(256)) * 200}

    service.how(logs="short")
    (service.state / "output").mkdir()
    (service.state / "output" / "model.pt").write_text("kept")
    watch = Watch()
    more = "--setup 'echo set up {{host:x}}' --results s3://bucket/kept"
    run = submit(train, watch, f"{ONE_A_NODE} {more}")
    assert service.codes == [0, 0]
    assert run.state.phase == "done"
    assert {worker.step for worker in run.state.workers.values()} == {5}
    assert len(run.metrics) == 10
    assert run.results[0] == {"total": 1, "bytes": bytes(range(256)) * 200}
    printed = [line.text for line in run.state.lines]
    assert sorted(line for line in printed if line.startswith("rank ")) == [
        "rank 0 has 1",
        "rank 1 has 1",
    ]
    assert printed.count("set up {{host:x}}") == 2, "once of each task"
    with pytest.raises(NoResult, match="worker-1"):
        run.results[1]
    with pytest.raises(NoResult, match="worker-1") as caught:
        run.logs(1)
    assert "osmo workflow logs cell-1 -t worker-1" in caught.value.hint
    assert (tmp_path / "cell-1-results" / "model.pt").read_text() == "kept"
    assert "OSMO workflow cell-1 was submitted." in notices(watch)


def test_a_rank_that_fails_fails_the_run_with_its_traceback(service):
    def train():
        import os
        import time

        if os.environ["RANK"] == "3":
            raise ValueError("no good")
        time.sleep(100)

    with pytest.raises(
        WorkerFailed, match=r"rank 3 \(worker-1, local_rank 1\)"
    ) as caught:
        submit(train, Watch())
    assert "ValueError: no good" in caught.value.remote_traceback
    assert any(service.codes)
    assert caught.value.run.state.workers[0].phase == "stopped"


def test_a_script_runs_as_a_workflow(service, tmp_path):
    (tmp_path / "helper.py").write_text("WORD = 'helped'\n")
    (tmp_path / "train.py").write_text(
        "import os, sys, helper\n"
        "print(helper.WORD, sys.argv[1:], 'of', os.environ['WORLD_SIZE'])\n"
    )
    words = [*LINE.split(), "train.py", "two words"]
    command = [sys.executable, "-m", "distmagic.cli", "run", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("helped ['two words'] of 4") == 4, done.stdout

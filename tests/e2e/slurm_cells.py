"""Cells whose hosts are nodes of the lab's Slurm: what the scenes of several modules use. See conftest.py for `kernel`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import distmagic
from distmagic.errors import DistmagicError
from distmagic.request.allocation import SlurmRequest
from distmagic.session.session import Session
from distmagic.state.model import RunState
from tests import REPOSITORY
from tests.e2e import runner
from tests.e2e.runner import Watch
from tests.lab import HostProcess, LabHost, wait_until
from tests.lab.slurm import LOOK_S, SlurmLab

TWO = SlurmRequest(login="dm1", nodes=2, options=(("cpus-per-task", "4"),))
ONE = dataclasses.replace(TWO, nodes=1)
HELD = dataclasses.replace(TWO, options=(*TWO.options, ("gpus-per-node", "2")))


def run(slurm: SlurmLab, fn: Any, *args: Any, **options: Any) -> Any:
    """Run a function on the nodes of `allocation`, two where it isn't said."""
    way = options.pop("access", None) or runner.access(slurm.lab)
    request = options.pop("allocation", TWO)
    screen = options.pop("screen", None) or Watch()
    return distmagic.run(
        fn, *args, allocation=request, access=way, screen=screen, **options
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A kernel with an allocation that many tests share, where torch stays loaded between runs."""

    slurm: SlurmLab
    kernel: Session

    def run(self, fn: Any, *args: Any, **options: Any) -> Any:
        """Run a function there, a rank on each node where nothing else is said."""
        way = runner.access(self.slurm.lab, warm_idle_s=60.0)
        usual = {"access": way, "allocation": HELD, "nproc_per_node": 1}
        return run(self.slurm, fn, *args, **{**usual, **options})


def failure(slurm: SlurmLab, fn: Any, *args: Any, **options: Any) -> DistmagicError:
    """Run a function that must fail, and return the error."""
    try:
        run(slurm, fn, *args, **options)
    except DistmagicError as error:
        return error
    raise AssertionError("the run did not fail")


def submit(slurm: SlurmLab, *options: str) -> str:
    """Submit a job of somebody else that sleeps; return its number."""
    argv = ["sbatch", "--parsable", "-N2", *options]
    return slurm.command(*argv, "-o", "/dev/null", "--wrap", "exec sleep 600").strip()


def state_of(slurm: SlurmLab, job: str) -> str:
    """Return the state of a job, also of one that has ended."""
    return slurm.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()


def end_of(slurm: SlurmLab, job: str, within_s: float = 150.0) -> str:
    """Wait for a job to end, and return its exit code. `sbatch --wait` looks only now and then."""

    def fields() -> dict[str, str]:
        words = slurm.command("scontrol", "--oneliner", "show", "job", job).split()
        found = dict(word.split("=", 1) for word in words if "=" in word)
        is_over = found["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")
        return found if is_over else {}

    found = wait_until(fields, f"job {job} to end", within_s, every_s=LOOK_S)
    return found["ExitCode"].partition(":")[0]


def fill(slurm: SlurmLab) -> str:
    """Give all nodes to somebody else; return the number of his job."""
    job = submit(slurm, "--exclusive")
    wait_until_it_runs(slurm, job)
    return job


def wait_until_it_runs(slurm: SlurmLab, job: str) -> None:
    """Wait for the start of a job."""
    wait_until(
        lambda: state_of(slurm, job) == "RUNNING", "the job to run", every_s=LOOK_S
    )


class Noticing(Watch):
    """Keeps all notices, and calls `act` once when one of them has these words."""

    def __init__(self, words: str, act: Callable[[], object]) -> None:
        super().__init__()
        self._words, self._does = words, act
        self.notices: list[str] = []
        self.noticed = ""

    def show(self, state: RunState) -> None:
        """Look for the words."""
        super().show(state)
        self.notices += [one for one in state.notices if one not in self.notices]
        for notice in state.notices:
            if self._words in notice and not self.noticed:
                self.noticed = notice
                self._does()


def interrupt() -> None:
    """What a user's Ctrl-C is."""
    raise KeyboardInterrupt


def ours(host: LabHost, role: str, name: str = "") -> list[HostProcess]:
    """Return the processes of a host that are keepers or ushers ("distmagic-usher"), or an srun of one, by `name`."""
    found = [one for one in host.processes() if f"distmagic-{role}" in one.cmdline]
    return [one for one in found if not name or one.name == name]


def kill(host: LabHost, processes: Iterable[HostProcess]) -> None:
    """Kill processes of a host; one that ends with another one of them may be gone already."""
    done = host.exec(["kill", "-9", *(str(one.pid) for one in processes)])
    for line in done.stderr.splitlines():
        assert line.endswith("No such process"), line


_KERNEL = """
import json, sys, time
import distmagic
from distmagic.systems.slurm import submission
from distmagic.request.allocation import SlurmRequest
from distmagic.request.access import Access
from tests.e2e.runner import Watch, as_value
from tests.e2e.programs import count, wait_for

class Screen(Watch):
    def show(self, state):
        super().show(state)
        for notice in state.notices:
            print(notice, flush=True)
        if any(worker.step for worker in state.workers.values()):
            print("at work", flush=True)

asked = json.loads(sys.argv[1])
submission.FIRST_LEASE_S = asked["first_lease_s"]
way = Access(ssh_config=asked["ssh_config"], warm_idle_s=0.0, lease_s=asked["lease_s"])
request = SlurmRequest(login=asked["login"], nodes=asked["nodes"], job=asked["job"])
program = (as_value(count), asked["seconds"])
if asked["waits_for"]:
    program = (as_value(wait_for), asked["waits_for"])
found = distmagic.run(
    *program, allocation=request, access=way, screen=Screen(), detach=asked["detach"],
    node_lost_after_s=30.0,
)
print("over", found.job if asked["detach"] else dict(found.results), flush=True)
while asked["stays"]:
    time.sleep(1)
"""


def kernel_program(config: object, **asked: Any) -> list[str]:
    """Return the command of a kernel that counts on nodes, and stays; or waits for a file there.

    `asked` replaces what it asks for else.
    """
    usual = {
        "ssh_config": str(config), "login": "dm1", "nodes": 2, "job": "", "seconds": 0.5, "detach": False, "stays": True,
        "first_lease_s": 120.0, "lease_s": 4.0, "waits_for": "",
    }  # fmt: skip
    return [sys.executable, "-c", _KERNEL, json.dumps({**usual, **asked})]


@contextmanager
def kernel_of_its_own(slurm: SlurmLab, **asked: Any) -> Iterator[subprocess.Popen[str]]:
    """Start such a kernel on this machine, and wait for its end; where the block fails it is killed."""
    with subprocess.Popen(
        kernel_program(slurm.lab.ssh_config, **asked), stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:  # fmt: skip
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def say_until(process: subprocess.Popen[str], words: str) -> str:
    """Read what a kernel prints up to the line that has these words, and return that."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"it never said {words!r}")


@contextmanager
def replaced(host: LabHost, program: str, script: str) -> Iterator[None]:
    """Have a program of /usr/bin be a script on this host meanwhile; /run/real/PROGRAM is the true one."""
    place = f"""
        set -eu
        mkdir -p /run/real /run/false
        cp -p /usr/bin/{program} /run/real/{program}
        cat >/run/false/{program}
        chmod 755 /run/false/{program}
        mount -n --bind /run/false/{program} /usr/bin/{program}
    """
    text = f"#!/bin/sh\n{script}\n"
    host.exec(["sh", "-c", place], stdin=text).check_returncode()
    try:
        yield
    finally:
        host.exec(["umount", "-n", f"/usr/bin/{program}"]).check_returncode()

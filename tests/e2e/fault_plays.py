"""Faults that take more than a screen to bring about: in a kernel of their own, beside another job, after the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from distmagic.api import session
from distmagic.planning.jobs import Job
from distmagic.request.hosts import parse_hosts
from distmagic.state.model import RunState
from tests.e2e import faults, runner
from tests.e2e.faults import Act, Fault, Play, Told, Way
from tests.e2e.runner import as_value, reach
from tests.lab import Lab
from tests.lab.waiting import wait_until

# ---- in a kernel that can be killed


def main() -> None:
    """Be that kernel: say "up" when the ranks are at work, and at the end what was told."""
    config, way = sys.argv[1], Way(**json.loads(sys.argv[2]))
    screen = runner.Watch(
        lambda state: faults.training(state, 0.0), lambda: print("up", flush=True)
    )
    lab = SimpleNamespace(ssh_config=config)
    print(faults.told_of(lambda: faults.start(lab, way, screen)).to_json(), flush=True)


@contextmanager
def other_kernel(lab: Lab, way: Way) -> Iterator[subprocess.Popen[str]]:
    """Start the work from another process, which has said "up"."""
    words = json.dumps(
        {"numbers": way.numbers, "hosts": way.hosts, "options": dict(way.options)}
    )
    script = "from tests.e2e import fault_plays; fault_plays.main()"
    kernel = subprocess.Popen(
        [sys.executable, "-c", script, str(lab.ssh_config), words],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert kernel.stdout is not None
    try:
        assert kernel.stdout.readline() == "up\n"
        yield kernel
    finally:
        kernel.kill()
        kernel.communicate()


def kernel_killed(fault: Fault, lab: Lab) -> Told:
    """Kill the kernel; what is told stands in the list of jobs."""
    with other_kernel(lab, fault.way) as kernel:
        kernel.kill()
        faults.all_clean(lab)
    return Told(outcome=f"listed as {the_job(lab, fault).phase}")


def kernel_restarted(fault: Fault, lab: Lab) -> Told:
    """Kill the kernel and follow the job from here."""
    with other_kernel(lab, fault.way) as kernel:
        kernel.kill()
        hosts = parse_hosts(fault.way.hosts)
        return faults.told_of(
            lambda: session().attach(
                reach(lab, hosts), the_job(lab, fault), runner.Watch()
            )
        )


def kernel_asleep(until: Callable[[Lab], object]) -> Play:
    """Stop the kernel, as a laptop that is closed does, and let it go on when `until` holds."""

    def play(fault: Fault, lab: Lab) -> Told:
        with other_kernel(lab, fault.way) as kernel:
            kernel.send_signal(signal.SIGSTOP)
            wait_until(lambda: until(lab), "the moment to wake up")
            kernel.send_signal(signal.SIGCONT)
            return Told.from_json(kernel.communicate(timeout=120)[0].splitlines()[-1])

    return play


def the_job(lab: Lab, fault: Fault) -> Job:
    """Return the one job that the hosts know of."""
    (job,) = session().housekeeping.jobs(reach(lab, parse_hosts(fault.way.hosts)))
    return job


def has_counted_to(number: int) -> Callable[[Lab], bool]:
    """Hold when every log there is has this number."""

    def holds(lab: Lab) -> bool:
        logs = [
            file.read_text()
            for host in lab.hosts
            for file in host.home.glob(".distmagic/jobs/*/*/rank?.stdout.log")
        ]
        return bool(logs) and all(f"\n{number}\n" in log for log in logs)

    return holds


def is_clean(lab: Lab) -> bool:
    """Hold when nothing of ours is left on any host."""
    return not any(host.leftovers() for host in lab.hosts)


# ---- in this very kernel


def interrupt(_: Lab, __: RunState) -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def doze(seconds: float) -> Act:
    """Stand still for a while, as a laptop that is closed does: another process wakes this one."""

    def stand_still(_: Lab, __: RunState) -> None:
        script = 'kill -STOP "$1"; sleep "$2"; kill -CONT "$1"'
        subprocess.run(
            ["sh", "-c", script, "sh", str(os.getpid()), str(seconds)], check=True
        )

    return stand_still


# ---- beside another job


def beside_another_job(fault: Fault, lab: Lab) -> Told:
    """Run the same work a second time, undisturbed, on the same hosts; it must come to its end."""
    with ThreadPoolExecutor(1) as pool:
        calm = Way(numbers=3 * fault.way.numbers)  # of a rank 200 lines are kept
        other = pool.submit(
            faults.told_of, lambda: faults.start(lab, calm, runner.Watch())
        )
        told = faults.told_of(lambda: faults.start(lab, fault.way, runner.Watch()))
        assert not other.done()
        unharmed = other.result()
    assert unharmed.outcome == "done"
    faults.assert_read_once(lab, unharmed)
    return told


# ---- while hosts are reached, and when they have done all


def while_connecting(break_it: Callable[[Lab], object]) -> Play:
    """Break something when a host has let the notebook in, and has not done yet what it was asked for."""

    def play(fault: Fault, lab: Lab) -> Told:
        session().close()  # it must connect again
        is_in = lab.hosts[1].home / "is-in"
        (lab.hosts[1].home / ".bashrc").write_text(
            ": > ~/is-in; while [ -e ~/is-in ]; do sleep 0.1; done\n"
        )

        def wait_and_break() -> None:
            wait_until(is_in.exists, "the log-in")
            break_it(lab)

        with ThreadPoolExecutor(1) as pool:
            breaking = pool.submit(wait_and_break)
            told = faults.told_of(lambda: faults.start(lab, fault.way, runner.Watch()))
            breaking.result()
        is_in.unlink()
        return told

    return play


# ---- on a disk that is full for a while


def disk_full(fault: Fault, lab: Lab) -> Told:
    """Fill the disk of dm2 while its rank prints, and make room again: all is shown, though its log has not all of it."""
    told = faults.play(replace(fault, way=replace(fault.way, play=None)), lab)
    for one in told.ranks:
        assert one.lines == [str(i) for i in range(fault.way.numbers)]
    assert told.results == {"0": fault.way.numbers, "1": fault.way.numbers}
    return replace(told, outcome=told.outcome.replace(told.job, "JOB"), ranks=[])


def large() -> object:
    """Return what takes a while to bring back."""
    import torch

    return torch.zeros(40_000_000)


def while_fetching(
    break_it: Callable[[Lab], object], mend_it: Callable[[Lab], object]
) -> Play:
    """Break something while a large result comes back; mended, it comes all the same."""

    def play(fault: Fault, lab: Lab) -> Told:
        import distmagic

        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
            run = distmagic.run(
                as_value(large),
                hosts=fault.way.hosts,
                access=runner.access(lab),
                screen=runner.Watch(),
            )
            tempfile.tempdir, before = folder, tempfile.tempdir

            def wait_and_break() -> None:
                wait_until(
                    lambda: any(
                        file.stat().st_size for file in Path(folder).glob("*/*")
                    ),
                    "the first bytes",
                )
                break_it(lab)

            try:
                breaking = pool.submit(wait_and_break)
                try:
                    told = f"came, {run.results[1].numel():,} numbers"
                except distmagic.errors.DistmagicError as error:
                    told = f"{type(error).__name__}: {error.message}"
                breaking.result()
                mend_it(lab)
            finally:
                tempfile.tempdir = before
        return Told(outcome=told)

    return play

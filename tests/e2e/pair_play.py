"""Plays a pair on the lab: starts its job, lets it be struck, and brings back what its ranks returned."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distmagic
from distmagic.api import session
from distmagic.errors import RunError
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.planning.jobs import whereabouts
from distmagic.request.hosts import parse_hosts
from distmagic.state.model import RunState
from tests import REPOSITORY
from tests.e2e import faults, runner
from tests.e2e.gpus import give_gpus
from tests.e2e.pair_stage import HOLD, DoomedStage, Stage, open_gate
from tests.e2e.pairs import STEP_S, Pair, Strike
from tests.e2e.runner import as_value
from tests.lab import Lab

LEASE_S = 15.0
HANG_S = 60.0  # of an elastic job: longer than it takes to form anew, on a busy machine


def train(
    steps: int, token: str, step_s: float, result_bytes: int, *, together: bool,
    misdeeds: tuple[tuple[int, int, Callable[[], object]], ...], payload: bytes,
) -> dict[str, Any]:  # fmt: skip
    """Count up to `steps`; `together` with the other ranks, from the last snapshot on.

    `misdeeds` are (rank, step, what). At the end it waits, for a while, until nobody holds it (see `Stage`): a machine may
    be so busy that all is done before the notebook sees the moment of a strike. Returns the token of this run, how far it
    came, and what was summed.
    """
    import os
    import pathlib
    import time

    import distmagic

    rank, step, total = int(os.environ["RANK"]), 0, 0.0
    if together:
        import torch
        import torch.distributed as dist

        from distmagic import checkpoint

        dist.init_process_group("gloo")
        snapshot = checkpoint.load("snapshot.pt") or {"step": 0, "total": 0.0}
        step, total = snapshot["step"], snapshot["total"]
    while step < steps:
        print(step)
        step += 1
        if together:
            one = torch.ones(1)
            dist.all_reduce(one)
            total += float(one) / dist.get_world_size()
        distmagic.report(step=step, total=steps, value=step)
        for struck, at_step, misdeed in misdeeds:
            if (rank, step) == (struck, at_step):
                misdeed()
        if together:
            checkpoint.save({"step": step, "total": total}, "snapshot.pt", step=step)
        time.sleep(step_s)
    if together:
        dist.destroy_process_group()
    held, until_s = pathlib.Path.home() / "hold", time.monotonic() + 20.0
    while held.exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    return {
        "token": token,
        "rank": rank,
        "step": step,
        "total": total,
        "data": bytes(result_bytes),
    }


@dataclass(frozen=True, kw_only=True)
class Played:
    """What became of a pair. `run` is what is left of the job, also of one that failed; `error` what was raised.

    `results` are those that came; `seen` is the last state that was shown, `hits` the strikes that struck.
    """

    pair: Pair
    token: str
    hits: tuple[Strike, ...]
    seen: RunState | None
    run: Run | None = None
    error: BaseException | None = None
    results: Mapping[int, Any] = field(default_factory=dict)

    @property
    def is_void(self) -> bool:
        """Whether the kernel that started the job was killed before any host had something of it."""
        return self.run is None and self.error is None

    @property
    def outcome(self) -> str:
        """How it ended, in a line."""
        if self.is_void:
            return "there was nothing to follow"
        if self.error is None:
            return "done"
        return f"{type(self.error).__name__}: {str(getattr(self.error, 'message', self.error))[:300]}"


def play(pair: Pair, lab: Lab) -> Played:
    """Let the job of a pair run and be struck. What `pair` has broken on the hosts stays broken."""
    session().close()  # so that the moments of connecting come in every pair
    if pair.job.devices:
        for host in lab.hosts:
            give_gpus(host)
    # A small disk hides what is in the home, so it comes first.
    for strike in sorted(pair.strikes, key=lambda one: one.row.process != "disk"):
        strike.row.way.before(lab)
    if pair.strikes:
        for host in lab.hosts:
            (host.home / HOLD).touch()
    if pair.grows:
        faults.host_of(lab, pair.job.names[-1]).kill()
    token = f"{pair.seed}-struck"
    stage, run, error, results = Stage(lab, pair), None, None, {}
    try:
        with _started(pair, lab, token) as follow, stage:
            run = follow(stage)
            if run is not None:
                results = {rank: run.results[rank] for rank in run.results}
    except RunError as caught:
        run, error = caught.run if isinstance(caught.run, Run) else None, caught
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001 - promises.py judges it
        error = caught
    return Played(
        pair=pair,
        token=token,
        hits=tuple(stage.hits),
        seen=stage.last,
        run=run,
        error=error,
        results=results,
    )


@contextmanager
def _started(
    pair: Pair, lab: Lab, token: str
) -> Iterator[Callable[[Stage], Run | None]]:
    """Yield what brings the job to its end, shown on a stage. A job that is followed runs by then."""
    if pair.job.is_background:
        yield lambda stage: _wait_for(pair, lab, token, stage)
        return
    if pair.job.kind != "followed":
        yield lambda stage: launch(pair, lab, token, stage)
        return
    if pair.job.killed is None:
        launch(pair, lab, token, runner.Watch(), detach=True)
        session().close()
        yield lambda stage: _follow(pair, lab, stage)
        return
    script = "from tests.e2e import pair_play; pair_play.be_killed()"
    homes = [f"{host.name}={host.home}" for host in lab.hosts]
    argv = [sys.executable, "-c", script, str(lab.ssh_config), token, *homes]
    kernel = subprocess.run(
        argv, input=pickle.dumps(pair), cwd=REPOSITORY, check=False, timeout=120.0
    )
    may_end = any(strike.row.way.misdeed for strike in pair.strikes)
    assert kernel.returncode == -signal.SIGKILL or may_end, "the moment did not come"
    for host in lab.hosts:
        open_gate(host)
    yield lambda stage: _follow(pair, lab, stage)


def be_killed() -> None:
    """Be the kernel that starts the job of the pair on stdin, and is killed."""
    config, token, *homes = sys.argv[1:]
    pair = pickle.load(sys.stdin.buffer)
    hosts = [
        SimpleNamespace(name=name, home=Path(home))
        for name, _, home in (text.partition("=") for text in homes)
    ]
    lab = SimpleNamespace(ssh_config=config, hosts=hosts)
    with DoomedStage(lab, pair) as stage:
        launch(pair, lab, token, stage)


def launch(pair: Pair, lab: Any, token: str, screen: runner.Watch, **more: bool) -> Any:
    """Run the job of a pair to its end, unless it is to be detached, or to run in the background."""
    misdeeds = []
    for strike in pair.strikes:
        if strike.row.way.misdeed is not None:
            moment = strike.moment
            misdeeds.append(
                (moment.rank, moment.step, as_value(strike.row.way.misdeed))
            )
    options: dict[str, Any] = {"lease_s": LEASE_S, "node_lost_after_s": 20.0}
    if pair.job.kind == "elastic":
        # Members that hear the lead and not each other wait for ever, but for this limit.
        options |= {
            "nnodes": (1, 3),
            "max_restarts": 4,
            "node_lost_after_s": 4.0,
            "hang_timeout_s": HANG_S,
        }
    options |= pair.options
    if "timeout_s" in options:
        # It counts from the start, which takes longer than a row's few seconds where it is cold or the machine is busy.
        options["timeout_s"] = max(options["timeout_s"], 30.0)
    return distmagic.run(
        as_value(train),
        pair.steps,
        token,
        STEP_S,
        pair.result_bytes,
        kwargs={
            "together": pair.job.kind in ("together", "elastic"),
            "misdeeds": tuple(misdeeds),
            "payload": random.Random(pair.seed).randbytes(pair.job.payload_bytes),
        },
        hosts=pair.job.hosts_line,
        devices=pair.job.devices,
        access=runner.access(lab, warm_idle_s=900.0 if pair.job.is_warm else 0.0),
        screen=screen,
        **more,
        **options,
    )


def _wait_for(pair: Pair, lab: Lab, token: str, stage: Stage) -> Run:
    """Run the job in the background and wait for its end. Whoever presses Ctrl-C meanwhile has it stopped."""
    is_pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: is_pressed.set())
    try:
        run = launch(pair, lab, token, stage, background=True)
        while not run.wait_until_over(0.05):
            if is_pressed.is_set():
                is_pressed.clear()
                run.ask_to_stop()
                run.stop_waiting()
    finally:
        signal.signal(signal.SIGINT, before)
    left = run.wait()
    assert isinstance(left, Run)
    return left


def _follow(pair: Pair, lab: Lab, stage: Stage) -> Run | None:
    """Find the job and follow it to its end, as another kernel does; None if no host has anything of it."""
    hosts = parse_hosts(pair.job.hosts_line)
    jobs = session().housekeeping.jobs(runner.reach(lab, hosts))
    if not jobs:
        return None
    (job,) = jobs
    reaching = runner.reach(lab, whereabouts(job, hosts))
    found = session().attach(reaching, job, stage)
    # An interrupt ended the following, and not the job.
    while isinstance(found, Detached):
        reaching = runner.reach(lab, whereabouts(job, hosts))
        found = session().attach(reaching, job, stage)
    return found

"""Job "j" on fake hosts: launched by this notebook, or found there; and the user who interrupts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distmagic.connection.first_links import FirstLinks
from distmagic.payload import blobs
from distmagic.payload.pack import Payload
from distmagic.planning.jobs import Job, found_jobs
from distmagic.remote.wire import protocol as p
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import Followed, launch
from distmagic.state.model import RunState
from tests.builders.hosts import RESULT, FakeHost, reach, runs_to_its_end
from tests.builders.messages import START
from tests.builders.plans import WORK
from tests.builders.runs import FakeScreen
from tests.lab import wait_until


def two(
    begins: Callable[[p.StartNode], list[p.Message]] = runs_to_its_end,
) -> tuple[FakeHost, FakeHost]:
    """Return hosts whose nodes begin so."""
    return FakeHost("gpu-a", begins), FakeHost("gpu-b", begins)


def payload_in(folder: Path) -> Payload:
    """Return a payload of two small files in a folder."""
    return Payload(
        call=blobs.keep(b"the call", folder),
        code=blobs.keep(b"the code", folder),
        title="train(3)",
    )


def launched(
    tmp_path: Path, *hosts: FakeHost, spec: JobSpec | None = None, screen: FakeScreen | None = None,
    reaching: FirstLinks | None = None, payload: Payload | None = None,
) -> Followed:  # fmt: skip
    """Launch job "j" of the notebook "nb" on hosts, and follow it."""
    reaching = reaching or reach(*hosts)
    return launch(
        reaching,
        spec or JobSpec(),
        payload or payload_in(tmp_path),
        screen or FakeScreen(),
        "j",
        "nb",
        WORK,
    )


def listing(
    job: str, node_rank: int, hosts: Sequence[FakeHost], **more: object
) -> p.JobListing:
    """Return what a host lists of a job's node; it has begun, and runs unless `more` says otherwise."""
    terms = p.JobTerms(lease_s=60.0, min_nodes=len(hosts))
    found = {
        "began_s": 1.0,
        "terms": terms,
        "is_running": True,
        "protocol": p.PROTOCOL,
        **more,
    }
    return p.JobListing(
        job=job,
        node_rank=node_rank,
        hosts=tuple(one.host.name for one in hosts),
        **found,
    )


def begun(*hosts: FakeHost, **more: object) -> Job:
    """Have hosts run job "j", and return it as it is found there."""
    for node_rank, host in enumerate(hosts):
        host.listings = (listing("j", node_rank, hosts, **more),)
        start = replace(
            START,
            job="j",
            node_rank=node_rank,
            hosts=tuple(one.host.name for one in hosts),
        )
        host.results[f"rank{node_rank}.result"] = RESULT
        hello = p.Hello(
            protocol=p.PROTOCOL,
            job="j",
            node_rank=node_rank,
            hostname=host.host.name,
            pid=9,
        )
        host.agent_sends(hello, *host.begins(start))
    (job,) = found_jobs(
        [host.host.name for host in hosts], [host.listings for host in hosts]
    )
    return job


def has_ranks(state: RunState) -> bool:
    """Whether a run has got so far that its ranks run."""
    return state.phase == "running"


def killed_agent(host: FakeHost, error: str = "") -> FakeScreen:
    """Return a screen that kills a host's agent when its ranks run."""

    def look(state: RunState) -> None:
        if has_ranks(state):
            host.processes[0].put(p.AgentGone(error=error))

    return FakeScreen(look)


def assert_left(*hosts: FakeHost) -> None:
    """Assert that no link to these hosts stays open."""
    for host in hosts:
        wait_until(
            lambda host=host: host.is_left,
            f"the links to {host.host.name} to be closed",
        )


# ---- interrupts


def press() -> None:
    """Interrupt, as the notebook's stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


class PressingScreen(FakeScreen):
    """Interrupts once, when a state is shown that is wanted."""

    def __init__(self, wants: Callable[[RunState], object]) -> None:
        super().__init__(self.look)
        self.wants, self.has_pressed = wants, False

    def look(self, state: RunState) -> None:
        if not self.has_pressed and self.wants(state):
            self.has_pressed = True
            press()


class LatePressingScreen(FakeScreen):
    """Interrupts when the run is over."""

    def finish(self, state: RunState) -> None:
        super().finish(state)
        press()

    def can_type(self) -> bool:
        return False

    def requests(self) -> tuple[str, ...]:
        return ()

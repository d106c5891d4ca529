"""The journals of a real run, folded in many mixtures: all give the state that its user saw."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from distmagic.remote.records import journal
from distmagic.remote.wire import protocol
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from tests.builders.states import mixed, what_matters
from tests.e2e import runner

pytestmark = pytest.mark.needs("lab")


def chatter() -> int:
    """Print, report and draw bars on every rank."""
    import os
    import sys

    import distmagic

    rank = int(os.environ["RANK"])
    for step in distmagic.track(range(20), desc="épo"):
        distmagic.report(step=step, total=20, loss=1 / (step + 1))
        print(f"rank {rank} at {step}", end="\n" if step % 3 else "\r", flush=True)
        print("木" * rank, file=sys.stderr, flush=True)
    return rank


def test_journals_of_hosts_in_any_mixture(lab):
    run = runner.run(lab, "dm1:2,dm2:2", chatter)
    queues = []
    for node_rank, host in enumerate(lab.hosts[:2]):
        (folder,) = (host.home / ".distmagic" / "jobs" / run.job).glob(f"{node_rank}-*")
        lines = [journal.expand(line, folder) for _, line in journal.read(folder)]
        told = [protocol.decode(line)[1] for line in lines]
        assert isinstance(told[0], protocol.Hello)
        assert isinstance(told[-1], protocol.Final)
        queues.append(
            deque(
                Event(node_rank=node_rank, at_s=1.0, what=what)
                for what in (*told, Gone())
            )
        )
    hosts = [node.host for node in run.state.nodes]
    addresses = [node.address for node in run.state.nodes]
    # What only the launcher knows, and how busy a host was, stands in no journal.
    of_no_journal = {
        "sent_bytes": 0,
        "total_bytes": 0,
        "hardware": None,
        "gpu_peaks": (),
        "gpus_idle_s": 0.0,
        "looked_at_s": 0.0,
    }
    unsent = tuple(replace(node, **of_no_journal) for node in run.state.nodes)
    seen = what_matters(replace(run.state, nodes=unsent))
    for seed in range(20):
        state = fold(
            begin(run.job, hosts, addresses=addresses),
            mixed(random.Random(seed), *queues),
        )
        assert what_matters(state) == seen

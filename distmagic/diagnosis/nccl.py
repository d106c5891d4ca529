"""Finds processes that NCCL itself misses in a running job. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from distmagic.diagnosis.finding import NCCL, Finding, Subject

_PROCESS = re.compile(r"Process (\d+) on node ([^\s<]+)")
_MOST_LINES = 8


def findings(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Find missed processes in the reports of NCCL; all hosts of a job report the same."""
    hosts = {one.examined.route.address: one for one in subjects}
    known = set()
    for one in subjects:
        text = one.examined.nccl
        if not text or text in known:
            continue
        known.add(text)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        missed = _PROCESS.search(text)
        host = hosts.get(missed[2]) if missed else None
        evidence = f"NCCL reports of a running job: {'; '.join(lines[:_MOST_LINES])}."
        cure = "%distributed stacks shows where its ranks are."
        if missed and host:
            cure += (
                f" By hand: {host.by_hand} ps -o pid,stat,wchan:20,cmd -p {missed[1]}"
            )
        yield Finding("warning", (host or one).name, NCCL, evidence, cure)

"""A profile of the running ranks of a job: requested from every host, fetched, and merged into one
trace.
"""

from __future__ import annotations

import gzip
import json
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distmagic import sanitize
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests.job_requests import read
from distmagic.diagnosis.profile import Profile, longest, merged, waits
from distmagic.errors import NoResult, ProtocolError, UsageError
from distmagic.payload.sizes import plural
from distmagic.remote.wire import protocol

WAIT_S = 120.0
_LOOK_S = 0.2
_MOST_STEPS = 100
# Size limit of a compressed trace; uncompressed it may be eight times as large.
_TRACE_BYTES = 256 << 20
_FILE = re.compile(r"rank(\d{1,5})\.\d+\.[0-9a-f]+\.json\.gz")


def profile(
    links: Mapping[int, Link],
    hosts: Sequence[str],
    job: str,
    steps: int,
    timeout_s: float = WAIT_S,
) -> Profile:
    """Profile so many steps of all ranks, and write one trace of them to the current directory.

    `links` are conversations with the job's `hosts`, by node rank. Training continues. Raises
    `UsageError`, and `NoResult` if no rank makes that many optimizer steps in time.
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise UsageError(
            f"{steps} steps can't be profiled.", f"Use 1 to {_MOST_STEPS} steps."
        )
    name = secrets.token_hex(4)
    until_s = time.monotonic() + timeout_s

    of_node = partial(_of_node, job=job, name=name, steps=steps, until_s=until_s)
    traces: dict[int, Any] = {}
    host_of: dict[int, str] = {}
    notes = []
    for node_rank, (found, waiting) in zip(
        links, in_parallel(of_node, links.values(), links), strict=True
    ):
        if waiting:
            notes.append(
                f"{hosts[node_rank]}: {waiting} of its ranks did not make {plural(steps, 'step')} of an optimizer within {timeout_s:g} s."
            )
        for rank, trace in found.items():
            host_of[rank] = hosts[node_rank]
            if "error" in trace:
                notes.append(f"rank {rank} can't be profiled: {trace['error']}")
            else:
                traces[rank] = trace
    notes = [sanitize.line(note) for note in notes]
    if not traces:
        raise NoResult(
            "\n".join(["No rank was profiled.", *notes]),
            "A step is a call of an optimizer's step, in the main thread of a rank.",
        )
    path = Path(f"trace-{job}-{name}.json.gz")
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(merged(traces, host_of), file)
    return Profile(
        path=path,
        steps=steps,
        ops=longest(traces, steps),
        waits=waits(traces, steps),
        hosts=host_of,
        notes=tuple(notes),
    )


def _of_node(
    link: Link, node_rank: int, *, job: str, name: str, steps: int, until_s: float
) -> tuple[dict[int, Any], int]:
    """Return the traces of a node by rank, and the number of ranks without one."""
    request = protocol.ProfileRanks(
        job=job, node_rank=node_rank, profile=name, steps=steps
    )
    while True:
        found = link.query(request, protocol.Profiled)
        if not found.waiting or time.monotonic() > until_s:
            break
        time.sleep(_LOOK_S)
    traces = {}
    for file in found.files:
        data, _ = read(link, job, node_rank, file, _TRACE_BYTES)
        try:
            rank = int(_FILE.sub(r"\1", file))
            traces[rank] = _read(data)
        except (OSError, EOFError, ValueError) as error:
            raise ProtocolError(
                f"{link.host.name} sent a trace that can't be read: {error}."
            ) from None
    return traces, found.waiting


def _read(data: bytes) -> Any:
    text = zlib.decompressobj(31).decompress(data, 8 * _TRACE_BYTES)
    trace = json.loads(text)
    if "error" not in trace and not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it has no events")
    return trace

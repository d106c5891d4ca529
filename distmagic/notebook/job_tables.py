"""Tables of jobs, and of warm processes on hosts, as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distmagic import sanitize
from distmagic.planning.jobs import Job
from distmagic.remote.wire.protocol import Template
from distmagic.render.quantities import duration
from distmagic.render.table import aligned
from distmagic.request.hosts import Host
from distmagic.state.model import RunState

_CALL, _VALUES = 40, 40  # columns
# States whose names mean little to a user.
_STATES = {
    "gang": "no UDP between hosts",
    "lease": "lease ran out",
    "rendezvous": "hosts did not meet",
}


def table(jobs: Sequence[Job], own: str = "", waiting: Sequence[RunState] = ()) -> str:
    """Return the table of jobs, newest first, for the notebook with the owner name `own`.

    Runs of this notebook that are `waiting` for devices come first, and lines below the table
    explain what they wait for.
    """
    if not jobs and not waiting:
        return "no jobs on these hosts"
    rows = [
        ["job", "state", "hosts", "began", "took", "ranks", "call", "last values", "on disk", "owner"]
    ]  # fmt: skip
    for state in reversed(waiting):
        hosts = ", ".join(dict.fromkeys(node.host for node in state.nodes))
        call = _cut(state.terms.call, _CALL)
        rows.append(
            [state.job, "waiting", hosts, "", "", "", call, "", "", "this notebook"]
        )
    for job in sorted(jobs, key=lambda job: job.began_ago_s):
        hosts = ", ".join(dict.fromkeys(job.hosts))
        size = f"{job.size_bytes / 1e6:,.1f} MB"
        owner = "this notebook" if own and job.terms.owner == own else job.terms.owner
        values = [f"{name} {value:.4g}" for name, value in job.metrics.items()]
        row = [
            job.name,
            _STATES.get(job.phase, job.phase),
            hosts,
            f"{duration(job.began_ago_s)} ago",
            duration(job.age_s),
            str(job.terms.ranks or ""),
            _cut(job.terms.call, _CALL),
            _cut(", ".join(values), _VALUES),
            size,
            owner,
        ]
        rows.append(row)
    cleaned = [[sanitize.lines(text) for text in row] for row in rows]
    lines = [aligned(cleaned)]
    for state in waiting:
        for node in state.nodes:
            if node.waits_for:
                text = f"{state.job} waits on {node.host} for {node.waits_for}"
                lines.append(sanitize.line(text))
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def kept_table(hosts: Sequence[Host], kept: Sequence[Sequence[Template] | None]) -> str:
    """Return the table of warm processes; a host without any, or one that is down (None), has a
    line as well.
    """
    rows = [["host", "torch loaded", "memory", "last used"]]
    notes = []
    for host, templates in zip(hosts, kept, strict=True):
        if not templates:
            rows.append([host.name, "no answer" if templates is None else "no", "", ""])
        for one in templates or ():
            loaded, used = f"{duration(one.age_s)} ago", f"{duration(one.idle_s)} ago"
            rows.append([host.name, loaded, f"{one.size_bytes / 1e6:,.0f} MB", used])
            if one.packages:
                notes.append(f"{host.name} has also loaded {', '.join(one.packages)}")
            if one.refused:
                notes.append(f"{host.name} does not load {', '.join(one.refused)}")
    return sanitize.lines("\n".join([aligned(rows), *notes]))

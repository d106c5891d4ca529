"""The jobs of which this host has something: what was asked for stands in `job.json` beside the journal.

Found on the host's disk and in its process table, so that any kernel that reaches the host sees them. No variable of
a job's environment is written there: they may be secrets.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from distmagic.remote.records import journal, logs, places
from distmagic.remote.wire import protocol

FILE = "job.json"
_ENDS = (b'{"t":"final"', b'{"t":"engine_ended"')
_DETACHED = "detached"
_TAIL_BYTES = 1 << 16  # of a journal: its last events are in there


def remember(folder: Path, start: protocol.StartNode) -> None:
    """Write what is known of a job that is about to start. Raises OSError."""
    about = {
        "job": start.job,
        "node_rank": start.node_rank,
        "hosts": start.hosts,
        "lease_s": start.lease_s,
        "max_restarts": start.max_restarts,
        "hang_timeout_s": start.hang_timeout_s,
        "owner": start.owner,
        "min_nodes": start.membership.min_nodes if start.membership else 0,
        "max_nodes": start.membership.max_nodes if start.membership else 0,
        "awaited": start.recipe.awaited if start.recipe else (),
        "began_s": time.time(),
    }
    (folder / FILE).write_text(json.dumps(about))


def enlisted(folder: Path, hosts: tuple[str, ...]) -> None:
    """Note which hosts an elastic job has now. A disk that is full makes no job fail."""
    with contextlib.suppress(OSError, ValueError):
        about = {**json.loads((folder / FILE).read_text()), "hosts": hosts}
        aside = folder / f"{FILE}.new"
        aside.write_text(json.dumps(about))
        aside.replace(folder / FILE)


def mark_detached(folder: Path) -> None:
    """Note that a job needs no notebook any more. A disk that is full makes no job fail."""
    with contextlib.suppress(OSError):
        (folder / _DETACHED).touch(mode=0o600)


def jobs() -> tuple[protocol.JobListing, ...]:
    """Return this host's jobs, the oldest first. What can't be read is left out."""
    host = socket.gethostname()
    found = []
    for file in sorted((places.home() / "jobs").glob(f"*/*-{host}/{FILE}")):
        try:
            found.append(_listed(file.parent, json.loads(file.read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another contact removes it, or it was torn by a full disk
    return tuple(sorted(found, key=lambda one: one.began_s))


def _listed(folder: Path, about: dict[str, object]) -> protocol.JobListing:
    job, node_rank = str(about["job"]), int(str(about["node_rank"]))
    began_s, runs = float(str(about["began_s"])), is_running(job, node_rank)
    until_s = time.time() if runs else _written_s(folder)
    return protocol.JobListing(
        job=job, node_rank=node_rank, hosts=_names(about["hosts"]),
        lease_s=float(str(about["lease_s"])), max_restarts=int(str(about["max_restarts"])),
        began_s=began_s, is_running=runs, age_s=max(0.0, until_s - began_s), reason=_reason(folder),
        size_bytes=places.size_of(folder), owner=str(about.get("owner", "")),
        is_detached=(folder / _DETACHED).exists(), min_nodes=int(str(about.get("min_nodes", 0))),
        max_nodes=int(str(about.get("max_nodes", 0))), awaited=_names(about.get("awaited")),
        hang_timeout_s=float(str(hang_timeout_s)) if (hang_timeout_s := about.get("hang_timeout_s")) else None,
    )  # fmt: skip


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _written_s(folder: Path) -> float:
    """Return when the job said its last word on this node, in seconds since 1970; 0 where that can't be seen."""
    try:
        return (folder / journal.FILE).stat().st_mtime
    except OSError:
        return 0.0


def running() -> tuple[protocol.JobListing, ...]:
    """Return the jobs that run on this host."""
    found = []
    for job, node_rank in places.live_runs():
        folder = places.job_dir(job, node_rank)
        try:
            found.append(_listed(folder, json.loads((folder / FILE).read_text())))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tuple(one for one in found if one.is_running)


def is_running(job: str, node_rank: int) -> bool:
    """Whether the agent of this node answers."""
    run_dir = places.run_dir(job, node_rank)
    try:
        places.check_run_dir(run_dir)
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(str(run_dir / "readers"))
    except OSError:
        return False
    return True


def _reason(folder: Path) -> str:
    """Return how the job ended on this node, "" if its journal has no end."""
    path = folder / journal.FILE
    lines = logs.lines(path, max(0, logs.end(path) - _TAIL_BYTES))
    events = [protocol.decode(line)[1] for line in lines if line.startswith(_ENDS)]
    if not events or not isinstance(events[-1], protocol.Final):
        return ""
    codes = [event.code for event in events if isinstance(event, protocol.EngineEnded)]
    return "failed" if events[-1].reason == "done" and any(codes) else events[-1].reason


def remove(job: str) -> int:
    """Remove what is left of a job that has ended; return the bytes. Raises OSError if it runs."""
    freed = 0
    for folder in _folders(job):
        node_rank = int(folder.name.partition("-")[0])
        if is_running(job, node_rank):
            raise OSError(f"job {job} still runs here; stop it first")
        freed += places.size_of(folder)
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    return freed


def _folders(job: str) -> Iterator[Path]:
    yield from list(places.job_dir(job, 0).parent.glob(f"*-{socket.gethostname()}"))

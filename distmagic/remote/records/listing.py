"""The jobs of which this host has something: what was asked for stands in `job.json` beside the journal.

Found on the host's disk and in its process table, so that any kernel that reaches the host sees them. No variable of
a job's environment is written there: they may be secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distmagic.remote.records import journal, logs, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.system import processes
from distmagic.remote.wire import codec, protocol

FILE = "job.json"
_ENDS = (b'{"t":"final"', b'{"t":"engine_ended"')
_PROGRESS = b'{"t":"progress"'
_MOST_METRICS = 4  # that are told of a job
_DETACHED = "detached"
_WORK_DIR = "work_dir"  # has the path at which the ranks of the node begin
_TAIL_BYTES = 1 << 16  # of a journal: its last events are in there
_FIRST_PROTOCOL = 1  # its job files had no number in them
_UNKNOWN_LEASE_S = 60.0  # of a job of another protocol, say
# At the end of an owner's name, see names.py.
_ONE_PROCESS = re.compile(r" \((process|kernel) [^()]*\)$")


def remember(folder: Path, start: protocol.StartNode) -> None:
    """Write what is known of a job that is about to start. Raises OSError."""
    listing = protocol.JobListing(
        protocol=protocol.PROTOCOL,
        job=start.job,
        node_rank=start.node_rank,
        hosts=start.hosts,
        began_s=time.time(),
        terms=start.terms,
    )
    _write(folder, listing)
    (folder / _WORK_DIR).write_bytes(os.fsencode(start.cwd))


def work_dir(job: str, node_rank: int) -> str:
    """Return the directory in which the ranks of a job's node began. Raises OSError."""
    try:
        return os.fsdecode((places.job_dir(job, node_rank) / _WORK_DIR).read_bytes())
    except FileNotFoundError:
        text = f"what job {job} kept on this host is gone"
        raise FileNotFoundError(text) from None


def _write(folder: Path, listing: protocol.JobListing) -> None:
    with atomic_write(folder / FILE) as file:
        file.write(json.dumps(codec.plain(listing)).encode())


def note_hosts(folder: Path, hosts: tuple[str, ...]) -> None:
    """Note which hosts an elastic job has now. A disk that is full makes no job fail."""
    with contextlib.suppress(OSError, ValueError):
        _write(folder, replace(_read(folder), hosts=hosts))


def _read(folder: Path) -> protocol.JobListing:
    """Return what the job file says. Raises OSError, and ValueError for a file that was not written whole.

    Of a job of another protocol only its name and its hosts can be known, and when it began.
    """
    about = json.loads((folder / FILE).read_text())
    number = (
        about.get("protocol", _FIRST_PROTOCOL)
        if isinstance(about, dict)
        else protocol.PROTOCOL
    )
    if number != protocol.PROTOCOL:
        about = {
            name: about.get(name) for name in ("job", "node_rank", "hosts", "began_s")
        }
        about = {**about, "protocol": number, "terms": {"lease_s": _UNKNOWN_LEASE_S}}
    return codec.from_plain(protocol.JobListing, about)


def kept_for(job: Path) -> str:
    """Return for whom a job's folder is kept: its owner, without what tells one process of a script from the next.

    "" where that is not known.
    """
    for file in places.matching(job, f"*/{FILE}"):
        with contextlib.suppress(OSError, ValueError):
            return _ONE_PROCESS.sub("", _read(file.parent).terms.owner)
    return ""


def check_protocol(job: str, node_rank: int) -> None:
    """Raise ValueError, in words, if the job's agent speaks another protocol than this code does."""
    try:
        number = _read(places.job_dir(job, node_rank)).protocol
    except (OSError, ValueError):
        return  # no job of this name is known here: the caller finds that out
    if number != protocol.PROTOCOL:
        raise ValueError(protocol.another_version(job, number))


def mark_detached(folder: Path) -> None:
    """Note that a job needs no notebook any more. A disk that is full makes no job fail."""
    with contextlib.suppress(OSError):
        (folder / _DETACHED).touch(mode=0o600)


def jobs(job: str = "") -> Iterator[protocol.JobListing]:
    """Yield this host's jobs, the oldest first, or its nodes of one job. What can't be read is left out.

    Each is looked at when its turn comes: a slow disk takes long for all of a thousand jobs.
    """
    folders = (
        [places.job_dir(job, 0).parent]
        if job
        else sorted((places.home() / "jobs").glob("*"))
    )
    files = [
        file
        for folder in folders
        for file in places.matching(folder, f"*-{socket.gethostname()}/{FILE}")
    ]
    begun = []
    for file in files:
        # Another contact removes it, or it was torn by a full disk.
        with contextlib.suppress(OSError, ValueError):
            begun.append((_read(file.parent), file.parent))
    for one, folder in sorted(begun, key=lambda pair: pair[0].began_s):
        with contextlib.suppress(OSError, ValueError):
            yield _now(one, folder)


def _now(begun: protocol.JobListing, folder: Path) -> protocol.JobListing:
    """Return how a job is now, of which `begun` is what its file says. Raises OSError and ValueError."""
    runs = is_running(begun.job, begun.node_rank)
    agent = agent_of(begun.job, begun.node_rank) if runs else None
    if agent is not None:
        age_s = began_ago_s = processes.age_s(agent)
    else:
        began_ago_s = time.time() - begun.began_s
        age_s = places.changed_s(folder / journal.FILE) - places.changed_s(
            folder / _WORK_DIR
        )
    chatter: list[bytes] = []
    with contextlib.suppress(FileNotFoundError):  # of a job that is about to begin
        chatter = _tail(folder / journal.CHATTER_FILE)
    return replace(
        begun,
        is_running=runs,
        is_detached=(folder / _DETACHED).exists(),
        reason=_reason(_tail(folder / journal.FILE)),
        reported=_reported(chatter),
        size_bytes=places.size_below(folder),
        age_s=max(0.0, age_s),
        began_ago_s=max(0.0, began_ago_s),
    )


def _tail(path: Path) -> list[bytes]:
    """Return the last lines of one of a journal's files."""
    return list(logs.lines(path, max(0, logs.end(path) - _TAIL_BYTES)))


def running() -> tuple[protocol.JobListing, ...]:
    """Return the jobs that run on this host."""
    found = []
    for job, node_rank in places.live_runs():
        with contextlib.suppress(OSError, ValueError):
            folder = places.job_dir(job, node_rank)
            found.append(_now(_read(folder), folder))
    return tuple(one for one in found if one.is_running)


def is_running(job: str, node_rank: int) -> bool:
    """Whether the agent of this node is there; one that is stopped, or has no time, is.

    So is one whose socket a cleaner of /tmp has removed, until it has ended: then it removes its socket itself.
    """
    run_dir = places.run_dir(job, node_rank)
    readers = run_dir / places.READERS
    try:
        places.check_run_dir(run_dir)
        if os.path.lexists(readers):
            return places.listens(readers)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    folder = places.job_dir(job, node_rank)
    return agent_of(job, node_rank) is not None and not _reason(
        _tail(folder / journal.FILE)
    )


def agent_of(job: str, node_rank: int) -> processes.ProcessInfo | None:
    """Return the agent of a node, as it or its journal says which process it is; None where that is gone."""
    noted = processes.noted(places.run_dir(job, node_rank) / places.PID)
    if noted is not None:
        return noted
    hello = journal.hello(places.job_dir(job, node_rank))
    process = processes.read(hello.pid) if hello is not None else None
    if process is None or not processes.is_marked(process, job):
        return None
    # Containers with one home and one hostname may number their processes alike: then it is this one's own agent.
    for folder in places.run_dirs(job):
        other = processes.noted(folder / places.PID)
        if other is not None and other.pid == process.pid:
            return None
    return process if processes.has_role(process, "agent") else None


def agents_of(job: str) -> tuple[processes.ProcessInfo, ...]:
    """Return the agents of all nodes that a job has on this host, as far as they or their journals say which they are."""
    kept = places.matching(places.job_dir(job, 0).parent, f"*-{socket.gethostname()}")
    found = [agent_of(job, int(one.name.partition("-")[0])) for one in kept]
    return tuple(agent for agent in found if agent is not None)


def _reported(lines: Sequence[bytes]) -> protocol.MetricRow | None:
    """Return what a rank has reported last, a few of its metrics; None where the journal says nothing of it lately."""
    for line in reversed(lines):
        if not line.startswith(_PROGRESS):
            continue
        with contextlib.suppress(ValueError):  # it is just being written
            _, progress = protocol.decode(line)
            for row in reversed(getattr(progress, "rows", ())):
                if row.metrics:
                    few = dict(list(row.metrics.items())[:_MOST_METRICS])
                    return protocol.MetricRow(at_s=row.at_s, step=row.step, metrics=few)
    return None


def _reason(lines: Sequence[bytes]) -> str:
    """Return how the job ended on this node, "" if its journal has no end."""
    events = [protocol.decode(line)[1] for line in lines if line.startswith(_ENDS)]
    if not events or not isinstance(events[-1], protocol.Final):
        return ""
    codes = [event.code for event in events if isinstance(event, protocol.EngineEnded)]
    return "failed" if events[-1].reason == "done" and any(codes) else events[-1].reason


def remove(job: str, owner: str = "") -> int:
    """Remove what is left of a job that has ended, or nothing if another `owner` began it; return the bytes.

    Raises OSError if it runs.
    """
    freed = 0
    kept = places.job_dir(job, 0).parent
    for folder in places.matching(kept, f"*-{socket.gethostname()}"):
        if owner and _owner(folder) != owner:
            continue
        node_rank = int(folder.name.partition("-")[0])
        if is_running(job, node_rank):
            raise OSError(f"job {job} still runs here; stop it first")
        freed += places.size_below(folder)
        with contextlib.suppress(
            FileNotFoundError
        ):  # another host of the same home removes it, too
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # the last folder of the job was in it
    return freed


def _owner(folder: Path) -> str:
    """Return who began the job of a node, "" where that can't be read."""
    try:
        return _read(folder).terms.owner
    except (OSError, ValueError):
        return ""

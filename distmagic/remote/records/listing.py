"""The jobs that have files or processes on this host; `job.json`, next to the journal, has the
request of each.

They are found on the host's disk and in its process table, so that any kernel that reaches the host
sees them. `job.json` contains no environment variable of a job, because these may be secrets.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from distmagic.remote.records import journal, logs, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.system import processes
from distmagic.remote.wire import codec, protocol

FILE = "job.json"
_ENDS = (b'{"t":"final"', b'{"t":"engine_ended"')
_PROGRESS = b'{"t":"progress"'
_MOST_METRICS = 4  # number of metrics sent for a job
_DETACHED = "detached"
_BEGAN = "began"  # the file with the host's ID and `up_s` when the job began
_WORK_DIR = "work_dir"  # the file with the path in which the ranks of the node start
_TAIL_BYTES = 1 << 16  # the end of a journal that contains its last events
_FIRST_PROTOCOL = 1  # its job files had no protocol number
_UNKNOWN_LEASE_S = 60.0  # for example, for a job of another protocol version
# At the end of an owner's name, see names.py.
_ONE_PROCESS = re.compile(r" \((process|kernel) [^()]*\)$")


def remember(folder: Path, start: protocol.StartNode) -> None:
    """Write the data of a job that is about to start. Raises OSError."""
    listing = protocol.JobListing(
        protocol=protocol.PROTOCOL,
        job=start.job,
        node_rank=start.node_rank,
        hosts=start.hosts,
        began_s=time.time(),
        terms=start.terms,
    )
    _write(folder, listing)
    (folder / _BEGAN).write_text(f"{places.host_id()} {processes.up_s()}")
    (folder / _WORK_DIR).write_bytes(os.fsencode(start.cwd))


def work_dir(job: str, node_rank: int) -> str:
    """Return the directory in which the ranks of a job's node started. Raises OSError."""
    try:
        return os.fsdecode((places.job_dir(job, node_rank) / _WORK_DIR).read_bytes())
    except FileNotFoundError:
        text = f"the files that job {job} kept on this host were removed"
        raise FileNotFoundError(text) from None


def _write(folder: Path, listing: protocol.JobListing) -> None:
    with atomic_write(folder / FILE) as file:
        file.write(json.dumps(codec.plain(listing)).encode())


def note_hosts(folder: Path, hosts: tuple[str, ...]) -> None:
    """Record the current hosts of an elastic job. A full disk does not fail the job."""
    with suppress(OSError, ValueError):
        _write(folder, replace(_read(folder), hosts=hosts))


def _read(folder: Path) -> protocol.JobListing:
    """Return the content of a job file. Raises OSError, and ValueError for an incomplete file.

    For a job of another protocol version, only its name, its hosts and its start are known.
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
    """Return the owner of a job's folder, as it counts for the limit of disk use; "" if unknown.

    All processes of a script count as one owner, and so do all kernels without a notebook path: the
    end of the name, ` (process ...)` or ` (kernel ...)`, is cut off (names.py).
    """
    for file in places.matching(job, f"*/{FILE}"):
        with suppress(OSError, ValueError):
            return _ONE_PROCESS.sub("", _read(file.parent).terms.owner)
    return ""


def check_protocol(job: str, node_rank: int) -> None:
    """Raise ValueError, with a message, if the job's agent uses another protocol version than this
    code.
    """
    try:
        number = _read(places.job_dir(job, node_rank)).protocol
    except (OSError, ValueError):
        return  # this host has no job of this name: the caller finds that out
    if number != protocol.PROTOCOL:
        raise ValueError(protocol.another_version(job, number))


def mark_detached(folder: Path) -> None:
    """Record that a job needs no notebook any more. A full disk does not fail the job."""
    with suppress(OSError):
        (folder / _DETACHED).touch(mode=0o600)


def jobs(job: str = "") -> Iterator[protocol.JobListing]:
    """Yield this host's jobs, oldest first, or its nodes of one job. Unreadable ones are left out.

    Each is read when its turn comes: a slow disk takes long for a thousand jobs.
    """
    name = places.job_dir(job, 0).parent.name if job else "*"
    pattern = f"{name}/*-{socket.gethostname()}/{FILE}"
    begun = []
    for file in places.matching(places.home() / "jobs", pattern):
        # Another contact is removing it, or a full disk has cut it.
        with suppress(OSError, ValueError):
            begun.append((_read(file.parent), file.parent))
    for one, folder in sorted(begun, key=lambda pair: pair[0].began_s):
        with suppress(OSError, ValueError):
            yield _now(one, folder)


def _now(begun: protocol.JobListing, folder: Path) -> protocol.JobListing:
    """Return the current state of a job whose file says `begun`. Raises OSError and ValueError."""
    runs = is_running(begun.job, begun.node_rank)
    agent = agent_of(begun.job, begun.node_rank) if runs else None
    if agent is not None:
        age_s = began_ago_s = processes.age_s(agent)
    else:
        age_s = places.changed_s(folder / journal.FILE) - places.changed_s(
            folder / _WORK_DIR
        )
        began_ago_s = _passed_s(folder) or max(age_s, time.time() - begun.began_s)
    chatter = []
    with suppress(FileNotFoundError):  # for a job that is about to start
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


def _passed_s(folder: Path) -> float:
    """Return how long ago a job began, by a clock that nobody can set; 0 if the host has restarted
    since.

    Raises OSError.
    """
    with suppress(FileNotFoundError, ValueError):  # of an earlier version, or torn
        host, up_s = (folder / _BEGAN).read_text().split()
        if host == places.host_id():
            return processes.up_s() - float(up_s)
    return 0.0


def _tail(path: Path) -> list[bytes]:
    """Return the last lines of one of a journal's files."""
    return list(logs.lines(path, max(0, logs.end(path) - _TAIL_BYTES)))


def running() -> tuple[protocol.JobListing, ...]:
    """Return the jobs that run on this host."""
    found = []
    for job, node_rank in places.live_runs():
        with suppress(OSError, ValueError):
            folder = places.job_dir(job, node_rank)
            found.append(_now(_read(folder), folder))
    return tuple(one for one in found if one.is_running)


def is_running(job: str, node_rank: int) -> bool:
    """Whether the agent of this node exists, even if it is stopped or busy.

    An agent whose socket a cleaner of /tmp has removed counts until it has ended: then it removes
    its folder itself.
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
    """Return the agent process of a node, recorded by itself or in its journal; None if it has
    ended.
    """
    noted = processes.noted(places.run_dir(job, node_rank) / places.PID)
    if noted is not None:
        return noted
    hello = journal.hello(places.job_dir(job, node_rank))
    process = processes.read(hello.pid) if hello is not None else None
    if process is None or not processes.is_marked(process, job):
        return None
    # Containers with the same home and hostname may use the same pids: then it is this host's own
    # agent.
    for folder in places.run_dirs(job):
        other = processes.noted(folder / places.PID)
        if other is not None and other.pid == process.pid:
            return None
    return process if processes.is_agent(process) else None


def agents_of(job: str) -> tuple[processes.ProcessInfo, ...]:
    """Return the agents of all nodes of a job on this host, as far as they or their journals have
    recorded them.
    """
    kept = places.matching(places.job_dir(job, 0).parent, f"*-{socket.gethostname()}")
    found = [agent_of(job, int(one.name.partition("-")[0])) for one in kept]
    return tuple(agent for agent in found if agent is not None)


def _reported(lines: Sequence[bytes]) -> protocol.MetricRow | None:
    """Return a few metrics that a rank reported last; None if the journal has none recently."""
    for line in reversed(lines):
        if not line.startswith(_PROGRESS):
            continue
        with suppress(ValueError):  # it is being written now
            _, progress = protocol.decode(line)
            points = getattr(progress, "points", {})
            few = {name: one[-1] for name, one in list(points.items())[:_MOST_METRICS]}
            if few:
                at_s, last, _ = next(iter(points.values()))[-3:]
                step = None if math.isnan(last) else last
                return protocol.MetricRow(at_s=at_s, step=step, metrics=few)
    return None


def _reason(lines: Sequence[bytes]) -> str:
    """Return how the job ended on this node, "" if its journal has no end."""
    events = [protocol.decode(line)[1] for line in lines if line.startswith(_ENDS)]
    if not events or not isinstance(events[-1], protocol.Final):
        return ""
    codes = [event.code for event in events if isinstance(event, protocol.EngineEnded)]
    return "failed" if events[-1].reason == "done" and any(codes) else events[-1].reason


def remove(job: str, owner: str = "") -> int:
    """Remove the files of a finished job, or nothing if another `owner` started it; return the
    bytes.

    Raises OSError if it still runs.
    """
    freed = 0
    kept = places.job_dir(job, 0).parent
    for folder in places.matching(kept, f"*-{socket.gethostname()}"):
        if owner and _owner(folder) != owner:
            continue
        node_rank = int(folder.name.partition("-")[0])
        if is_running(job, node_rank):
            raise OSError(
                f"job {job} still runs on this host; stop it first: %distributed stop {job}"
            )
        freed += places.size_below(folder)
        # Another host with the same home removes it, too.
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        with suppress(OSError):
            folder.parent.rmdir()  # the last folder of the job was in it
    return freed


def _owner(folder: Path) -> str:
    """Return the owner of a node's job, "" if unreadable."""
    try:
        return _read(folder).terms.owner
    except (OSError, ValueError):
        return ""

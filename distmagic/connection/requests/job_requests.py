"""Requests to hosts about one job: end it, read logs, files, stacks, small results and start
message, add a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from distmagic.connection.lease_keeper import send_quietly
from distmagic.connection.link import BOOT_TIMEOUT_S, Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests.log_order import by_time_of
from distmagic.errors import DistmagicError, PreflightError, ProtocolError, UsageError
from distmagic.planning.jobs import Job
from distmagic.remote.records import journal, places
from distmagic.remote.wire import protocol
from distmagic.state.explanation import Explanation
from distmagic.state.hangs import explain

A = TypeVar("A", protocol.LeadStart, protocol.NodeAdded)

# In addition to the grace time: an agent takes at most 10 s; the rest is for the job's events,
# which come first.
STOP_TIMEOUT_S = 60.0
LOG_LIMIT_BYTES = 1 << 30  # limit, because the whole text is held in memory
_STREAMS = ("stdout", "stderr")
# Size limit of a node's journal, which records the order in which streams were read.
_EVENTS_BYTES = 16 << 20
# Size limits for results of one rank, and of one node, that are sent at once.
_SMALL_BYTES, _SMALL_TOGETHER_BYTES = (
    1 << 20,
    64 << 20,
)
_MAX_RANKS = 4096  # limit of ranks of one node whose stacks are read


def stop(link: Link, job: str, node_rank: int, grace_s: float) -> None:
    """Stop a job on this node, and return when nothing of it is left.

    Raises `Unreachable` if that takes `STOP_TIMEOUT_S` longer than the grace time, and the errors
    of `Link.events`.
    """
    with link.bounded(grace_s + STOP_TIMEOUT_S, f"job {job} did not confirm its end"):
        link.attach(protocol.FollowJob(job=job, node_rank=node_rank))
        link.send(protocol.StopNode(grace_s=grace_s))
        for _ in link.events():
            continue


def sweep(link: Link, job: str, node_rank: int | None = None) -> protocol.Final:
    """End all processes of this node on its host, and of dead agents of this job; return those that
    survived.
    """
    request = protocol.SweepJob(job=job, node_rank=node_rank)
    return link.query(request, protocol.Final)


def fetch(
    link: Link,
    request: protocol.GetFile,
    write: Callable[[bytes], object],
    *,
    limit_bytes: int,
) -> protocol.Data:
    """Pass a file of a job to `write`, piece by piece; return its length.

    Raises `PreflightError` if the host has no such file. Raises `ProtocolError` without reading the
    file if it is larger than `limit_bytes`; the conversation can't continue then.
    """
    link.send(request)
    data = link.answer(protocol.Data)
    size = data.size_bytes
    if not 0 <= size <= limit_bytes:
        link.close()
        raise ProtocolError(
            f"{link.host.name}: {request.name} is {size:,} bytes long; at most {limit_bytes:,} are taken.",
            f"It is on that host, under ~/.distmagic/jobs/{request.job}.",
        )
    link.take(size, write)
    if request.name.endswith(".result"):
        taken = protocol.ResultTaken(
            job=request.job, node_rank=request.node_rank, name=request.name
        )
        send_quietly(link, taken)
    return data


def read(
    link: Link, job: str, node_rank: int, name: str, limit_bytes: int
) -> tuple[bytes, protocol.Data]:
    """Return the newest bytes of a file of a job, and the host's data about them.

    Raises as `fetch`.
    """
    data = bytearray()
    request = protocol.GetFile(
        job=job, node_rank=node_rank, name=name, most_bytes=limit_bytes
    )
    sent = fetch(link, request, data.extend, limit_bytes=limit_bytes)
    return bytes(data), sent


def has_logs(link: Link, job: str, node_rank: int, rank: int) -> bool:
    """Whether a rank has run on this node. None of its output is sent."""
    for stream in _STREAMS:
        with suppress(PreflightError):
            read(link, job, node_rank, journal.log_name(rank, stream), 0)
            return True
    return False


def newest_logs(
    link: Link,
    job: str,
    node_rank: int,
    rank: int,
    most_bytes: int,
    *,
    by_time: bool = False,
) -> str:
    """Return the newest output of a rank on this node, at most `most_bytes` of each stream.

    stdout comes before stderr, or with `by_time` lines are in the order in which the host read
    them. A line of text replaces left-out lines: it names their size, and where the whole output
    is. Nothing more is sent.
    """
    notes = dict.fromkeys(_STREAMS, "")
    skipped = {}
    streams = {}
    for stream in _STREAMS:
        name = journal.log_name(rank, stream)
        try:
            newest, sent = read(link, job, node_rank, name, most_bytes)
        except PreflightError:
            continue
        if sent.skipped_bytes > 0:
            cut = newest.find(b"\n", 0, -1) + 1  # the incomplete first line
            newest = newest[cut:]
            where = f"on {link.host.name} under ~/.distmagic/jobs/{job}"
            if sent.skipped_bytes + sent.size_bytes <= LOG_LIMIT_BYTES:
                where = (
                    f"run.logs({rank}) after %distributed attach {job} run, or {where}"
                )
            skipped[stream] = sent.skipped_bytes + cut
            notes[stream] = (
                f"... {skipped[stream]:,} bytes of {stream} not shown; the whole log: {where}\n"
            )
        streams[stream] = newest
    if by_time and streams:
        events, _ = read(link, job, node_rank, journal.CHATTER_FILE, _EVENTS_BYTES)
        text = by_time_of(streams, skipped, events, rank)
        return "".join(notes.values()) + text.decode(errors="replace")
    parts = [
        notes[one] + data.decode(errors="replace") for one, data in streams.items()
    ]
    return "".join(parts)


def is_small(size_bytes: int | None) -> bool:
    """Whether a rank's result is sent at once; a larger one stays on its host until it is
    accessed.
    """
    return 0 < (size_bytes or 0) <= _SMALL_BYTES


def small_results(
    link: Link, job: str, node_rank: int, sizes: Mapping[int, int]
) -> dict[int, bytes]:
    """Return small results of a node's ranks as bytes; `sizes` by rank.

    If there are very many, only the first ones.
    """
    found: dict[int, bytes] = {}
    together = 0
    for rank, size in sizes.items():
        together += size
        if together > _SMALL_TOGETHER_BYTES:
            break  # the others are fetched when they are accessed
        found[rank], _ = read(link, job, node_rank, f"rank{rank}.result", size)
    return found


def stacks(
    link: Link, job: str, node_rank: int, request_id: str
) -> list[protocol.Stacks]:
    """Return the stack of each rank of a running job on this node; `request_id` must be unique.

    With very many ranks, only the first ones. Raises `ConnectionLost` and `Unreachable` if no
    answer comes.
    """
    link.attach(protocol.FollowJob(job=job, node_rank=node_rank, live=True))
    link.send(protocol.DumpStacks(request_id=request_id))
    found: list[protocol.Stacks] = []
    with link.bounded(BOOT_TIMEOUT_S):
        while len(found) < _MAX_RANKS:
            message = link.message()
            if isinstance(message, protocol.AgentGone | protocol.Refused):
                break  # it has just ended
            if getattr(message, "request_id", "") != request_id:
                continue
            if isinstance(message, protocol.StacksDone):
                break
            if isinstance(message, protocol.Stacks):
                found.append(message)
    return found


def get_start(link: Link, job: str) -> protocol.StartNode:
    """Return the message that started the first node of an elastic job; the link is to its host.

    Raises as `add_node`.
    """
    answer = _ask_lead(link, job, protocol.GetStart(), protocol.LeadStart)
    if isinstance(answer, protocol.Refused):
        raise UsageError(
            f"{link.host.name} has no record of how job {job} was started: {answer.error}."
        )
    start = answer.start
    if start.join_template is None or start.membership is None or start.job != job:
        raise UsageError(
            f"Job {job} is not elastic.",
            "Start it with --nnodes MIN:MAX --max-restarts N.",
        )
    names = (start.call, start.code, *start.side_files)
    sizes = start.join_template.sizes
    are_names = all(places.is_sha256(name) for name in names)
    if len(names) != len(sizes) or not are_names or min(sizes) < 0:
        raise ProtocolError(f"{link.host.name} announced a payload that can't exist.")
    return start


def add_node(link: Link, job: str, host: str, request_id: str) -> tuple[str, ...]:
    """Make the first host of an elastic job register a host as one more node; return the hosts of
    all its nodes.

    Raises `UsageError` if the job does not accept it, `ConnectionLost` and `Unreachable` if no
    answer comes.
    """
    request = protocol.AddNode(host=host, request_id=request_id)
    answer = _ask_lead(link, job, request, protocol.NodeAdded, request_id)
    if isinstance(answer, protocol.Refused):
        raise UsageError(f"{host} can't join job {job}: {answer.error}.")
    return answer.hosts


def _ask_lead(
    link: Link, job: str, request: protocol.Message, kind: type[A], request_id: str = ""
) -> A | protocol.Refused:
    link.attach(protocol.FollowJob(job=job, node_rank=0, live=True))
    link.send(request)
    with link.bounded(BOOT_TIMEOUT_S):
        while True:
            message = link.message()
            if isinstance(message, protocol.Refused):
                return message
            if isinstance(message, protocol.AgentGone):
                raise UsageError(f"Job {job} has ended.")
            if (
                isinstance(message, kind)
                and getattr(message, "request_id", request_id) == request_id
            ):
                return message


def explained(links: Mapping[int, Link], job: Job, request_id: str) -> Explanation:
    """Return where all ranks of a running job are; `links` are to those of its hosts that are up,
    by node rank.
    """

    def ask(node: int) -> list[protocol.Stacks] | None:
        if node not in links:
            return None
        try:
            return stacks(links[node], job.name, node, request_id)
        except DistmagicError:
            return None  # its connection broke, or it gave no answer in time

    answers = []
    unanswered = []
    for node, found in zip(job.running, in_parallel(ask, job.running), strict=True):
        host = job.hosts[node]
        if found is None:
            unanswered.append(host)
        else:
            answers += [(host, one) for one in found]
    return explain(answers, (*unanswered, *job.missing))

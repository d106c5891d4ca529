"""Parts of messages: what events, answers and requests are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.bounds import (
    Amount,
    AmountOrNone,
    Date,
    LeaseSeconds,
    Name,
    Names,
    Paragraph,
    Word,
    Words,
)
from distmagic.remote.wire.codec import Numbers


@frozen
class Bar:
    """One progress bar of a rank, from tqdm, rich or `track`.

    `id` is unique in the rank; `closed` bars are finished.
    """

    id: int
    desc: Word = ""
    n: Amount = 0.0
    total: AmountOrNone = None
    unit: Word = "it"
    rate: AmountOrNone = None
    postfix: Annotated[str, "line", 500] = ""
    closed: bool = False


@frozen
class MetricRow:
    """One call of `report` with metrics: seconds since the rank's start, the step if given, and the
    values.
    """

    at_s: Amount
    step: AmountOrNone = None
    metrics: dict[Word, float]


def points_of(rows: Iterable[MetricRow]) -> dict[str, Numbers]:
    """Return the points of each metric: seconds, step (NaN without one) and value, one after the
    other.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        step = math.nan if row.step is None else row.step
        for name, value in row.metrics.items():
            found.setdefault(name, []).extend((row.at_s, step, value))
    return {name: Numbers(points) for name, points in found.items()}


@frozen
class Failure:
    """An exception on a rank.

    `traceback` is ready to show: without distmagic's frames, and with the labels of cells.
    """

    type: Paragraph
    message: Annotated[str, "lines", 40_000]
    traceback: Annotated[str, "lines", 150_000]


@frozen
class GroupCalls:
    """A process group of a rank: its size, its number of calls by this rank, and the last one, such
    as all_reduce.

    Calls between single ranks, such as `send`, don't count.
    """

    name: Word
    size: int
    calls: int
    last: Word = ""


@frozen
class Exit:
    """The end of a rank's process, as torchrun saw it: `code` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int


@frozen
class JobTerms:
    """The settings of a job, decided once by the plan and equal on all of its nodes for the whole
    run.

    The plan, the start message of each node, the job file, the list of jobs and the notebook's
    state of a job contain this record. A new setting needs a field here, a flag that sets it, and
    the code that uses it.
    """

    # How long the job outlives a notebook that no longer renews its lease. With `goes_on_alone` it
    # then runs on.
    lease_s: LeaseSeconds
    owner: Name = ""  # who started the job, see names.py
    goes_on_alone: bool = False
    # Whether it must outlive the SSH session in which it was started.
    survives_logout: bool = False
    max_restarts: int = 0  # as in torchrun
    timeout_s: AmountOrNone = None  # the lead ends the job after this time
    # A notebook that follows the job ends it after this time without progress of any rank.
    hang_timeout_s: AmountOrNone = None
    grace_s: Amount = 30.0  # time for ranks that are asked to end
    min_nodes: int = 1  # the job needs so many nodes
    max_nodes: int = 0  # of an elastic job, 0 for any other
    # The hosts of an elastic job that were absent at its start.
    awaited: Names = ()
    call: Word = ""  # the code that every rank runs, as the user wrote it
    ranks: int = 0  # their number, 0 if the plan does not know it
    # The GPUs of each host that the user named.
    devices: Words = ()
    # Whether a user can type input for a rank; else the ranks' standard input is at end of file.
    can_type: bool = False
    # Whether its ranks wait for cells of a notebook.
    stays: bool = False
    # Such ranks outlive their notebook: the lead ends them after this time without a cell.
    ends_idle_s: AmountOrNone = None
    # Whether NCCL and torch write detailed logs, which a notebook does not show line by line.
    debug: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may join the job while it runs."""
        return self.max_nodes > 0

    @property
    def may_restart(self) -> bool:
        """Whether torchrun restarts failed ranks."""
        return self.max_restarts > 0


@frozen
class DeviceClaim:
    """A job that has a device of a host."""

    device: Word  # its name in this run's request
    job: Name  # "" if unknown
    # the owner of the job; only the user name for another user; "" if unknown
    owner: Name = ""
    since_s: Date = 0.0  # seconds since 1970 by the host's clock


@frozen
class Membership:
    """A node's settings for heartbeats: the job's `secret` in hex, the node's own address, the
    lead's address and port.

    `nodes`: the number of nodes at the start of the job. A node without heartbeats for
    `lost_after_s` is lost.
    """

    secret: str = field(repr=False)
    address: str
    lead_address: str
    port: int
    nodes: int
    lost_after_s: float


@frozen
class WorkDir:
    """The working directory of a run on a host, kept for the next run with the same name."""

    name: str
    # The user and the notebook or script that use it: another one with the same name gets another
    # directory. "" if the user has named the directory, which all runs with that name share.
    origin: str = ""
    manifest: str = ""  # the blob with the list of files to write, "" for none
    files: int = 0  # their number
    size_bytes: int = 0  # their total size
    inside: str = ""  # the subfolder in which ranks start, "" for the directory itself
    is_fresh: bool = False  # whether it is emptied first
    path: str = ""  # "" before the host has made it


@frozen
class JoinTemplate:
    """The settings that the lead of an elastic job keeps for nodes that join later, in addition to
    its own start message.
    """

    sizes: tuple[int, ...]  # bytes of the payload's blobs: call, code, side files
    # a number as text, gpu, cpu or auto; "" if the user set none
    nproc_per_node: str = ""
    cwd: str = ""  # "" if the user set none
    work: WorkDir | None = None  # for hosts other than the notebook machine


@frozen
class Frame:
    """One frame of a thread."""

    # a cell's label, or a module's path without the part that differs between hosts
    file: Word
    line: int
    function: Word
    mine: bool = False  # it is code of the user: a cell, a script or a module
    text: Word = ""  # its source line, if known


@frozen
class Thread:
    """The frames of one thread, innermost last."""

    frames: tuple[Frame, ...] = ()


@frozen
class CallRecord:
    """A collective call of a rank: its number in its group, and the shapes of its tensors, as in
    `[4], [2, 3]`.
    """

    number: int
    name: Word
    sizes: Word = ""
    is_over: bool = False
    # the user's frame that made the call; () if it was not recorded
    frames: tuple[Frame, ...] = ()


@frozen
class GroupRecord:
    """The last calls of a rank in a process group, in order."""

    name: Word = ""  # "" if the group has no name of its own
    ranks: Word = ""  # "" if all ranks are in it
    backend: Word = ""  # each backend of a group counts its own calls
    waits_s: Amount = 0.0  # the age of the first unfinished call
    calls: tuple[CallRecord, ...] = ()


@frozen
class Blob:
    """A content-addressed file: SHA-256 in hex, and its size."""

    sha256: str
    size_bytes: int


@frozen
class PlacedFile:
    """A file made from a blob: its `path` below a folder, percent-encoded, its permissions, as
    `chmod` takes them, and its last change in nanoseconds since 1970, None for now.
    """

    path: str
    blob: Blob
    mode: int = 0o644
    changed_ns: int | None = None


@frozen
class Secret:
    """A certificate and its private key, both PEM: a process that has them may take part in one
    delivery.
    """

    certificate: str
    key: str = field(repr=False)


@frozen
class JobListing:
    """One node of a job in its host's list of jobs.

    The job file contains a listing with the values at the start.
    """

    protocol: int  # the protocol version of its agent
    job: Name
    node_rank: int
    # The job's hosts as the user named them, by node rank.
    hosts: Names
    began_s: Date  # seconds since 1970 by the host's clock
    terms: JobTerms
    is_running: bool = False
    is_detached: bool = False  # whether it runs without a notebook
    # How it ended on this node, "" while it runs or if its agent was killed.
    reason: Paragraph = ""
    size_bytes: int = 0
    age_s: Amount = 0.0  # how long it has run
    began_ago_s: Amount = 0.0
    # A few metrics that a rank of the node reported last.
    reported: MetricRow | None = None


@frozen
class KeptWorkDir:
    """A working directory on a host, or, with its whole path, a file or folder copied by
    `PlaceFiles`.
    """

    name: Name
    origin: Name
    size_bytes: int
    age_s: Amount  # how long it was unused
    is_used: bool  # a running job uses it
    owners: Names = ()  # the owners of the jobs that have used it


@frozen
class Folder:
    """A folder on a host: the working directory of a job's node, or the folder `path` if `job` is
    "".

    A `path` is relative to the home directory, unless it starts with a slash.
    """

    job: str = ""
    node_rank: int = 0
    path: str = ""


@frozen
class FoundFile:
    """A file in a folder: its relative path, its size, its last change in seconds since 1970, and
    its permissions.

    In messages the path is percent-encoded, see `file_names`.
    """

    path: Annotated[str, "line", 3 * 4096]
    size_bytes: int
    changed_s: Date
    mode: int = 0o644


@frozen
class Gpu:
    """The load of a GPU: `utilization` is 0 to 1. None means unknown."""

    utilization: AmountOrNone = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    celsius: AmountOrNone = None


@frozen
class GpuHealth:
    """NVML's data about a GPU that matter before a run.

    A GPU that MIG divides has no memory of its own: each part is isolated from the others.
    """

    model: Word
    used_bytes: int = 0
    total_bytes: int = 0
    holders: Words = ()  # processes that use its memory
    ecc_errors: int = 0  # uncorrected errors since the driver was loaded
    slowed_by: Word = ""  # why it runs slower than it could, "" for nothing


@frozen
class HostDoor:
    """A port at which a host listens for a moment, and the secret that a visitor must have."""

    address: Word
    port: int
    secret: Word = field(repr=False)


@frozen
class Template:
    """A process that keeps torch loaded: its age, how long it was unused, and its memory (with its
    share of shared pages).

    `packages` are the other packages that it has loaded; `refused` those that can't be loaded, with
    the reasons.
    """

    pid: int
    age_s: Amount
    idle_s: Amount
    size_bytes: int = 0
    packages: Words = ()
    refused: tuple[Annotated[str, "line", 400], ...] = ()

"""Parts of messages: what events, answers and requests are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from distmagic.remote.wire.bounds import (
    Amount,
    AmountOrNone,
    Date,
    LeaseSeconds,
    Name,
    Paragraph,
    Word,
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One progress bar of a rank, of tqdm or of `track`. `id` is unique in the rank; `closed` bars are finished."""

    id: int
    desc: Word = ""
    n: Amount = 0.0
    total: AmountOrNone = None
    unit: Word = "it"
    rate: AmountOrNone = None
    postfix: Annotated[str, "line", 500] = ""
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One call of `report` with metrics: seconds since the rank started, the step if told, and the values."""

    at_s: Amount
    step: AmountOrNone = None
    metrics: dict[Word, float]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception on a rank. `traceback` is ready to show: our own frames are gone, cells carry their number."""

    type: Paragraph
    message: Annotated[str, "lines", 40_000]
    traceback: Annotated[str, "lines", 150_000]


@dataclass(frozen=True, kw_only=True)
class GroupCalls:
    """A process group of a rank: its size, how many calls the rank has made in it, and the last one, such as all_reduce.

    Calls that ranks make alone, as `send` is, don't count.
    """

    name: Word
    size: int
    calls: int
    last: Word = ""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How torchrun saw a rank's process end: `code` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """The terms on which a job runs: decided once, by the plan, and the same on all of its nodes for as long as it runs.

    The plan, the start message of each node, the job file, the list of jobs and what a notebook knows of a job carry
    this record whole: a new term is a field here, the flag that sets it and the place that goes by it.

    `lease_s`: how long the job outlives a notebook that no longer renews its lease; with `goes_on_alone` it then goes on
    without one. `owner` names who began the job (names.py). `survives_logout`: it must
    outlive the SSH session in which it was started. `max_restarts`, as torchrun has it. The lead ends the job
    after `timeout_s`. Ranks that are asked to end have `grace_s` for it. A notebook that follows the job ends it when no rank has advanced for `hang_timeout_s`. The
    job can go on with `min_nodes` nodes; an elastic job may have `max_nodes`, which is 0 for any other. `awaited` are
    the hosts of an elastic job that were not there when it began. `call` is what every rank runs, as the user wrote it, and
    `ranks` how many there are, 0 where the plan can't tell. `devices` are the GPUs of each host that were named for it.
    `can_type`: somebody follows the job who can type a line for a rank; else the standard input of ranks is at its end.
    Times are None where there is no such limit.
    """

    lease_s: LeaseSeconds
    owner: Name = ""
    goes_on_alone: bool = False
    survives_logout: bool = False
    max_restarts: int = 0
    timeout_s: AmountOrNone = None
    hang_timeout_s: AmountOrNone = None
    grace_s: Amount = 30.0
    min_nodes: int = 1
    max_nodes: int = 0
    awaited: tuple[Name, ...] = ()
    call: Word = ""
    ranks: int = 0
    devices: tuple[Word, ...] = ()
    can_type: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come to the job while it runs."""
        return self.max_nodes > 0


@dataclass(frozen=True, kw_only=True)
class DeviceClaim:
    """A job that has a device of a host.

    `device` is as this run has named it. `job` is "" where it is not known. `owner` is who began the job: of another
    user only the name, "" where nothing is known. `since_s`: seconds since 1970 by the host's clock.
    """

    device: Word
    job: Name
    owner: Name = ""
    since_s: Date = 0.0


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A node's place in the gang channel of its job: `secret` in hex, its own address, the lead's address and port.

    `nodes`: with how many nodes the job began. A node that is not heard for `lost_after_s` is lost.
    """

    secret: str = field(repr=False)
    address: str
    lead_address: str
    port: int
    nodes: int
    lost_after_s: float


@dataclass(frozen=True, kw_only=True)
class WorkDir:
    """The working directory of a run on a host, which is kept for the next run of this name.

    `origin` is the person and the notebook or script that use it: another one of the same name gets another directory. It
    is "" where the user has named the directory, for all runs that name it so. `manifest` is the blob that lists the files to be brought, "" for none: `files` of them, `size_bytes` long. Ranks begin in the
    folder `inside` of it, "" being the directory itself. `is_fresh`: it is emptied before. `path` is where it is, ""
    before the host has made it.
    """

    name: str
    origin: str = ""
    manifest: str = ""
    files: int = 0
    size_bytes: int = 0
    inside: str = ""
    is_fresh: bool = False
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class JoinTemplate:
    """What the lead of an elastic job keeps for nodes that come later, beside its own start message.

    `sizes` are the bytes of the payload's blobs in the order call, code, side files. `nproc_per_node` is a number as
    text, gpu, cpu, auto, or "" where the user named none. `cwd` is "" where the user named none. `work` is for those
    that are not the notebook's own machine.
    """

    sizes: tuple[int, ...]
    nproc_per_node: str = ""
    cwd: str = ""
    work: WorkDir | None = None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a thread. `file` is a cell's label, or a module's path without the part that hosts differ in.

    `mine`: it is the user's own code, of a cell, a script or a module of theirs. `text` is its line, where known.
    """

    file: Word
    line: int
    function: Word
    mine: bool = False
    text: Word = ""


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread's frames, the innermost last."""

    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """A collective call of a rank: its number in its group, and what it takes, as `[4], [2, 3]`."""

    number: int
    name: Word
    sizes: Word = ""
    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """The last calls of a rank in a process group, in order.

    `name` is "" where the group has none of its own, and `ranks` where all ranks are in it. Each `backend` of a group
    counts its own calls. `waits_s` is how old the first call is that is not over.
    """

    name: Word = ""
    ranks: Word = ""
    backend: Word = ""
    waits_s: Amount = 0.0
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A content-addressed file: SHA-256 in hex, and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlacedFile:
    """A file that a blob becomes: its `path` below a folder, percent-encoded."""

    path: str
    blob: Blob
    is_executable: bool = False


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A certificate and its private key, both PEM: who holds them may take part in one delivery."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class JobListing:
    """One node of a job, as its host knows it. `began_s` is seconds since 1970 by the host's clock.

    `protocol` is the number of the protocol that its agent speaks. `hosts` are the job's hosts as the user named them,
    in the order of node ranks. `reason` is how it ended on this node, "" while it runs or where its agent was killed.
    `is_detached`: it needs no notebook. `age_s`: how long it has run, or ran. `began_ago_s`: how long ago it began.
    `reported` is what a rank of the node has reported last, a few of its metrics. The job file holds one of these as it was at the beginning of the job.
    """

    protocol: int
    job: Name
    node_rank: int
    hosts: tuple[Name, ...]
    began_s: Date
    terms: JobTerms
    is_running: bool = False
    is_detached: bool = False
    reason: Paragraph = ""
    size_bytes: int = 0
    age_s: Amount = 0.0
    began_ago_s: Amount = 0.0
    reported: MetricRow | None = None


@dataclass(frozen=True, kw_only=True)
class KeptWorkDir:
    """A working directory that a host keeps, or by its whole path what `PlaceFiles` has brought. `age_s`: how long it has not been used. `is_used`: by a job that runs.

    `owners` are those who began the jobs that have used it.
    """

    name: Name
    origin: Name
    size_bytes: int
    age_s: Amount
    is_used: bool
    owners: tuple[Name, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder on a host: the working directory of a job's node, or the folder `path` where `job` is "".

    A `path` counts from the home, unless it begins with a slash.
    """

    job: str = ""
    node_rank: int = 0
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file in a folder: its path below that, and when it was changed, in seconds since 1970.

    On the wire the path is percent-encoded, see `file_names`.
    """

    path: Annotated[str, "line", 3 * 4096]
    size_bytes: int
    changed_s: Date


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """How busy a GPU is: `utilization` is 0 to 1. None is what nothing tells of."""

    utilization: AmountOrNone = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    celsius: AmountOrNone = None


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What NVML tells of a GPU that a run should know before it begins. `holders` are processes that keep memory there.

    `ecc_errors` were not corrected since the driver was loaded. `slowed_by` says why it runs slower than it could, "" for
    nothing.
    """

    model: Word
    used_bytes: int = 0
    total_bytes: int = 0
    holders: tuple[Word, ...] = ()
    ecc_errors: int = 0
    slowed_by: Word = ""


@dataclass(frozen=True, kw_only=True)
class HostDoor:
    """A port at which a host listens for a moment, and the secret that opens it."""

    address: Word
    port: int
    secret: Annotated[str, "line", 200] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A process that keeps torch loaded: how old it is, for how long unused, and its memory (shared pages in part).

    `packages` are those that it has loaded beside torch; `refused` those that can't be,
    and why.
    """

    pid: int
    age_s: Amount
    idle_s: Amount
    size_bytes: int = 0
    packages: tuple[Word, ...] = ()
    refused: tuple[Annotated[str, "line", 400], ...] = ()

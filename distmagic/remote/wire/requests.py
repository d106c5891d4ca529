"""What the notebook asks of a host."""

from __future__ import annotations

from dataclasses import dataclass, field

from distmagic.remote.wire.codec import request
from distmagic.remote.wire.parts import (
    Blob,
    Folder,
    HostDoor,
    JobTerms,
    JoinTemplate,
    Membership,
    PlacedFile,
    Secret,
    WorkDir,
)


@request
@dataclass(frozen=True, kw_only=True)
class GetRoute:
    """Ask for the `Route` to `peer`, an address; "" means the machine that opened this connection."""

    peer: str


@request
@dataclass(frozen=True, kw_only=True)
class GetFreePort:
    """Ask for a port of the host's own `address` that is free now; `FreePort` follows, or `Refused`."""

    address: str


@request
@dataclass(frozen=True, kw_only=True)
class Examine:
    """Ask what can be wrong with the host; `Examined` follows. `packages` are those whose versions are wanted.

    From then on it listens on these ports, 0 for any free one, at its own address on the way to `peer`, for hosts that have
    the `secret`.
    """

    packages: tuple[str, ...] = ()
    peer: str = ""
    ports: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)


@request
@dataclass(frozen=True, kw_only=True)
class Knock:
    """Ask whether this host can dial these doors of others; `Knocked` follows. Without any its own doors close."""

    doors: tuple[HostDoor, ...] = ()


@request
@dataclass(frozen=True, kw_only=True)
class ClaimDevices:
    """Get these devices of the host for a job; `DevicesClaimed` follows, or `Refused`. No devices: give all back.

    The agent that this conversation starts next keeps them as long as it lives.
    """

    job: str
    devices: tuple[str, ...] = ()


@request
@dataclass(frozen=True, kw_only=True)
class OfferBlobs:
    """Ask which of these blobs the host wants to be sent."""

    blobs: tuple[Blob, ...] = ()


@request
@dataclass(frozen=True, kw_only=True)
class CheckBlobs:
    """Ask which of these blobs the host lacks; `MissingBlobs` follows, and nothing is sent."""

    blobs: tuple[Blob, ...]


@request
@dataclass(frozen=True, kw_only=True)
class ServeBlobs:
    """Serve these blobs, in this order, to one other host that has the secret; `Serving` follows.

    `has_them`: the blobs are there. If not, `ReceiveBlobs` follows, and they are handed on while they arrive. `address`
    is the host's own, and the only one that it listens on.
    """

    blobs: tuple[Blob, ...]
    has_them: bool = False
    address: str
    secret: Secret


@request
@dataclass(frozen=True, kw_only=True)
class ReceiveBlobs:
    """Take these blobs, in this order, from the host that serves them at `address` and `port`; port 0: from the notebook.

    Any number of `ReceivedBytes` and `NeedBlob` follow, and in the end `MissingBlobs` without any.
    """

    blobs: tuple[Blob, ...]
    address: str = ""
    port: int = 0
    secret: Secret


@request
@dataclass(frozen=True, kw_only=True)
class TemplateRequest:
    """Have torch loaded by the time that a job with these variables starts, and keep it loaded for the next ones.

    `owner` is the notebook: its templates end when it hasn't renewed them for `lease_s`, or used one for `idle_s`.
    `env` and `defaults` are those of `StartNode` as far as they are known. `preload`: modules to load besides.
    """

    owner: str
    idle_s: float
    lease_s: float
    env: dict[str, str]
    defaults: dict[str, str]
    preload: tuple[str, ...] = ()


@request
@dataclass(frozen=True, kw_only=True)
class StartNode:
    """Start the agent of one node. `torchrun` are torchrun's flags; `call`, `code`, `side_files` are the payload's blobs.

    With `work` the host first makes that directory ready and answers `WorkDirReady`; ranks begin there where `cwd` is
    "". Without it they run on the notebook's own machine, where the files are. `env` replaces variables of the host's own environment, `defaults` only those that it lacks. `endpoint` is
    "address port" of the rendezvous, "" where there is only one node; `membership` is None then. Without `warm` all
    is started by exec. Only the lead of an elastic job has a `join_template`.
    """

    job: str
    node_rank: int
    torchrun: tuple[str, ...]
    env: dict[str, str]
    defaults: dict[str, str]
    cwd: str
    call: str
    code: str
    endpoint: str
    hosts: tuple[str, ...]
    lead: bool
    terms: JobTerms
    membership: Membership | None = None
    warm: TemplateRequest | None = None
    side_files: tuple[str, ...] = ()
    join_template: JoinTemplate | None = None
    work: WorkDir | None = None


@request
@dataclass(frozen=True, kw_only=True)
class FollowJob:
    """Send the job's events after number `after`, and go on live. `live`: only those that come from now on."""

    job: str
    node_rank: int
    after: int = 0
    live: bool = False


@request
@dataclass(frozen=True, kw_only=True)
class RenewLease:
    """Renew the lease: of the job while there is one, else of the templates."""


@request
@dataclass(frozen=True, kw_only=True)
class DetachJob:
    """Let the job live without a notebook. It is sent to the lead, which answers with the event `Detached`."""


@request
@dataclass(frozen=True, kw_only=True)
class StopNode:
    """End the job on this node: its ranks are asked to end, and killed after `grace_s`."""

    grace_s: float
    reason: str = "stopped"


@request
@dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Ask every rank of this node where it is: `Stacks` of each rank and `StacksDone` follow, with this `request_id`.

    `quietly`: only those ranks that have a thread which answers; none gets a signal.
    """

    request_id: str
    quietly: bool = False


@request
@dataclass(frozen=True, kw_only=True)
class RankInput:
    """Send a rank of this node the line that it waits for. No answer follows: `Resumed` shows that the rank read it.

    A rank that does not wait at this `prompt` gets nothing. `is_end` sends the end of its standard input instead. Only
    the text before the first newline is sent, at most 4 KiB.
    """

    rank: int
    prompt: int
    text: str = field(default="", repr=False)
    is_end: bool = False


@request
@dataclass(frozen=True, kw_only=True)
class GetStart:
    """Ask the lead of an elastic job for the message that started it; `LeadStart` or `Refused` follows."""


@request
@dataclass(frozen=True, kw_only=True)
class AddNode:
    """Ask the lead of an elastic job to count a host as a new node.

    `NodeAdded` with this `request_id` follows, or `Refused`.
    """

    host: str
    request_id: str


@request
@dataclass(frozen=True, kw_only=True)
class GetBlob:
    """Ask for a blob that this host has; `Data` and the bytes, or `Refused`, follow."""

    sha256: str


@request
@dataclass(frozen=True, kw_only=True)
class GetFile:
    """Ask for a file of a job (a log, a result) from byte `offset` on; `Data` and the bytes, or `Refused`, follow.

    With `most_bytes` for so many of them at most, which are the last ones of the file.
    """

    job: str
    node_rank: int
    name: str
    offset: int = 0
    most_bytes: int | None = None


@request
@dataclass(frozen=True, kw_only=True)
class ProfileRanks:
    """Ask the ranks of a node to profile their next steps, once for a `profile`; `Profiled` follows at once."""

    job: str
    node_rank: int
    profile: str
    steps: int


@request
@dataclass(frozen=True, kw_only=True)
class ResultTaken:
    """The notebook has all of a result of a job; no answer follows."""

    job: str
    node_rank: int
    name: str


@request
@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """End what is left of a node of this job, and what dead agents of its other nodes left running; `Final` follows.

    Without a `node_rank` no agent is ended that lives.
    """

    job: str
    node_rank: int | None = None


@request
@dataclass(frozen=True, kw_only=True)
class ListJobs:
    """Ask what the host has of jobs, or of one `job`: any number of `Jobs` follow, and one without any at the end."""

    job: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class RemoveJob:
    """Remove logs, results and journal of a job that has ended; `Removed` or `Refused` follows.

    With an `owner` only if this host knows that it was this one who began the job.
    """

    job: str
    owner: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class PruneBlobs:
    """Count the bytes of blobs, environments and setups that nobody uses; remove these if `removes`. `Removed` follows.

    With an `owner` of environments only those that nobody else has asked for, and no setups.
    """

    removes: bool = False
    owner: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class ListFiles:
    """Ask which files below a folder fit a pattern.

    Any number of `FoundFiles` follow, and one without any at the end.
    """

    folder: Folder
    pattern: str


@request
@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """Ask for a file below a folder; `path` is percent-encoded.

    The notebook has the first `size_bytes` of it, with this `sha256`: where they are still the same, only the rest is
    sent. `FileBegins`, any number of `Data` with their bytes, and `FileEnds` follow, or `Refused`.
    """

    folder: Folder
    path: str
    size_bytes: int = 0
    sha256: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class WriteFile:
    """Offer a file for a folder; `path` is percent-encoded, and its own folders are made.

    `FileBegins` says from which byte on the notebook is to send it. After the last byte comes `FileEnds`, or `Refused`.
    """

    folder: Folder
    path: str
    size_bytes: int
    sha256: str
    is_executable: bool = False


@request
@dataclass(frozen=True, kw_only=True)
class PlaceFiles:
    """Have these files in a folder; `MissingBlobs` follows, of files that are neither there nor here as blobs.

    The host keeps a list of them for `ListWorkDirs`; `origin` and `owner` are as for a working directory.
    """

    folder: Folder
    files: tuple[PlacedFile, ...]
    origin: str = ""
    owner: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class ListWorkDirs:
    """Ask for the working directories that this host keeps, and for what it was brought; `WorkDirs` follows."""


@request
@dataclass(frozen=True, kw_only=True)
class RemoveWorkDir:
    """Remove a working directory that no job uses, or what was brought; `Removed` or `Refused` follows."""

    name: str


@request
@dataclass(frozen=True, kw_only=True)
class SyncEnvironment:
    """Have a virtual environment with these packages, under this name.

    `requirements` are lines as pip reads them; in place of them `lock` may have the text of a lock file, by file name.
    `owner` is who asks for it.
    Any number of `EnvironmentProgress` follow, at least one a second, and then `EnvironmentReady` or `Refused`.
    """

    name: str
    requirements: tuple[str, ...] = field(default=(), repr=False)  # may hold secrets
    lock: dict[str, str] = field(default_factory=dict, repr=False)
    owner: str = ""


@request
@dataclass(frozen=True, kw_only=True)
class GetFacts:
    """Ask for `Facts` once more: with it a conversation that was kept open between runs begins anew."""


@request
@dataclass(frozen=True, kw_only=True)
class ListTemplates:
    """Ask for the `Templates` of a notebook."""

    owner: str


@request
@dataclass(frozen=True, kw_only=True)
class EndTemplates:
    """End the templates of a notebook; an empty `Templates` follows. Jobs that they started go on."""

    owner: str


@request
@dataclass(frozen=True, kw_only=True)
class ForkAgent:
    """Ask a template, on its host, for an agent with these variables; `AgentForked` follows."""

    start: StartNode
    env: dict[str, str]

"""Requests of the notebook to a host."""

from __future__ import annotations

from dataclasses import field

from distmagic.remote.frozen import frozen
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


@frozen
class _OfNode:
    """A request about a node of a job."""

    job: str
    node_rank: int


@frozen
class _OfBlobs:
    """A request about blobs, in this order."""

    blobs: tuple[Blob, ...]


@request
class GetRoute:
    """Asks for the `Route` to `peer`, an address; "" means the machine that opened this
    connection.
    """

    peer: str


@request
class GetFreePort:
    """Asks for a free port of the host's own `address`; `FreePort` follows, or `Refused`."""

    address: str


@request
class Examine:
    """Asks for the doctor's data about the host; `Examined` follows.

    From then on the host listens on some ports for hosts that have the `secret`.
    """

    packages: tuple[str, ...] = ()  # packages whose versions are wanted
    peer: str = ""  # the host listens at its own address on the route to this one
    ports: tuple[int, ...] = ()  # the ports to listen on; 0 means any free one
    secret: str = field(default="", repr=False)


@request
class Knock:
    """Asks whether this host can connect to these ports of other hosts; `Knocked` follows.

    Without ports to try, the host closes the ports that it has opened for other hosts.
    """

    doors: tuple[HostDoor, ...] = ()


@request
class ClaimDevices:
    """Reserves these devices of the host for a job; `DevicesClaimed` follows, or `Refused`.

    Empty: release all. The agent that this conversation starts next keeps them as long as it lives.
    """

    job: str
    devices: tuple[str, ...] = ()


@request
class OfferBlobs(_OfBlobs):
    """Asks which of these blobs the host lacks, in order to send them."""


@request
class CheckBlobs(_OfBlobs):
    """Asks which of these blobs the host lacks; `MissingBlobs` follows, and nothing is sent."""


@request
class ServeBlobs(_OfBlobs):
    """Asks the host to serve these blobs to one other host that has the secret; `Serving`
    follows.

    `has_them`: the host has the blobs. If not, `ReceiveBlobs` follows, and they are forwarded while
    they arrive. `address` is the host's own, and the only one on which it listens.
    """

    has_them: bool = False
    address: str
    secret: Secret


@request
class ReceiveBlobs(_OfBlobs):
    """Asks the host to receive these blobs from the host at `address` and `port`; port 0: from the
    notebook.

    Any number of `ReceivedBytes` and `NeedBlob` follow, and at the end an empty `MissingBlobs`.
    """

    address: str = ""
    port: int = 0
    secret: Secret


@request
class TemplateRequest:
    """Asks for a template: a process with torch loaded, kept for later jobs. It is sent before a
    job with these variables starts.
    """

    owner: str  # the notebook
    idle_s: float  # its templates end when it has used none for this time
    lease_s: float  # its templates end when it has not renewed them for this time
    env: dict[str, str]  # as in `StartNode`, as far as known
    defaults: dict[str, str]  # as in `StartNode`, as far as known
    preload: tuple[str, ...] = ()  # other modules to load


@request
class StartNode(_OfNode):
    """Starts the agent of one node.

    With `work` the host first prepares that directory and answers `WorkDirReady`.
    """

    torchrun: tuple[str, ...]  # torchrun's flags
    env: dict[str, str]  # variables that replace the host's own
    defaults: dict[str, str]  # variables that are only added if the host lacks them
    cwd: str  # "": ranks start in the directory of `work`
    call: str  # SHA-256 of the payload's blob, like `code` and `side_files`
    code: str
    endpoint: str  # "address port" of the rendezvous, "" for a single node
    hosts: tuple[str, ...]
    lead: bool
    terms: JobTerms
    # Settings for heartbeats, None for a single node.
    membership: Membership | None = None
    # The template to fork from; without it, everything is started by exec.
    warm: TemplateRequest | None = None
    side_files: tuple[str, ...] = ()
    join_template: JoinTemplate | None = None  # only for the lead of an elastic job
    work: WorkDir | None = None  # None on the notebook machine, which has the files


@request
class FollowJob(_OfNode):
    """Asks for the job's events after number `after`, including later ones.

    `live`: only events from now on.
    """

    after: int = 0
    live: bool = False


@request
class RenewLease:
    """Renews the lease: of the job if there is one, else of the templates."""


@request
class DetachJob:
    """Lets the job run without a notebook.

    It is sent to the lead, which answers with the event `Detached`.
    """


@request
class StopNode:
    """Ends the job on this node: its ranks are asked to end, and killed after `grace_s`."""

    grace_s: float
    reason: str = "stopped"


@request
class DumpStacks:
    """Asks every rank of this node for its stack: `Stacks` of each rank and `StacksDone` follow,
    with this `request_id`.

    `quietly`: only ranks that have an answering thread; none gets a signal.
    """

    request_id: str
    quietly: bool = False


@request
class RankInput:
    """Sends a rank of this node the line of input that it waits for.

    No answer follows: `Resumed` shows that the rank read it. A rank that does not wait at this
    `prompt` gets nothing. `is_end` sends the end of its standard input instead. Only the text
    before the first newline is sent, at most 4 KiB.
    """

    rank: int
    prompt: int
    text: str = field(default="", repr=False)
    is_end: bool = False


@request
class GetStart:
    """Asks the lead of an elastic job for the message that started it; `LeadStart` or `Refused`
    follows.
    """


@request
class AddNode:
    """Asks the lead of an elastic job to register a host as a new node.

    `NodeAdded` with this `request_id` follows, or `Refused`.
    """

    host: str
    request_id: str


@request
class GetBlob:
    """Asks for a blob; `Data` and the bytes, or `Refused`, follow."""

    sha256: str


@request
class GetFile(_OfNode):
    """Asks for a file of a job (a log, a result); `Data` and the bytes, or `Refused`, follow."""

    name: str
    offset: int = 0  # the first byte to send
    most_bytes: int | None = None  # limits the answer to the last bytes of the file
    begin: int = 0  # a position in a log, which counts bytes that are no longer kept
    end: int | None = None  # likewise; the answer is only of the part between both


@request
class ProfileRanks(_OfNode):
    """Asks the ranks of a node to profile their next steps, once for each `profile`; `Profiled`
    follows at once.
    """

    profile: str
    steps: int


@request
class ResultTaken(_OfNode):
    """Confirms that the notebook has received a whole result of a job; no answer follows."""

    name: str


@request
class SweepJob:
    """Ends what is left of a node of this job, and of dead agents of its other nodes; `Final`
    follows.

    Without a `node_rank`, no live agent is ended.
    """

    job: str
    node_rank: int | None = None


@request
class ListJobs:
    """Asks for the host's jobs, or one `job`: any number of `Jobs` follow, and an empty one at the
    end.
    """

    job: str = ""


@request
class RemoveJob:
    """Removes logs, results and journal of a finished job; `Removed` or `Refused` follows.

    With an `owner`, only if this host's records name it as the job's owner.
    """

    job: str
    owner: str = ""


@request
class PruneBlobs:
    """Counts the bytes of unused blobs, environments and setups; removes these if `removes`.

    `Removed` follows. With an `owner`, only environments that no other owner has requested, and no
    setups.
    """

    removes: bool = False
    owner: str = ""


@request
class ListFiles:
    """Asks for the files below a folder that match a pattern.

    Any number of `FoundFiles` follow, and an empty one at the end.
    """

    folder: Folder
    pattern: str


@request
class ReadFile:
    """Asks for a file below a folder.

    If its first bytes are unchanged, only the rest is sent. `FileBegins`, any number of `Data` with
    their bytes, and `FileEnds` follow, or `Refused`.
    """

    folder: Folder
    path: str  # percent-encoded
    size_bytes: int = 0  # the number of first bytes that the notebook has
    sha256: str = ""  # digest of these bytes


@request
class WriteFile:
    """Offers a file with its permissions for a folder; `path` is percent-encoded, and its parent
    folders are made.

    `FileBegins` has the byte from which the notebook must send it. After the last byte comes
    `FileEnds`, or `Refused`.
    """

    folder: Folder
    path: str
    size_bytes: int
    sha256: str
    mode: int = 0o644


@request
class CompareFiles:
    """Asks which files in a folder differ from these in size, last change or permissions, or do
    not exist; `DifferingFiles` follows.

    Each of `files` has the size in bytes, the last change in nanoseconds since 1970, the
    permissions and the percent-encoded path, separated by spaces: a line takes a twentieth of the
    time of a dataclass. If the host has a record of them by `PlaceFiles`, `owner` is added to it.
    """

    folder: Folder
    files: tuple[str, ...]
    owner: str = ""


@request
class PlaceFiles:
    """Puts these files into a folder; `MissingBlobs` follows, with files that neither exist nor are
    on the host as blobs.

    The host records them for `ListWorkDirs`; `origin` and `owner` are as for a working directory.
    """

    folder: Folder
    files: tuple[PlacedFile, ...]
    origin: str = ""
    owner: str = ""


@request
class ListWorkDirs:
    """Asks for the working directories on this host, and for files copied by `PlaceFiles`;
    `WorkDirs` follows.
    """


@request
class RemoveWorkDir:
    """Removes a working directory that no job uses, or files copied by `PlaceFiles`; `Removed` or
    `Refused` follows.
    """

    name: str


@request
class SyncEnvironment:
    """Asks for a virtual environment with these packages, under this name.

    Any number of `EnvironmentProgress` follow, at least one per second, and then `EnvironmentReady`
    or `Refused`.
    """

    name: str
    # lines for pip; they may hold secrets
    requirements: tuple[str, ...] = field(default=(), repr=False)
    # instead of these: the text of a lock file, by file name
    lock: dict[str, str] = field(default_factory=dict, repr=False)
    owner: str = ""  # the owner who requests it


@request
class GetFacts:
    """Asks for `Facts` again: a conversation that was idle between runs starts with it."""


@request
class ListTemplates:
    """Asks for the `Templates` of a notebook."""

    owner: str


@request
class EndTemplates:
    """Ends the templates of a notebook; an empty `Templates` follows.

    Jobs that they started run on.
    """

    owner: str


@request
class ForkAgent:
    """Asks a template, on its host, for an agent with these variables; `AgentForked` follows."""

    start: StartNode
    env: dict[str, str]

"""What the notebook and a host say to each other: JSON Lines, one frozen dataclass a type. Both halves use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the agent's journal;
everything else has n = 0. Unknown types and fields are ignored, so halves of different age understand each other
within one `PROTOCOL`. Binary (bundle, payload, results) follows a line that tells its size, never inside a line.
`tests/golden/wire.jsonl` freezes one line per type; wire.py writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire import MAX_LINE_BYTES, BadLine, Message, decode, encode, message

__all__ = ["MAX_LINE_BYTES", "BadLine", "Message", "decode", "encode"]  # and every message below

PROTOCOL = 1

# ---- parts of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One progress bar of a rank, of tqdm or of `track`. `id` is unique in the rank; `closed` bars are finished."""

    id: int
    desc: str = ""
    n: float = 0.0
    total: float | None = None
    unit: str = "it"
    rate: float | None = None
    postfix: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call of `report` with metrics: seconds since the rank started, the step if told, and the values."""

    at_s: float
    step: float | None = None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on a rank. `traceback` is ready to show: our own frames are gone, cells carry their number."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How torchrun saw a rank's process end: `code` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A content-addressed file: SHA-256 in hex, and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One node of a job, as its host knows it. `began_s` is seconds since 1970 by the host's clock.

    `hosts` are the job's hosts as the user named them, in the order of node ranks; `reason` is how it ended on this
    node, "" while it runs or where its agent ended without a word.
    """

    job: str
    node_rank: int
    hosts: tuple[str, ...]
    lease_s: float
    max_restarts: int
    began_s: float
    is_running: bool
    reason: str = ""
    size_bytes: int = 0


# ---- host to notebook: events of a job, in the journal


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The agent is up. Always the first event."""

    protocol: int
    job: str
    node_rank: int
    hostname: str
    pid: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """torchrun was started on this node, with this process id."""

    pid: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Whether this node can dial the rendezvous endpoint: "open" (the lead's own), "reached" or "unreached"."""

    state: str
    detail: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A rank's process is up and about to load the function."""

    rank: int
    local_rank: int
    world_size: int
    restart: int
    pid: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a rank reported since the last line: coalesced, at most about 10 lines a second and rank.

    `step`, `total`: the latest of `report`, None if never told. `rows`: metrics in order, thinned out when a rank
    reports faster than is useful. `bars`: those that changed.
    """

    rank: int
    restart: int
    at_s: float
    step: float | None = None
    total: float | None = None
    rows: tuple[Row, ...] = ()
    bars: tuple[Bar, ...] = ()
    device: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Text that a rank (or torchrun: rank -1) wrote. `offset` is its place, in bytes, in the log on the host.

    `skipped_bytes` in front of it are in the log but not sent, because they came too fast to be read by anybody.
    The journal keeps `size_bytes` in place of the text, which stands in the log already.
    """

    rank: int
    stream: str
    offset: int
    text: str = ""
    skipped_bytes: int = 0
    size_bytes: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank's end: "returned", "raised", "exited" (with `code`) or "signalled" (`code` is minus the signal)."""

    rank: int
    restart: int
    outcome: str
    code: int = 0
    failure: Failure | None = None
    result_bytes: int | None = None
    meaning: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Engineended:
    """torchrun ended on this node, and what it says of ranks that failed."""

    code: int
    exits: tuple[Exit, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a user should know that is no failure: "info" or "warning"."""

    level: str
    text: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The last event: nothing of the job runs on this node any more, but for `survivors` (pid and name, and why).

    `reason`: "done", "stopped", "lease" (nobody renewed it) or an error in words.
    """

    reason: str
    survivors: tuple[str, ...] = ()


# ---- host to notebook: answers, not in the journal


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a host is like, gathered in a moment without importing torch."""

    hostname: str
    system: str
    python: str
    executable: str
    torch: str | None
    gpus: int
    gpu_name: str
    cpus: int
    address: str
    interface: str
    free_port: int
    free_bytes: int
    tqdm: bool
    state_dir: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The address of this host, and its interface, from which the asked-for peer is dialled."""

    address: str
    interface: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The blobs of an offer that this host does not have."""

    sha256: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """`size_bytes` raw bytes follow this line."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The jobs of which this host has something, the oldest first."""

    jobs: tuple[Listed, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What a job had left is gone: so many bytes of it."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The agent of the job that was started or attached to is gone; requests are answered again.

    `error` is the last line it wrote to its own log, "" for none: an agent that ends well writes nothing there.
    """

    error: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request can't be met, in words that name the cause."""

    what: str
    error: str


# ---- notebook to host


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask for the `Route` to `peer`, an address; "" is: to whoever reached this host."""

    peer: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Ask which of these blobs the host wants to be sent."""

    blobs: tuple[Blob, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the agent of one node. `torchrun` are torchrun's flags, `call` and `code` the payload's blobs.

    `env` replaces variables of the host's own environment, `defaults` only those that it lacks. `endpoint` is
    "address port" of the rendezvous, "" where there is only one node.
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
    lease_s: float
    max_restarts: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Send the job's events after number `after`, and go on live."""

    job: str
    node_rank: int
    after: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Renew the job's lease."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the job on this node: SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    reason: str = "stopped"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Ask for a file of a job (a log, a result) from byte `offset` on; `Data` and the bytes, or `Refused`, follow."""

    job: str
    node_rank: int
    name: str
    offset: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """End what a dead agent of this job left running; `Final` follows."""

    job: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """Ask for `Jobs`."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Remove logs, results and journal of a job that has ended; `Removed` or `Refused` follows."""

    job: str

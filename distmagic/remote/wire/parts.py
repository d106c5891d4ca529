"""Parts of messages: what events, answers and requests are made of."""

from __future__ import annotations

from dataclasses import dataclass, field


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
class MetricRow:
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
class Membership:
    """A node's place in the gang channel of its job: `secret` in hex, its own address, the lead's address and port.

    `min_nodes`: how many nodes the job can go on with; `max_nodes`: how many an elastic one may have, 0 for any other.
    """

    secret: str = field(repr=False)
    address: str
    lead_address: str
    port: int
    nodes: int
    min_nodes: int
    lost_after_s: float
    max_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTemplate:
    """What the lead of an elastic job keeps for nodes that come later, beside its own orders.

    `sizes` are the bytes of the payload's blobs in the order call, code, volumes. `nproc_per_node` is a number as text,
    gpu, cpu, auto, or "" where nothing was said; so is `cwd`. `awaited`: hosts that were not there when the job began.
    """

    sizes: tuple[int, ...]
    nproc_per_node: str = ""
    cwd: str = ""
    awaited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a thread. `file` is a cell's label, or a module's path without the part that hosts differ in.

    `mine`: it is the user's own code, of a cell, a script or a module of theirs. `text` is its line, where known.
    """

    file: str
    line: int
    function: str
    mine: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread's frames, the innermost last."""

    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A content-addressed file: SHA-256 in hex, and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A certificate and its private key, both PEM: who holds them may take part in one delivery."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobListing:
    """One node of a job, as its host knows it. `began_s` is seconds since 1970 by the host's clock.

    `hosts` are the job's hosts as the user named them, in the order of node ranks; `reason` is how it ended on this
    node, "" while it runs or where its agent ended without a word. `owner` is the notebook that began it, "" where
    that has no name; `is_detached`: it needs no notebook. `min_nodes`: with so many it can go on, 0 for all; of an
    elastic one the lead tells `max_nodes`, 0 for any other, and the hosts that were not there at the beginning. Who
    follows it ends it when no rank advances for `hang_timeout_s`. `age_s`: how long it has run, or ran.
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
    owner: str = ""
    is_detached: bool = False
    min_nodes: int = 0
    max_nodes: int = 0
    awaited: tuple[str, ...] = ()
    hang_timeout_s: float | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A process that keeps torch loaded: how old it is, for how long unused, and its memory (shared pages in part)."""

    pid: int
    age_s: float
    idle_s: float
    size_bytes: int = 0

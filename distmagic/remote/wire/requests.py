"""What the notebook asks of a host."""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire.parts import Blob, Membership, Recipe, Secret
from distmagic.remote.wire.wire import message


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
class Check:
    """Ask which of these blobs the host lacks; `Want` follows, and nothing is sent."""

    blobs: tuple[Blob, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Serve these blobs, in this order, to one other host that has the secret; `Serving` follows.

    `has_them`: else the host will be told to `Take` them. `address` is its own, the only one that it is to listen on.
    """

    blobs: tuple[Blob, ...]
    has_them: bool = False
    address: str
    secret: Secret


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Take these blobs, in this order, from the host that serves them there; port 0: from the notebook.

    Any number of `Taken` and `Need` follow, and in the end `Want` without any.
    """

    blobs: tuple[Blob, ...]
    address: str = ""
    port: int = 0
    secret: Secret


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """Have torch loaded by the time that a job with these variables comes, and keep it for the next ones.

    `owner` is the notebook: its templates end when it hasn't renewed them for `lease_s`, or used one for `idle_s`.
    `env` and `defaults` are those of `Start` as far as they are known.
    """

    owner: str
    idle_s: float
    lease_s: float
    env: dict[str, str]
    defaults: dict[str, str]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the agent of one node. `torchrun` are torchrun's flags; `call`, `code`, `volumes` are the payload's blobs.

    `env` replaces variables of the host's own environment, `defaults` only those that it lacks. `endpoint` is
    "address port" of the rendezvous, "" where there is only one node; `membership` is None then. `keep`: when the lease
    runs out the job goes on. `owner` names the notebook. The lead ends the job after `timeout_s`;
    `hang_timeout_s` is for whoever follows it. `stays`: it must survive the end of the SSH session. Without `warm` all
    is started by exec. The lead of an elastic job has a `recipe`.
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
    membership: Membership | None = None
    keep: bool = False
    owner: str = ""
    timeout_s: float | None = None
    stays: bool = False
    warm: Warm | None = None
    volumes: tuple[str, ...] = ()
    hang_timeout_s: float | None = None
    recipe: Recipe | None = None


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Send the job's events after number `after`, and go on live. `live`: only those that come from now on."""

    job: str
    node_rank: int
    after: int = 0
    live: bool = False


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Renew the lease: of the job while there is one, else of the templates."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Let the job live without a notebook; said to the lead, which tells `Detached`."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the job on this node: SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    reason: str = "stopped"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Ask every rank of this node where it is; `Stacks` for each follow, and `Dumped`, with the same `asked`."""

    asked: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Ask the lead of an elastic job for its own orders; `Recalled` or `Refused` follows."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Enlist:
    """Ask the lead of an elastic job to count a host as a new node: an `Enlisted` with this `asked`, or `Refused`."""

    host: str
    asked: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """Ask for a blob that this host has; `Data` and the bytes, or `Refused`, follow."""

    sha256: str


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


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Tell the bytes of what was once sent here and nobody uses now; with `removes` it is gone. `Removed` follows."""

    removes: bool = False


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Ask for `Facts` once more: a conversation that was kept open begins anew."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Ask for the `Templates` of a notebook."""

    owner: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Cool:
    """End the templates of a notebook; `Templates` follows, with none. Their jobs go on."""

    owner: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Ask a template, on its host, for an agent with these variables; `Forked` follows."""

    start: Start
    env: dict[str, str]

"""Events of a job, from host to notebook: numbered from 1, in the journal before they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from distmagic.remote.wire.bounds import (
    Amount,
    AmountOrNone,
    Name,
    Paragraph,
    Size,
    Word,
)
from distmagic.remote.wire.codec import message
from distmagic.remote.wire.parts import (
    Bar,
    Exit,
    Failure,
    Gpu,
    GroupRecord,
    MetricRow,
    Thread,
)


@message
@dataclass(frozen=True, kw_only=True)
class Hello:
    """The agent is up. Always the first event."""

    protocol: int
    job: Name
    node_rank: int
    hostname: Name
    pid: int


@message
@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Whether this node can dial the rendezvous endpoint: "open" (the lead's own), "reached" or "unreached"."""

    state: Word
    detail: Paragraph = ""


@message
@dataclass(frozen=True, kw_only=True)
class Worker:
    """A rank's process is up and about to load the function.

    `round` counts how often the nodes have met before, where they may meet more than once: the ranks of a later round
    take the place of all earlier ones, on whatever node. `local_world_size`: the ranks of its node; 0 where it is not
    known, as from an agent of an earlier version.
    """

    rank: int
    local_rank: int
    world_size: int
    restart: int
    pid: int
    round: int = 0
    local_world_size: int = 0


@message
@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a rank reported since the last line: coalesced, at most about 10 lines a second and rank.

    `step`, `total`: the latest of `report`, None if there was none. `rows`: metrics in order, thinned out when a rank
    reports faster than is useful. `bars`: those that changed. `is_printed`: the metrics are numbers of lines that the rank
    has only printed.
    """

    rank: int
    restart: int
    at_s: Amount
    step: AmountOrNone = None
    total: AmountOrNone = None
    rows: tuple[MetricRow, ...] = ()
    bars: tuple[Bar, ...] = ()
    device: Word = ""
    is_printed: bool = False


@message
@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture that a rank shows: a PNG in base64. `step` is how far the rank was, None where it has not said."""

    rank: int
    restart: int
    data: Annotated[str, "line", 200_000]
    step: AmountOrNone = None


@message
@dataclass(frozen=True, kw_only=True)
class Output:
    """Text that a rank (or torchrun: rank -1) wrote. `offset` is its place, in bytes, in the log on the host.

    `skipped_bytes` in front of it are in the log but are not sent: nobody can read that fast.
    The journal keeps `size_bytes` in place of the text, which is in the log already. Where a full disk kept the text out
    of the log, the journal has the text.
    """

    rank: int
    stream: Word
    offset: int
    text: Annotated[str, "log", 1 << 18] = ""
    skipped_bytes: int = 0
    size_bytes: int = 0


@message
@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank's end: "returned", "raised", "exited" (with `code`) or "signalled" (`code` is minus the signal).

    Or "replaced": killed by its agent, because an elastic job forms anew. `group_use` says what it had to do with process
    groups: "none", "unused", "used", or "" where that is not known.
    """

    rank: int
    restart: int
    outcome: Word
    code: int = 0
    failure: Failure | None = None
    result_bytes: int | None = None
    meaning: Annotated[str, "lines", 40_000] = ""
    group_use: Word = ""


@message
@dataclass(frozen=True, kw_only=True)
class Paused:
    """A rank waits for somebody to type a line: at `line` of `file` its code called `input`, or a debugger does.

    `prompt` counts the lines that this process has waited for, and `asks` is what it has written to ask for this one.
    """

    rank: int
    restart: int
    prompt: int
    file: Word
    line: int
    asks: Word = ""


@message
@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A rank waits for the line of this `prompt` no longer."""

    rank: int
    restart: int
    prompt: int


@message
@dataclass(frozen=True, kw_only=True)
class EngineEnded:
    """torchrun ended on this node with exit code `code`; `exits` are the ranks that failed, as torchrun reports them."""

    code: int
    exits: tuple[Exit, ...] = ()


@message
@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something that a user should know and that is no failure."""

    text: Paragraph


@message
@dataclass(frozen=True, kw_only=True)
class PeerState:
    """How this node hears another one over the gang channel: "joined", "silent" (never heard), "lost" or "back"."""

    node_rank: int
    state: Word


@message
@dataclass(frozen=True, kw_only=True)
class NodeAdded:
    """A host is one more node of an elastic job, as the lead says: the last of `hosts`, which are those of all nodes.

    The notebook whose `AddNode` had this `request_id` starts that node.
    """

    request_id: Word
    hosts: tuple[Name, ...]


LEFT = "left"  # in place of a request


@message
@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Where a rank was when the request `request_id` came: its main thread first. Without threads, `silence` says why.

    `calls` are the collective calls that it has made, as far as torch has recorded them. With `LEFT` in place of the
    request it has left them because such a call has failed.
    """

    request_id: Word
    rank: int
    local_rank: int
    threads: tuple[Thread, ...] = ()
    silence: Paragraph = ""
    calls: tuple[GroupRecord, ...] = ()


@message
@dataclass(frozen=True, kw_only=True)
class NodeStopping:
    """From here on this node ends its ranks, for this `reason`. `culprit` is the node that caused it, -1 for none."""

    reason: Paragraph
    culprit: int = -1


@message
@dataclass(frozen=True, kw_only=True)
class Detached:
    """The job needs no notebook from here on. Only the lead sends it. `why`: "asked", or "disconnected" for too long."""

    why: Paragraph


@message
@dataclass(frozen=True, kw_only=True)
class Skipped:
    """In place of the events from its own number up to `through`: their host has not kept them.

    They were reports and lines of output, or came while the disk was full; the number after it is `through` + 1.
    """

    through: Size


@message
@dataclass(frozen=True, kw_only=True)
class StacksDone:
    """The stacks of all `ranks` ranks that run on this node have been sent, for the request `request_id`."""

    request_id: Word
    ranks: int


@message
@dataclass(frozen=True, kw_only=True)
class Final:
    """Nothing of the job runs on this node any more, but for `survivors` (name, pid and state).

    It is the last event of a node, but for the lead: that may still have news of other nodes.

    `reason`: "done", "stopped", "lease" (nobody renewed it) or an error in words.
    """

    reason: Paragraph
    survivors: tuple[Annotated[str, "line", 300], ...] = ()


@message
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """How busy a host is: memory in bytes, network in bytes a second, GPUs in the order in which ranks count them.

    None is what nothing tells of. It has no number: no journal has it, and a notebook that was away does not need it.
    """

    cpu_utilization: AmountOrNone = None
    used_bytes: int = 0
    total_bytes: int = 0
    received_bytes_s: AmountOrNone = None
    sent_bytes_s: AmountOrNone = None
    gpus: tuple[Gpu, ...] = ()

"""Events of a job, from host to notebook: numbered from 1, and written to the journal before they
are sent.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.bounds import (
    Amount,
    AmountOrNone,
    Name,
    Names,
    Paragraph,
    Points,
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
    Thread,
)


@frozen
class _OfRank:
    """An event of a rank; `restart` is the number of earlier starts of its process."""

    rank: int
    restart: int


@message
class Hello:
    """The agent has started. Always the first event."""

    protocol: int
    job: Name
    node_rank: int
    hostname: Name
    pid: int


@message
class Endpoint:
    """Whether this node can connect to the rendezvous endpoint: "open" (its own), "reached" or
    "unreached".
    """

    state: Word
    detail: Paragraph = ""


@message
class Worker:
    """A rank's process has started and is about to load the function."""

    rank: int
    local_rank: int
    world_size: int
    restart: int
    pid: int
    # number of earlier rounds of the rendezvous, if there may be several: the ranks of a later
    # round replace all earlier ones, on any node
    round: int = 0
    # number of ranks on its node; 0 if unknown, as from an agent of an earlier version
    local_world_size: int = 0


@message
class Progress(_OfRank):
    """Progress of a rank since its last such event, merged: at most about 10 events per second and
    rank.
    """

    at_s: Amount
    step: AmountOrNone = None  # the latest of `report`, None if there was none
    total: AmountOrNone = None  # the latest of `report`, None if there was none
    # those of each metric in order, thinned if a rank reports very often
    points: dict[Word, Points] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()  # those that changed
    device: Word = ""
    is_printed: bool = False  # the metrics were read from printed lines


@message
class Picture(_OfRank):
    """A picture that a rank shows: a PNG in base64. `step` is the rank's step, None if unknown."""

    data: Annotated[str, "line", 200_000]
    step: AmountOrNone = None


@message
class Output:
    """Text that a rank (or torchrun: rank -1) wrote."""

    rank: int
    stream: Word
    offset: int  # position in bytes in the log on the host
    # the journal only has it if a full disk kept it out of the log
    text: Annotated[str, "log", 1 << 18] = ""
    # bytes before the text that are in the log but are not sent, because nobody can read that fast
    skipped_bytes: int = 0
    size_bytes: int = 0  # what the journal has instead of a text that is in the log


@message
class Ended(_OfRank):
    """The end of a rank."""

    # "returned", "raised", "exited" or "signalled"; or "replaced": killed by its agent, because an
    # elastic job restarts its ranks
    outcome: Word
    code: int = 0  # the exit code; minus the signal for "signalled"
    failure: Failure | None = None
    # of its file: its return value, or the frames of its exception
    result_bytes: int | None = None
    meaning: Annotated[str, "lines", 40_000] = ""
    # its use of process groups: "none", "unused", "used"; "" if unknown
    group_use: Word = ""
    # the largest part of its loading, if it spent most of its time in that
    loaded: Name = ""
    loading_s: Amount = 0.0  # the time for all its loading


@message
class Paused(_OfRank):
    """A rank waits for the user's input: its code, or a debugger, has called `input`."""

    prompt: int  # the number of inputs for which this process has waited
    file: Word  # where `input` was called
    line: int
    asks: Word = ""  # the printed prompt


@message
class Resumed(_OfRank):
    """A rank no longer waits for the input with this `prompt`."""

    prompt: int


@message
class RankExits:
    """Ranks that did not end with exit code 0, before torchrun reaps them.

    torchrun sends it to the agent, which writes an `Ended` for each to the journal. The journal
    never contains it. Without ranks, it is the first message of torchrun's connection.
    """

    exits: tuple[Exit, ...] = ()


@message
class EngineEnded:
    """torchrun ended on this node with exit code `code`; `exits` are the failed ranks in its
    report.
    """

    code: int
    exits: tuple[Exit, ...] = ()


@message
class Notice:
    """A message for the user that is no failure."""

    text: Paragraph


@message
class PeerState:
    """The state of another node's heartbeats at this node: "joined", "silent" (none ever), "lost"
    or "back".
    """

    node_rank: int
    state: Word


@message
class NodeAdded:
    """The lead has added a host to an elastic job: the last of `hosts`, which are those of all
    nodes.

    The notebook whose `AddNode` had this `request_id` starts that node.
    """

    request_id: Word
    hosts: Names


LEFT = "left"  # used instead of a request ID


@message
class Stacks:
    """Where a rank was at the request `request_id`: its main thread first.

    Without threads, `silence` is the reason. `calls` are its collective calls, as far as torch has
    recorded them. With `LEFT` instead of a request ID, the rank wrote this itself because such a
    call failed.
    """

    request_id: Word
    rank: int
    local_rank: int
    threads: tuple[Thread, ...] = ()
    silence: Paragraph = ""
    calls: tuple[GroupRecord, ...] = ()


@message
class NodeStopping:
    """From now on this node ends its ranks, for this `reason`.

    `culprit` is the node that caused it, -1 for none.
    """

    reason: Paragraph
    culprit: int = -1


@message
class Detached:
    """From now on the job needs no notebook.

    Only the lead sends it. `why`: "asked", or "disconnected" for too long.
    """

    why: Paragraph


@message
class Skipped:
    """Replaces the events from its own number up to `through`, which the host has not kept.

    They were reports and lines of output, or came while the disk was full. The next event has the
    number `through` + 1.
    """

    through: Size


@message
class StacksDone:
    """The stacks of all `ranks` running ranks of this node were sent, for the request
    `request_id`.
    """

    request_id: Word
    ranks: int


@message
class Final:
    """Nothing of the job runs on this node any more, except `survivors` (name, pid and state).

    It is the last event of a node, except for the lead, which may still report about other nodes.
    `reason`: "done", "stopped", "lease" (no notebook renewed it) or the text of an error.
    """

    reason: Paragraph
    survivors: tuple[Annotated[str, "line", 300], ...] = ()


@message
class Hardware:
    """The load of a host: memory in bytes, network in bytes per second, GPUs in the order of ranks'
    GPU numbers.

    None means unknown. It has no number and is in no journal: a notebook that was disconnected does
    not need it.
    """

    cpu_utilization: AmountOrNone = None
    used_bytes: int = 0
    total_bytes: int = 0
    received_bytes_s: AmountOrNone = None
    sent_bytes_s: AmountOrNone = None
    gpus: tuple[Gpu, ...] = ()

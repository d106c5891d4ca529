"""What the notebook and a host say to each other: JSON Lines, one frozen dataclass a type. Both halves use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the agent's journal;
everything else has n = 0. Unknown types and fields are ignored, so halves of different age understand each other
within one `PROTOCOL`. Binary (bundle, payload, results) follows a line that tells its size, never inside a line.
The messages stand in events.py (of a job), answers.py and requests.py, what they are made of in parts.py; wire.py writes
and reads them, and `tests/golden/wire.jsonl` freezes one line per type.
"""

from __future__ import annotations

from distmagic.remote.answers import (
    Data,
    Facts,
    Forked,
    Jobs,
    Over,
    Refused,
    Removed,
    Route,
    Templates,
    Want,
)
from distmagic.remote.events import (
    Detached,
    Ended,
    Endpoint,
    Engineended,
    Final,
    Hello,
    Member,
    Notice,
    Output,
    Progress,
    Skipped,
    Stopping,
    Worker,
)
from distmagic.remote.parts import (
    Bar,
    Blob,
    Exit,
    Failure,
    Listed,
    Membership,
    Row,
    Template,
)
from distmagic.remote.requests import (
    Ask,
    Attach,
    Cool,
    Describe,
    Detach,
    Fetch,
    Fork,
    List,
    Look,
    Offer,
    Remove,
    Renew,
    Start,
    Stop,
    Sweep,
    Warm,
)
from distmagic.remote.wire import MAX_LINE_BYTES, BadLine, Message, decode, encode

PROTOCOL = 1

__all__ = [
    "MAX_LINE_BYTES",
    "PROTOCOL",
    "Ask",
    "Attach",
    "BadLine",
    "Bar",
    "Blob",
    "Cool",
    "Data",
    "Describe",
    "Detach",
    "Detached",
    "Ended",
    "Endpoint",
    "Engineended",
    "Exit",
    "Facts",
    "Failure",
    "Fetch",
    "Final",
    "Fork",
    "Forked",
    "Hello",
    "Jobs",
    "List",
    "Listed",
    "Look",
    "Member",
    "Membership",
    "Message",
    "Notice",
    "Offer",
    "Output",
    "Over",
    "Progress",
    "Refused",
    "Remove",
    "Removed",
    "Renew",
    "Route",
    "Row",
    "Skipped",
    "Start",
    "Stop",
    "Stopping",
    "Sweep",
    "Template",
    "Templates",
    "Want",
    "Warm",
    "Worker",
    "decode",
    "encode",
]

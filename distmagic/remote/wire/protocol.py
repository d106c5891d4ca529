"""All names of the wire: JSON Lines, one frozen dataclass a type. Both halves use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the agent's journal;
everything else has n = 0. Unknown types and fields are ignored, so halves of different age understand each other
within one `PROTOCOL`. Binary (bundle, payload, results) follows a line that tells its size, never inside a line.
The messages stand in requests.py, answers.py, events.py and cells.py, and what they are made of in parts.py; codec.py writes and
reads them; ranks import events.py and parts.py alone, since making all these classes takes tens of milliseconds.
`tests/golden/wire.jsonl` freezes one line per type.
"""

from __future__ import annotations

from distmagic.remote.wire.answers import *  # noqa: F403
from distmagic.remote.wire.cells import *  # noqa: F403
from distmagic.remote.wire.codec import (
    MAX_LINE_BYTES,
    BadLine,
    Message,
    decode,
    encode,
    name_of,
)
from distmagic.remote.wire.events import *  # noqa: F403
from distmagic.remote.wire.parts import *  # noqa: F403
from distmagic.remote.wire.requests import *  # noqa: F403

PROTOCOL = 2


def another_version(job: str, number: int) -> str:
    """Return why a job can't be followed or ended from here, and what to do: its agent speaks protocol `number`."""
    return (
        f"job {job} was started by another version of distmagic, which uses protocol {number} where this one uses "
        f"protocol {PROTOCOL}. Follow it, or stop it, with the version that started it"
    )

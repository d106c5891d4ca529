"""All message types: JSON Lines, one frozen dataclass for each type.

Notebook and hosts both use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the
agent's journal; everything else has n = 0. Unknown types and fields are ignored, so different
versions of distmagic are compatible as long as `PROTOCOL` is equal. Binary data (bundle, payload,
results) follows a line with its size, and is never inside a line. The messages are in requests.py,
answers.py, events.py and cells.py, and their parts in parts.py; codec.py encodes and decodes them.
Ranks import only events.py and parts.py, because defining all classes takes tens of milliseconds.
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

PROTOCOL = 3


def another_version(job: str, number: int) -> str:
    """Return why a job can't be followed or ended, and what to do: its agent uses another protocol,
    `number`.
    """
    return (
        f"job {job} was started by another version of distmagic, which uses protocol {number}; this one uses "
        f"protocol {PROTOCOL}. Follow it, or stop it, with the version that started it"
    )

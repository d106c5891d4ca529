"""Types of message fields, with limits that a notebook enforces on values from hosts.

A correct host keeps these limits by itself. For a faulty one, distmagic/connection/limits.py has a
function for each word below, which cuts texts, removes control characters, and clamps numbers.
Lists need no limit, because a line has one; code that collects many lines has its own
(distmagic/state).
"""

from __future__ import annotations

from typing import Annotated

from distmagic.remote.wire.codec import Numbers

MOST_NODES = 4096
MOST_RANKS = 16_384
MOST_JOBS = 10_000  # per host
MOST_FILES = 10_000  # per answer

Name = Annotated[str, "line", 1000]  # of a host, a job, a notebook
Word = Annotated[str, "line", 200]
Names = tuple[Name, ...]
Words = tuple[Word, ...]
HostPath = Annotated[str, "line", 4096]
Paragraph = Annotated[str, "lines", 2000]
Amount = Annotated[float, "amount", -1e18, 1e18]
Date = Annotated[float, "amount", 0.0, 1e11]  # seconds since 1970
# Neither near zero nor endless: it must be renewed all the time.
LeaseSeconds = Annotated[float, "amount", 1.0, 86_400.0]
AmountOrNone = Annotated[float | None, "amount_or_none"]
# Points of a metric: seconds, step (NaN for none) and value, one after the other.
Points = Annotated[Numbers, "points"]
# Of bytes or events that follow: an invalid one is refused.
Size = Annotated[int, "size"]

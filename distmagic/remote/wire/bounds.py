"""Types of the fields that a notebook shows, with what it makes of them when they come from a host.

A host of ours stays within these bounds by itself. One that is broken does not: distmagic/connection/limits.py has a function
for each word below, which cuts texts, takes out control characters, and brings numbers into their range. Lists need no bound,
since a line has one; whoever keeps what comes in many lines has its own (distmagic/state).
"""

from __future__ import annotations

from typing import Annotated

MOST_NODES = 4096
MOST_RANKS = 16_384
MOST_JOBS = 10_000  # of one host
MOST_FILES = 10_000  # of one answer

Name = Annotated[str, "line", 1000]  # of a host, a job, a notebook
Word = Annotated[str, "line", 200]
HostPath = Annotated[str, "line", 4096]
Paragraph = Annotated[str, "lines", 2000]
Amount = Annotated[float, "amount", -1e18, 1e18]
Date = Annotated[float, "amount", 0.0, 1e11]  # seconds since 1970
# Nothing near zero, and no eternity: it has to be renewed all the time.
LeaseSeconds = Annotated[float, "amount", 1.0, 86_400.0]
AmountOrNone = Annotated[float | None, "amount_or_none"]
Size = Annotated[int, "size"]  # of bytes or events that follow: another one is refused

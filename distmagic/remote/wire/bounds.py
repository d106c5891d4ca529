"""Bounds of what a host may say, which stand at the fields of messages: the types of fields, and how much they may hold.

A notebook keeps what hosts send within them (distmagic/connection/limits.py has a function for each word below): text beyond
its length is cut, a number becomes the nearest one inside, long lists and tables lose their end. What is "exact" is refused
instead, because a changed value would mean something else: how many bytes follow, which events were left out, and the texts
of the lead's start message, which go back to hosts as they came.
"""

from __future__ import annotations

from typing import Annotated

MOST_NODES = 4096
MOST_RANKS = 16_384
MOST_JOBS = 10_000  # of one host
MOST_FILES = 10_000  # of one answer
PATH_BYTES = 4096  # no file system opens a longer path
_LARGEST = 1 << 63

Name = Annotated[str, "line", 1000]  # of a host, a job, a notebook
Names = Annotated[tuple[Name, ...], "items", MOST_NODES]
Word = Annotated[str, "line", 200]
HostPath = Annotated[str, "line", 4096]
Paragraph = Annotated[str, "lines", 2000]
# As long as the kernel allows an argument or a variable to be.
Exact = Annotated[str, "exact", 1 << 17]
Exacts = Annotated[tuple[Exact, ...], "items", 10_000]
ExactVariables = Annotated[dict[Exact, Exact], "items", 10_000]
RankNumber = Annotated[int, "whole", 0, MOST_RANKS]
RankOrNone = Annotated[int, "whole", -1, MOST_RANKS]
NodeRank = Annotated[int, "whole", 0, MOST_NODES]
Count = Annotated[int, "whole", 0, 2**31 - 1]
ExitCode = Annotated[int, "whole", -(2**31), 2**31 - 1]  # or minus a signal
Size = Annotated[int, "whole", 0, _LARGEST]  # bytes
ExactSize = Annotated[int, "exact_whole", 0, _LARGEST]
Port = Annotated[int, "whole", 0, 65535]
Seconds = Annotated[float, "number", 0.0, 1e9]
Date = Annotated[float, "number", 0.0, 1e11]  # seconds since 1970
# Nothing near zero, and no eternity: it has to be renewed all the time.
LeaseSeconds = Annotated[float, "number", 1.0, 86_400.0]
Amount = Annotated[float, "number", -1e18, 1e18]
Share = Annotated[float, "number", 0.0, 1.0]

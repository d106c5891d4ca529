"""File names as text in messages, percent-encoded: a file name on Linux is bytes, which may not be
UTF-8.
"""

from __future__ import annotations

import os
from urllib.parse import quote_from_bytes, unquote_to_bytes


def quoted(path: str) -> str:
    """Return a path in ASCII, whatever bytes it has."""
    return quote_from_bytes(os.fsencode(path))


def unquoted(text: str) -> str:
    """Return the path that `quoted` has encoded, as Python's file functions expect it."""
    return os.fsdecode(unquote_to_bytes(text))

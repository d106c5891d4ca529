"""Names of files as text of the wire, percent-encoded: a name on Linux is bytes, which need be no UTF-8."""

from __future__ import annotations

import os
from urllib.parse import quote_from_bytes, unquote_to_bytes


def quoted(path: str) -> str:
    """Return a path as it travels: ASCII, whatever bytes it has."""
    return quote_from_bytes(os.fsencode(path))


def unquoted(text: str) -> str:
    """Return the path that `quoted` has encoded, as Python's functions for files take it."""
    return os.fsdecode(unquote_to_bytes(text))

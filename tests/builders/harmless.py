"""Whether a text that came from a host is harmless where it is shown."""

from __future__ import annotations

import re
import unicodedata

# The direction of what follows.
_TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def is_harmless(text: str, *, may_break: bool = False) -> bool:
    """Whether a text has nothing that a terminal obeys; line breaks and tabs only where it may have them."""
    controls = [
        char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
    ]
    return not _TURNING.search(text) and all(
        may_break and char in "\n\t" for char in controls
    )

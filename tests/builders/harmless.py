"""Whether a text that came from a host is harmless where it is shown."""

from __future__ import annotations

import unicodedata

_SEEN = ("ARABIC ", "SYRIAC ", "KAITHI ", "EGYPTIAN ")  # signs of these scripts
_JOINERS = ("ZERO WIDTH JOINER", "ZERO WIDTH NON-JOINER")


def is_hidden(char: str) -> bool:
    """Whether nobody sees a character that may turn or hide others: all of category Cf but for signs and joiners."""
    if unicodedata.category(char) != "Cf":
        return False
    name = unicodedata.name(char)
    return name == "ARABIC LETTER MARK" or not (
        name.startswith(_SEEN) or name in _JOINERS
    )


def is_harmless(text: str, *, may_break: bool = False) -> bool:
    """Whether a text has nothing that a terminal obeys; line breaks and tabs only where it may have them."""
    controls = [
        char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
    ]
    return not any(map(is_hidden, text)) and all(
        may_break and char in "\n\t" for char in controls
    )

"""Messages as lines of a log, for a platform whose log is the only way from a task to the notebook.

Pure.

    distmagic event NUMBER PART/PARTS TEXT   an event in its usual encoding; the numbers of a task
                                             increase
    distmagic result RANK PART/PARTS TEXT    a rank's return value, in base64

A platform may cut long lines, so a long text is split into several. All other lines are ordinary
output.
"""

from __future__ import annotations

import re
from dataclasses import replace

from distmagic.remote.frozen import frozen

EVENT, RESULT = "event", "result"
MOST_CHARS = 16_000  # limit for the text in one line: OSMO cuts lines of 64 KiB
MOST_PARTS = 200
_LINE = re.compile(r"distmagic (event|result) (\d{1,15}) (\d{1,3})/(\d{1,3}) (.*)")


@frozen
class TextPart:
    """One line: part `part`, counted from 1, of the `parts` of a text.

    `number` is the number of an event, or a rank.
    """

    kind: str
    number: int
    part: int
    parts: int
    text: str


def written(kind: str, number: int, text: str) -> list[str]:
    """Return the lines for a text without line breaks. Raises ValueError if it is too long."""
    pieces = [
        text[begin : begin + MOST_CHARS]
        for begin in range(0, max(len(text), 1), MOST_CHARS)
    ]
    if len(pieces) > MOST_PARTS:
        raise ValueError(f"{len(text):,} characters are too many for a log")
    total = len(pieces)
    return [
        f"distmagic {kind} {number} {part}/{total} {piece}"
        for part, piece in enumerate(pieces, 1)
    ]


def read(line: str) -> TextPart | None:
    """Return the text part in a log line, None for an ordinary line."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    part, parts = int(found[3]), int(found[4])
    if not 1 <= part <= parts <= MOST_PARTS or len(found[5]) > MOST_CHARS:
        return None
    return TextPart(
        kind=found[1], number=int(found[2]), part=part, parts=parts, text=found[5]
    )


class Joining:
    """Joins the parts of one task's texts; lines of a task come in order."""

    def __init__(self) -> None:
        self._begun: list[TextPart] = []

    def add(self, part: TextPart) -> str | None:
        """Return the whole text after its last part, None before.

        A text with a missing part is dropped.
        """
        if part.part == 1:
            self._begun = [part]
        elif self._begun and part == replace(
            self._begun[-1], part=self._begun[-1].part + 1, text=part.text
        ):
            self._begun.append(part)
        else:
            self._begun = []
        if not self._begun or part.part < part.parts:
            return None
        whole = "".join(one.text for one in self._begun)
        self._begun = []
        return whole

"""Numbers that a program only prints, as rows of metrics: the source that counts where a rank reports none."""

from __future__ import annotations

from distmagic.remote.wire import printed_numbers as printed
from distmagic.remote.wire.parts import MetricRow

_KEPT_BYTES = 64 << 10  # of what a rank prints between two looks; of a flood its end
_LINES = 50  # of one look whose numbers are taken, the last ones
_PATTERNS = 16  # kinds of lines that a stream may have


class PrintedRows:
    """What one stream of a rank prints, until somebody looks for rows in it.

    A line counts when another one has had the same names before: what is printed once is no curve.
    """

    def __init__(self) -> None:
        self._text = b""
        # The first line of each kind, by its names; None when it is among the rows already.
        self._firsts: dict[tuple[str, ...], tuple[str, MetricRow] | None] = {}

    def add(self, data: bytes) -> None:
        """Keep what the rank has printed."""
        self._text += data
        if len(self._text) > _KEPT_BYTES:
            _, _, self._text = self._text[-_KEPT_BYTES:].partition(b"\n")

    def take(self, at_s: float) -> list[MetricRow]:
        """Return the rows of the whole lines since the last call, which came at `at_s` of the rank's life."""
        text, _, self._text = self._text.rpartition(b"\n")
        if not printed.may_have_numbers(text):
            return []
        rows = []
        for line in text.split(b"\n")[-_LINES:]:
            if len(line) <= 4 * printed.MAX_CHARS and printed.may_have_numbers(line):
                rows += self._rows_of(line.decode(errors="replace"), at_s)
        return rows

    def _rows_of(self, line: str, at_s: float) -> list[MetricRow]:
        numbers = printed.numbers_of(line)
        kind = tuple(numbers)
        if not numbers or (kind not in self._firsts and len(self._firsts) >= _PATTERNS):
            return []
        row = MetricRow(at_s=at_s, step=printed.step_of(line), metrics=numbers)
        first = self._firsts.setdefault(kind, (line, row))
        if first is None:
            return [row]
        if first[0] == line:
            return []
        self._firsts[kind] = None
        return [first[1], row]

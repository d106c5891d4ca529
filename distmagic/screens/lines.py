"""What terminal and log have in common: the lines of output that are new, and writing to a stream."""

from __future__ import annotations

from typing import TextIO

from distmagic import render
from distmagic.state.model import OutputLine, RunState

# For streams that know no more.
_ASCII = str.maketrans({"█": "#", "░": "-", "·": "|", "…": "~", "✗": "x"})


def new_lines(state: RunState, seen: int) -> tuple[list[OutputLine | str], int]:
    """Return the lines of output after the first `seen`, and the number now seen; a text stands for those not kept."""
    fresh = max(0, state.lines_seen - seen)
    kept = state.lines[-fresh:] if fresh else ()
    lines: list[OutputLine | str] = [
        line for line in kept if render.is_shown(state, line)
    ]
    missed = fresh - len(kept)
    if missed:
        lines.insert(
            0,
            f"... {missed:,} lines not shown; the whole log: {state.variable}.logs(rank)",
        )
    return lines, state.lines_seen


def without_colours(line: OutputLine | str) -> str:
    """Return a line with its rank before it, and nothing in it that a terminal obeys."""
    if isinstance(line, str):
        return line
    return f"{render.label(line)} {render.plain(line.text)}"


def write(stream: TextIO, text: str) -> None:
    """Write all at once, in characters that the stream can take."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()

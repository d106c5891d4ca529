"""What terminal and log have in common: the lines of output that are new, and writing to a stream."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from distmagic import render
from distmagic.render.screen import TypedLine
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


class Questions:
    """Asks the user for the lines that ranks wait for, one after the other: one line a prompt.

    `read` takes the question and returns what was typed; None: nothing yet, "" without a newline: the end of all.
    """

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._answered = (-1, 0, 0)

    def typed(self, state: RunState | None) -> tuple[TypedLine, ...]:
        """Return the line for the rank that has waited longest, if one was typed."""
        paused = None if state is None else next(iter(state.paused.values()), None)
        if state is None or paused is None:
            return ()
        prompt = (paused.rank, paused.restart, paused.prompt)
        text = None if prompt == self._answered else self._read(render.question(state))
        if text is None:
            return ()
        self._answered = prompt
        line = TypedLine(
            rank=paused.rank,
            prompt=paused.prompt,
            text=text.rstrip("\n"),
            is_end=not text,
        )
        return (line,)


def is_terminal() -> bool:
    """Whether somebody may type at this process's standard input."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def line_of_terminal(_: str) -> str | None:
    """Return a line that was typed at this process's own terminal, None where there is none yet."""
    if not is_terminal() or not select.select([sys.stdin], [], [], 0)[0]:
        return None
    return os.read(sys.stdin.fileno(), 4096).decode(errors="replace")


def write(stream: TextIO, text: str) -> None:
    """Write all at once, in characters that the stream can take."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()

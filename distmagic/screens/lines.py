"""Code that terminal and log share: new lines of output, and writing to a stream."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from distmagic import render
from distmagic.render.quantities import plural
from distmagic.render.screen import Screen, TypedLine, UserRequest
from distmagic.state.model import OutputLine, RunState

# For streams with a limited encoding.
_ASCII = str.maketrans({"█": "#", "░": "-", "·": "|", "…": "~", "✗": "x"})


class Questions:
    """Asks the user for input lines for ranks, one after the other: one line for each prompt.

    `read` takes the question and returns the typed text; None: nothing yet, "" without a newline:
    the end of input.
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


class LineScreen(Screen):
    """Base class of terminal and log: the user types input for ranks at the process's own terminal.

    Before a run, other code prints its own messages.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seen = 0
        self._state: RunState | None = None
        self._questions = Questions(line_of_terminal)

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's input line for a rank; interrupts are the only other request on this
        screen.
        """
        return self._questions.typed(self._state)

    def can_type(self) -> bool:
        """Whether standard input is a terminal."""
        return is_terminal()

    def _new_lines(self, state: RunState) -> list[str]:
        """Return the lines of output since the last call, as this screen prints them; a text
        replaces those not kept.
        """
        fresh = max(0, state.lines_seen - self._seen)
        self._seen = state.lines_seen
        kept = state.lines[-fresh:] if fresh else ()
        shown = [self._written(line) for line in kept if render.is_shown(state, line)]
        missed = fresh - len(kept)
        if missed:
            where = f"the whole log: {state.variable}.logs(rank)"
            shown.insert(0, f"... {plural(missed, 'line')} not shown; {where}")
        return shown

    def _written(self, line: OutputLine) -> str:
        """Return a line with its rank as a prefix, without terminal control sequences."""
        return f"{render.label(line)} {render.plain(line.text)}"


def is_terminal() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def line_of_terminal(_: str) -> str | None:
    """Return a line typed at this process's own terminal, None if there is none yet."""
    if not is_terminal() or not select.select([sys.stdin], [], [], 0)[0]:
        return None
    return os.read(sys.stdin.fileno(), 4096).decode(errors="replace")


def write(stream: TextIO, text: str) -> None:
    """Write everything at once, in characters that the stream can encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()

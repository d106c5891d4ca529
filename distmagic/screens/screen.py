"""Puts a run where its user looks: live widgets in a notebook, a few lines in a terminal, plain lines in a log.

    RunState  --render-->  text, HTML  --screen-->  what is seen

The only file that writes to notebook or terminal while a run goes on, and the only one that knows ipywidgets. All of
it happens on the thread that calls. Time is the run's own (`RunState.at_s`), which the caller's clock moves on.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from distmagic import render
from distmagic.runner.drive import Screen
from distmagic.state.model import OutputLine, RunState

_SHARES = {"table": (0.1, 50_000), "curves": (1.0, 20_000), "output": (0.25, 30_000)}  # (seconds, bytes a second)
_DRAWING, _LONGEST_PAUSE_S = 0.015, 5.0  # of the time, at most; but no pane is older than this
_PLAIN_EVERY = (0.5, 100_000)
_SAVED_EVERY_S = 120.0  # what is saved meanwhile is at most this old; each time a scrolled pane jumps to its end
_LIVE_LINES = 60
_STATUS_LINES = 10
_LOG_EVERY_S = 30.0
_VIEW = "application/vnd.jupyter.widget-view+json"
_WHILE_RUNNING = "This was saved while the run was going on; what came of it is not known here."
_ASCII = str.maketrans({"█": "#", "░": "-", "·": "|", "…": "~", "✗": "x"})  # for terminals that know no more
_LABELS = (94, 33, 32, 35, 36, 91, 34, 95)  # colours of a terminal, by rank


def screen_for(shell: object = None) -> Screen:
    """Return the screen that fits: `shell` is IPython's, None outside of it or where it isn't known."""
    ipython = sys.modules.get("IPython")
    shell = shell if shell is not None or ipython is None else ipython.get_ipython()
    if any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__):
        return SteadyScreen(NotebookScreen())
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return SteadyScreen(TerminalScreen(sys.stdout, shutil.get_terminal_size, colours="NO_COLOR" not in os.environ))
    return SteadyScreen(LogScreen(sys.stdout))


class SteadyScreen:
    """Another screen, whose failure is no reason to end a run: a live view that breaks is given up with a word."""

    def __init__(self, inner: Screen) -> None:
        self._inner = inner
        self._broken = False

    def show(self, state: RunState) -> None:
        """Show a state, unless an earlier one could not be shown."""
        if not self._broken:
            self._try(self._inner.show, state)

    def finish(self, state: RunState) -> None:
        """Show the last state, at worst as plain text on stderr."""
        self._broken = False
        self._try(self._inner.finish, state)
        if self._broken:
            _write(sys.stderr, f"{render.text(state)}\n")

    def _try(self, act: Callable[..., None], *args: object) -> None:
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, ranks are worth more than their picture
            self._broken = True
            _write(sys.stderr, f"distmagic can't show the run: {type(error).__name__}: {error}. It goes on.\n")


# ---- notebooks


class Pane:
    """Some HTML widgets that are sent what changed, at most every so many seconds and bytes a second.

    And so rarely that making it takes this thread a small share of its time: the curves of a thousand ranks take long.
    """

    def __init__(self, widgets: tuple[Any, ...], every_s: float, bytes_per_s: int) -> None:
        self._widgets = widgets
        self._every_s, self._bytes_per_s = every_s, bytes_per_s
        self._next_s = 0.0
        self._sent = [""] * len(widgets)

    def offer(self, now_s: float, make: Callable[[], tuple[str, ...]]) -> None:
        """Send what `make` returns, one value a widget, if it is time."""
        if now_s < self._next_s:
            return
        size, began_s = 0, time.thread_time()
        for i, value in enumerate(make()):
            if value != self._sent[i]:
                self._widgets[i].value = self._sent[i] = value
                size += len(value.encode())
        took_s = time.thread_time() - began_s
        self._next_s = now_s + max(self._every_s, size / self._bytes_per_s, min(_LONGEST_PAUSE_S, took_s / _DRAWING))


class Board:
    """The live view: one column of HTML widgets. Raises `ImportError` where there is no ipywidgets."""

    def __init__(self) -> None:
        import ipywidgets

        style = ipywidgets.HTML(value=render.style(), layout=ipywidgets.Layout(width="auto"))
        self._shared = looks = {"layout": style.layout, "style": style.style}
        classes = ((), ("dm-scroll",), (), (), ("dm-bottom",))
        shown = [ipywidgets.HTML(_dom_classes=names, **looks) for names in classes]
        head, table, curves, about, output = shown
        self._table = Pane((head, table), *_SHARES["table"])
        self._curves = Pane((curves,), *_SHARES["curves"])
        self._output = Pane((about, output), *_SHARES["output"])
        self._parts = (style, *shown)
        self._box = ipywidgets.VBox(self._parts, layout=style.layout, _dom_classes=("distmagic",))

    @property
    def view(self) -> dict[str, object]:
        """What a notebook is told to show."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, state: RunState) -> None:
        """Send what changed."""
        self._table.offer(state.at_s, lambda: render.head_and_table(state))
        self._curves.offer(state.at_s, lambda: (render.curves(state),))
        self._output.offer(state.at_s, lambda: render.about_and_output(state, _LIVE_LINES))

    def close(self) -> None:
        """Leave no widget behind, and nothing in what a notebook might keep of one."""
        for part in self._parts:
            part.value = ""
        for widget in (self._box, *self._parts, *self._shared.values()):
            widget.close()


class NotebookScreen:
    """One output of a cell: widgets while the run goes on, text and HTML in the end and in what is saved meanwhile."""

    def __init__(self, make_board: Callable[[], Board] = Board) -> None:
        self._make_board = make_board
        self._board: Board | None = None
        self._display_id = ""
        self._next_s = 0.0

    def show(self, state: RunState) -> None:
        """Show a state; the first one makes the output."""
        if not self._display_id:
            self._open(state)
        elif state.at_s >= self._next_s:
            self._publish(state, is_over=False)
        if self._board is not None:
            self._board.show(state)

    def finish(self, state: RunState) -> None:
        """Replace the output by one that needs no kernel, and close the widgets."""
        self._publish(state, is_over=True)
        if self._board is not None:
            self._board.close()
            self._board = None

    def _open(self, state: RunState) -> None:
        try:
            self._board = self._make_board()
        except Exception:  # noqa: BLE001  # none there, or none that works here: pages do as well
            self._board = None
        self._publish(state, is_over=False)

    def _publish(self, state: RunState, *, is_over: bool) -> None:
        from IPython.display import display

        data: dict[str, object] = {"text/plain": render.text(state), "text/html": render.html(state)}
        if not is_over:
            data["text/plain"] = f"{data['text/plain']}\n{_WHILE_RUNNING}"
            if self._board is not None:
                data["text/html"] = f"{data['text/html']}<p>{_WHILE_RUNNING}</p>"
                data[_VIEW] = self._board.view
        is_first, self._display_id = not self._display_id, self._display_id or f"distmagic-{state.job}"
        display(data, raw=True, display_id=self._display_id, update=not is_first)
        every_s, bytes_per_s = (_SAVED_EVERY_S, 100_000) if self._board is not None else _PLAIN_EVERY
        self._next_s = state.at_s + max(every_s, len(str(data["text/html"]).encode()) / bytes_per_s)


# ---- terminals and logs


class TerminalScreen:
    """Output of the ranks as it comes, and below it a few lines that are drawn again and again."""

    def __init__(self, stream: TextIO, size: Callable[[], os.terminal_size], *, colours: bool) -> None:
        self._stream, self._size, self._colours = stream, size, colours
        self._block: tuple[str, ...] = ()
        self._seen = 0

    def show(self, state: RunState) -> None:
        """Print new lines, and draw the status again where it changed."""
        columns, rows = self._size()
        block = render.status(state, width=max(20, columns - 1), height=max(1, min(_STATUS_LINES, rows - 2)))
        lines = self._new_lines(state)
        if lines or block != self._block:
            _write(self._stream, self._erased() + "".join(f"{line}\n" for line in lines) + "\n".join(block))
            self._block = block

    def finish(self, state: RunState) -> None:
        """Print the last lines and the final table in place of the status."""
        lines = [*self._new_lines(state), render.text(state, width=max(20, self._size()[0] - 1), lines=0)]
        _write(self._stream, self._erased() + "".join(f"{line}\n" for line in lines))
        self._block = ()

    def _erased(self) -> str:
        """Return what takes the status away, also where the window has become narrower since."""
        if not self._block:
            return ""
        columns = max(1, self._size()[0])
        rows = sum(max(1, -(-render.columns_of(line) // columns)) for line in self._block)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def _new_lines(self, state: RunState) -> list[str]:
        lines, self._seen = new_lines(state, self._seen)
        return [
            _for_terminal(line) if self._colours and isinstance(line, OutputLine) else _for_log(line) for line in lines
        ]


class LogScreen:
    """Lines only: output as it comes, what happens to the run, now and then how far it is, in the end the table."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: RunState | None = None
        self._seen = 0
        self._next_s = 0.0

    def show(self, state: RunState) -> None:
        """Print what is new."""
        told = list(render.milestones(self._last, state))
        if not told and state.at_s >= self._next_s:
            told = [render.headline(state)]
        if told:
            self._next_s = state.at_s + _LOG_EVERY_S
        lines, self._seen = new_lines(state, self._seen)
        self._print([_for_log(line) for line in lines] + told)
        self._last = state

    def finish(self, state: RunState) -> None:
        """Print the last lines and the final table."""
        lines, self._seen = new_lines(state, self._seen)
        self._print([*map(_for_log, lines), render.text(state, lines=0)])

    def _print(self, lines: list[str]) -> None:
        if lines:
            _write(self._stream, "".join(f"{line}\n" for line in lines))


def new_lines(state: RunState, seen: int) -> tuple[list[OutputLine | str], int]:
    """Return the lines of output after the first `seen`, and the number now seen; a text stands for those not kept."""
    fresh = max(0, state.lines_seen - seen)
    kept = state.lines[-fresh:] if fresh else ()
    missed = fresh - len(kept)
    gap = [f"... {missed:,} lines not shown; the whole log: run.logs(rank)"] if missed else []
    return [*gap, *(line for line in kept if render.is_shown(state, line))], state.lines_seen


def _for_log(line: OutputLine | str) -> str:
    return line if isinstance(line, str) else f"{render.label(line)} {render.plain(line.text)}"


def _for_terminal(line: OutputLine) -> str:
    colour = _LABELS[line.rank % len(_LABELS)] if line.rank >= 0 else 90
    return f"\x1b[{colour}m{render.label(line)}\x1b[0m {render.coloured(line.text)}"


def _write(stream: TextIO, text: str) -> None:
    """Write all at once, in characters that the stream can take."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()

"""The live view in a notebook: a column of HTML widgets. The only module that knows ipywidgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distmagic import render
from distmagic.state.model import RunState

# How often a part is sent at most, in seconds, and how many bytes a second it may take. A figure that many ranks change
# at once is read more often than curves are; together they stay at 100 kB a second, which a slow line carries.
TABLE_SHARE = (0.1, 50_000)
CURVES_SHARE = (1.0, 20_000)
OUTPUT_SHARE = (0.25, 30_000)
# Making the view takes at most this part of the main thread's time, which also reads events; but no part of the view
# is older than the pause.
_DRAWING_PART = 0.015
_LONGEST_PAUSE_S = 5.0
_LIVE_LINES = 60  # of output


class Pane:
    """Some HTML widgets that are sent what changed, at most every so many seconds and bytes a second.

    And so rarely that making it takes this thread a small share of its time: the curves of a thousand ranks take long.
    """

    def __init__(
        self, widgets: tuple[Any, ...], every_s: float, bytes_per_s: int
    ) -> None:
        self._widgets = widgets
        self._every_s = every_s
        self._bytes_per_s = bytes_per_s
        self._next_s = 0.0
        self._sent = [""] * len(widgets)

    def offer(self, now_s: float, make: Callable[[], tuple[str, ...]]) -> None:
        """Send what `make` returns, one value a widget, if it is time."""
        if now_s < self._next_s:
            return
        size_bytes = 0
        began_s = time.thread_time()
        for i, value in enumerate(make()):
            if value != self._sent[i]:
                self._widgets[i].value = self._sent[i] = value
                size_bytes += len(value.encode())
        took_s = time.thread_time() - began_s
        pause_for_bytes_s = size_bytes / self._bytes_per_s
        pause_for_drawing_s = min(_LONGEST_PAUSE_S, took_s / _DRAWING_PART)
        self._next_s = now_s + max(
            self._every_s, pause_for_bytes_s, pause_for_drawing_s
        )


class Board:
    """The live view: one column of HTML widgets. Raises `ImportError` where there is no ipywidgets."""

    def __init__(self) -> None:
        import ipywidgets

        style = ipywidgets.HTML(
            value=render.style(), layout=ipywidgets.Layout(width="auto")
        )
        # Layout and style are widgets too: shared, so that not every part opens two more.
        looks = {"layout": style.layout, "style": style.style}
        head = ipywidgets.HTML(**looks)
        table = ipywidgets.HTML(_dom_classes=("dm-scroll",), **looks)
        curves = ipywidgets.HTML(**looks)
        about = ipywidgets.HTML(**looks)
        output = ipywidgets.HTML(_dom_classes=("dm-bottom",), **looks)
        self._table = Pane((head, table), *TABLE_SHARE)
        self._curves = Pane((curves,), *CURVES_SHARE)
        self._output = Pane((about, output), *OUTPUT_SHARE)
        self._parts = (style, head, table, curves, about, output)
        self._shared = tuple(looks.values())
        self._box = ipywidgets.VBox(
            self._parts, layout=style.layout, _dom_classes=("distmagic",)
        )

    @property
    def view(self) -> dict[str, object]:
        """The value for a notebook's MIME type of widgets, which names the outermost one."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, state: RunState) -> None:
        """Send what changed."""
        self._table.offer(state.at_s, lambda: render.head_and_table(state))
        self._curves.offer(state.at_s, lambda: (render.curves(state),))
        self._output.offer(
            state.at_s, lambda: render.about_and_output(state, _LIVE_LINES)
        )

    def close(self) -> None:
        """Leave no widget behind, and nothing in what a notebook might keep of one."""
        for part in self._parts:
            part.value = ""
        for widget in (self._box, *self._parts, *self._shared):
            widget.close()

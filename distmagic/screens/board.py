"""The live view in a notebook: what is sent to a page, how often, and the page's requests."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distmagic import render
from distmagic.render.screen import TypedLine, UserRequest
from distmagic.screens import page_requests, reloaded_pages, widget
from distmagic.screens.kept_lines import MOST_BYTES, KeptLines
from distmagic.state.model import RunState

# Limits for each part: the pause between two messages in seconds, and bytes per second. Numbers
# change often and are sent more often than curves; together they use at most 100 kB per second,
# which suits a slow line.
TABLE_SHARE = (0.1, 45_000)
CURVES_SHARE = (1.0, 25_000)
LOG_SHARE = (0.25, 30_000)
PICTURES_SHARE = (1.0, 30_000)
# Making the view takes at most this share of the main thread's time, which also reads events; but
# no part of the view is older than the pause.
_DRAWING_PART = 0.015
_LONGEST_PAUSE_S = 5.0
# What a page gets: values by the names of the widget's traits.
Traits = dict[str, object]
# output that is sent at once; a page requests skipped lines later
_NEW_LINES_BYTES = 15_000
_LAST_LINES = 1000  # lines that a page holds, and receives at the start and at the end
_EARLIER_LINES = 1000  # limit for one request for earlier lines


class Pane:
    """A part of the view, made and sent again at most once in `every_s` seconds.

    A large part is sent less often, so that `bytes_per_s` is kept on average. A part that is slow
    to make, such as the curves of a thousand ranks, is made less often, so that it takes only a
    small share of this thread's time.
    """

    def __init__(self, every_s: float, bytes_per_s: int) -> None:
        self._every_s = every_s
        self._bytes_per_s = bytes_per_s
        self._next_s = 0.0
        self._sent: Traits = {}

    def offer(self, now_s: float, make: Callable[[], Mapping[str, object]]) -> Traits:
        """Return the changed values of `make`, by name; nothing if it isn't time."""
        if now_s < self._next_s:
            return {}
        began_s = time.thread_time()
        made = make()
        took_s = time.thread_time() - began_s
        changed = {
            name: value for name, value in made.items() if value != self._sent.get(name)
        }
        self._sent.update(changed)
        size_bytes = sum(len(str(value).encode()) for value in changed.values())
        pause_for_bytes_s = size_bytes / self._bytes_per_s
        pause_for_drawing_s = min(_LONGEST_PAUSE_S, took_s / _DRAWING_PART)
        self._next_s = now_s + max(
            self._every_s, pause_for_bytes_s, pause_for_drawing_s
        )
        return changed


class Board:
    """The live view. Raises `ImportError` without anywidget.

    It sends nothing until a page reports that it shows the view; then `has_page` is true. `answer`
    runs on another thread, all other methods on that of the run's loop.
    """

    def __init__(
        self, view_id: str = "", make_view: Callable[[str], Any] = widget.make_view
    ) -> None:
        """`view_id` names the place in the page: it is reused from a closed view."""
        self.view_id = view_id or secrets.token_hex(8)
        self.has_page = False
        self.is_in_background = False
        self._requests: deque[UserRequest] = deque()
        self._state: RunState | None = None
        self._panes = (
            (Pane(*TABLE_SHARE), _head_and_table),
            (Pane(*CURVES_SHARE), _curves_and_ranks),
            (Pane(*PICTURES_SHARE), _pictures),
        )
        self._log = Pane(*LOG_SHARE)
        self._kept = KeptLines()
        self._lines_sent = 0
        self._has_sent_torchrun = False
        self._is_over = False
        self._is_cleared = False
        self._is_closed = False
        self._foreground = threading.Lock()
        self._is_in_foreground = False
        # Before a view exists: a page says hello as soon as it sees it, only once.
        page_requests.serve(self.view_id, self)
        self._view = make_view(self.view_id)
        self._view.on_msg(self._take_message)
        if self._view.shows_itself:
            self.has_page = True
        reloaded_pages.serve(self)

    @property
    def mime_view(self) -> dict[str, object] | None:
        """The output data for a front end that shows widgets only by its own view; None for all
        others.
        """
        if not self._view.shows_itself:
            return None
        model_id = self._view.model_id
        return {"version_major": 2, "version_minor": 0, "model_id": model_id}

    def show(self, state: RunState) -> None:
        """Send all changes, in one message."""
        self._state = state
        is_main = threading.current_thread() is threading.main_thread()
        self._is_in_foreground = is_main and not self.is_in_background
        self._kept.add(state)
        if self._is_cleared and not self._view.is_cleared:
            self._view.is_cleared = True
        if self.has_page:
            changes = self._log.offer(state.at_s, lambda: self._new_lines(state))
            for pane, make in self._panes:
                changes |= pane.offer(state.at_s, partial(make, state))
            self._send(changes)

    def finish(self, state: RunState, html: str, text: str) -> None:
        """Send the last state, and the HTML and text that the document keeps.

        The state itself is not kept.
        """
        reloaded_pages.leave(self)
        with self._foreground:
            self._is_in_foreground = False
        self._is_over = True
        self._state = None
        last = _head_and_table(state) | _curves_and_ranks(state) | _pictures(state)
        self._kept.add(state)
        last["log"] = self._log_of(state, _LAST_LINES)
        last["final"] = {"html": html, "text": text}
        self._send(last)
        if self._is_cleared:
            self.close()

    def while_in_foreground(self, act: Callable[[], object]) -> None:
        """Call `act` if the cell is waiting for the run; the cell does not end meanwhile."""
        with self._foreground:
            if self._is_in_foreground:
                act()

    def requests(self) -> tuple[UserRequest, ...]:
        """Return the user's requests (buttons) since the last call."""
        found = []
        while self._requests:
            found.append(self._requests.popleft())
        return tuple(found)

    def close(self) -> None:
        """Remove the widget."""
        reloaded_pages.leave(self)
        if not self._is_closed:
            self._is_closed = True
            widget.close(self._view)

    def answer(self, content: Mapping[str, Any]) -> dict[str, object]:
        """Handle a page's request `op`; "lines" asks for lines before a number.

        Raises `ValueError` for an unknown one.
        """
        op, before, typed = (content.get(name) for name in ("op", "before", "typed"))
        if op == "hello":
            self.has_page = True
            state = self._state
            return {} if state is None else {"log": self._lines(state, _LAST_LINES)}
        if op == "lines" and isinstance(before, int):
            return self._kept.before(before, _EARLIER_LINES)
        if op == "cleared":  # the output of the run was cleared in the notebook
            self._is_cleared = True
            if self._is_over:
                self.close()
            return {}
        if op == "stop" or op == "stacks" or op == "detach":  # noqa: PLR1714  # mypy knows the words so
            if self._is_over:
                raise ValueError(f"this view is not fed any more: it can't {op!r}")
            self._requests.append(op)
            return {}
        if op == "type" and isinstance(typed, Mapping):
            rank, prompt = int(typed["rank"]), int(typed["prompt"])
            line = TypedLine(rank=rank, prompt=prompt, text=str(typed["text"]))
            self._requests.append(line)
            return {}
        raise ValueError(f"a live view can't {op!r}")

    def _take_message(self, _: object, content: Mapping[str, Any], __: object) -> None:
        """Handle a request that came as an ordinary widget message, from a front end without the
        control channel.
        """
        self.answer(content)

    def _send(self, changes: Mapping[str, object]) -> None:
        with self._view.hold_sync():
            for name, value in changes.items():
                setattr(self._view, name, value)

    def _new_lines(self, state: RunState) -> Traits:
        new = state.lines_seen - self._lines_sent
        if not (new or state.open_lines or self._has_older_news):
            return {}
        self._lines_sent = state.lines_seen
        count = min(new, _LAST_LINES)
        return {"log": self._log_of(state, count, _NEW_LINES_BYTES)}

    @property
    def _has_older_news(self) -> bool:
        """Whether lines are visible now that were hidden when they came."""
        return self._kept.shows_torchrun and not self._has_sent_torchrun

    def _log_of(
        self, state: RunState, count: int, room_bytes: int = MOST_BYTES
    ) -> Traits:
        """Return the last lines; `again` if they replace all lines of a page."""
        again = self._has_older_news
        self._has_sent_torchrun = self._kept.shows_torchrun
        if again:
            count, room_bytes = _LAST_LINES, MOST_BYTES
        return {**self._lines(state, count, room_bytes), "again": again}

    def _lines(
        self, state: RunState, count: int, room_bytes: int = MOST_BYTES
    ) -> Traits:
        """Return the unfinished lines, and the last `count` lines that are still in memory, of at
        most `room_bytes`.
        """
        return {
            **self._kept.last(count, room_bytes),
            "open": render.open_lines(state),
            "count": render.count_of_lines(state),
        }


def _head_and_table(state: RunState) -> Traits:
    head, table = render.head_and_table(state)
    run = {
        "job": state.job,
        "variable": state.variable,
        "what": render.size(state),
        "is_running": state.phase == "running",
        "is_stopping": state.phase == "stopping",
        "can_detach": not state.detached_by and not state.terms.stays,
        "is_over": state.is_over or bool(state.seen_unix_s),
    }
    prompts = [] if run["is_over"] else render.prompts(state)
    return {"run": run, "head": head, "table": table, "prompts": prompts}


def _curves_and_ranks(state: RunState) -> Traits:
    return {"charts": render.chart_data(state), "ranks": render.all_ranks(state)}


def _pictures(state: RunState) -> Traits:
    return {"pictures": render.pictures(state)}

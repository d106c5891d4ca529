"""Sends a rank's progress to the agent: `report` and `track` for users, `post_bar` for bars of
tqdm.

Progress is sent as `Progress` lines over the rank's socket (see `outbox`). The agent may be slow,
so no function waits for it, except `end`. No thread is used: data that can't be sent now is sent by
a later call. So threads, signal handlers and finalizers of tqdm bars never wait for each other.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from distmagic.remote.rank.outbox import TOGETHER, NumberSource, Outbox
from distmagic.remote.training import steps
from distmagic.remote.wire.parts import Bar

T = TypeVar("T")

_TRACK_EVERY_S = 0.05
_FLUSH_S = 2.0
_REPORT = NumberSource.REPORT
_LARGEST = 2**53  # whole number that is a float without a check
# Raised by float(x) or x.item().
_NOT_A_NUMBER = (
    TypeError,
    ValueError,
    OverflowError,
    AttributeError,
    RuntimeError,
)

# Counts the bars of this rank; an outer bar is created first, so it has the smaller number.
bar_ids = itertools.count(1)


def report(
    *, step: float | None = None, total: float | None = None, **metrics: object
) -> None:
    """Show this rank's progress in the notebook: `report(step=i, total=n, loss=loss)`.

    `step` is the number of finished steps, `total` the number of all steps. Metrics are Python or
    NumPy numbers, or tensors with one element and no dimension. A tensor on a GPU makes the call
    wait for the GPU, like `.item()`.

    Without a `step`, the metrics are recorded at the count of the innermost open bar of tqdm, rich
    or `track`, if any. A call takes some microseconds; calls within 0.1 s are sent together.
    Outside a run it does nothing. A bad value raises no error: it is left out, with one line on
    stderr.
    """
    link = _here.link
    if link is None:
        return
    for given in metrics.values():
        # Otherwise nothing needs conversion, as in most calls.
        if type(given) is not float:
            converted = (
                (name, _number(name, value)) for name, value in metrics.items()
            )
            metrics = {name: value for name, value in converted if value is not None}
            break
    if metrics and link.source is not _REPORT:
        link.source = _REPORT
    values: dict[str, float] = metrics  # type: ignore[assignment]  # they are all floats now
    if type(step) is not int or abs(step) > _LARGEST:  # type: ignore[unreachable]  # mypy counts int as float
        step = _number("step", step)
    if type(total) is not int or abs(total) > _LARGEST:  # type: ignore[unreachable]  # mypy counts int as float
        total = _number("total", total)
    now = link.clock()
    link.inbox.append((now, step, values, total, True))
    if now >= link.due_s or len(link.inbox) >= TOGETHER:
        link.pump()


def report_logged(
    values: Mapping[str, object], source: NumberSource, step: float | None
) -> None:
    """Report numbers that the user's code logs by another library; values that are not numbers are
    ignored silently.

    Does nothing if a source with a higher priority has already reported. Never raises.
    """
    link = _here.link
    if link is None or source < link.source:
        return
    numbers = {}
    for name, value in values.items():
        # A bool is no metric, and neither is a text.
        if value is not None and not isinstance(value, bool):
            with contextlib.suppress(*_NOT_A_NUMBER):
                numbers[str(name)] = _as_float(value)
    number = None
    if step is not None:
        with contextlib.suppress(*_NOT_A_NUMBER):  # a step may also be a tensor
            number = _as_float(step)
    if numbers:
        link.source = source
        link.inbox.append((link.clock(), number, numbers, None, False))
        link.pump()


def track(
    iterable: Iterable[T], *, desc: str = "", total: float | None = None
) -> Iterator[T]:
    """Yield the items of `iterable`, and show its progress as a bar of this rank.

    Outside a run it shows no bar. `desc` is the bar's name. `total` is the number of items, by
    default `len(iterable)` if available. Calls may be nested.
    """
    if _here.link is None:
        yield from iterable
        return
    if total is not None:
        total = _number("total", total)
    else:
        # A DataLoader over an iterable dataset raises TypeError of its own.
        with contextlib.suppress(*_NOT_A_NUMBER):
            total = float(len(iterable))  # type: ignore[arg-type]
    number = next(bar_ids)
    done = 0
    began = time.monotonic()
    due = began + _TRACK_EVERY_S

    def post(*, closed: bool = False) -> None:
        past = time.monotonic() - began
        rate = done / past if done and past > 0 else None
        post_bar(
            Bar(
                id=number, desc=str(desc), n=done, total=total, rate=rate, closed=closed
            )
        )

    post()
    try:
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now >= due:
                due = now + _TRACK_EVERY_S
                post()
            steps.iterated()
    finally:
        post(closed=True)


def _number(name: str, value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    try:
        return float(value) if type(value) is int else _as_float(value)
    except _NOT_A_NUMBER as error:
        what = f"{name!r} is a {type(value).__name__} that is not one number ({error})"
        complain("report", what)
        return None


def _as_float(value: Any) -> float:
    """Return a value as a float; also accepts a text such as "0.31", and a tensor or array without
    dimensions.
    """
    if getattr(value, "ndim", 0):
        raise ValueError("its shape is not ()")
    item = getattr(value, "item", None)
    return float(value if item is None else item())


def complain(function: str, what: str) -> None:
    """Write to stderr what `function` leaves out, once per function and process."""
    if function not in _here.complaints:
        _here.complaints.add(function)
        sys.stderr.write(
            f"distmagic.{function}: {what[:300]}. It is left out; this note appears once.\n"
        )


# ---- inside a run


class _Here:
    """The state of this process: its connection to the agent, None outside a run."""

    link: Outbox | None = None
    watches_forks = False
    complaints: ClassVar[set[str]] = set()


_here = _Here()


def begin(
    send: Callable[[bytes], bool],
    rank: int,
    restart: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Enable reports from now on. `send` returns False instead of blocking."""
    if not _here.watches_forks:
        _here.watches_forks = True
        # A DataLoader's worker process reports nothing.
        os.register_at_fork(after_in_child=_turn_off)
    _here.link = Outbox(send, rank, restart, clock, partial(complain, "report"))


def end() -> None:
    """Send what is left, waiting at most 2 s for the agent, and disable reports from now on."""
    if _here.link is not None:
        _here.link.flush(_FLUSH_S)
    _turn_off()


def post_bar(bar: Bar) -> None:
    """Report the state of a bar. It does nothing outside a run."""
    link = _here.link
    if link is not None:
        link.inbox.append(bar)
        link.pump()


def is_in_run() -> bool:
    """Whether this process is a rank that reports."""
    return _here.link is not None


def post_picture(png: bytes) -> None:
    """Send a picture, waiting for the agent at most 2 s. It does nothing outside a run."""
    link = _here.link
    if link is not None:
        link.send_picture(base64.b64encode(png).decode(), _FLUSH_S)


def _turn_off() -> None:
    _here.link = None

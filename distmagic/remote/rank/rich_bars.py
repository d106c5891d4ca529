"""Progress displays of rich in the user's code become bars of the rank, with no change to that code. Lightning uses them.

A rank has no terminal, so that rich itself writes nothing but the last state. The methods of `rich.progress.Progress`
that change or draw a display are replaced by ones that post each visible task as a bar, too. A display with a file of its
own stays as it is.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from distmagic.remote.rank.bars import is_standard
from distmagic.remote.rank.report import bar_ids
from distmagic.remote.training import import_hooks
from distmagic.remote.wire.parts import Bar

_IDS = "_distmagic_ids"  # attribute of a display: {number of a task: number of its bar}
_POSTED_S = "_distmagic_posted_s"  # attribute of a display: when it was posted last
_PAUSE_S = 0.1  # between two posts of a display that is changed very often
_CHANGING = ("update", "advance", "reset", "stop_task")

Post = Callable[[Bar], None]


def install(post: Post) -> None:
    """Have `post` called for the tasks of every display of rich in this process."""
    import_hooks.when_imported("rich.progress", functools.partial(_patch, post=post))


def _patch(module: ModuleType, post: Post) -> None:
    progress = module.Progress
    if hasattr(progress, _IDS):
        return
    setattr(progress, _IDS, None)
    setattr(progress, _POSTED_S, 0.0)
    for name in _CHANGING:
        _follow(progress, name, functools.partial(_show, post=post))
    _follow(
        progress, "get_renderable", functools.partial(_show, post=post, at_once=True)
    )
    _follow(progress, "stop", functools.partial(_close, post=post))
    original = progress.remove_task

    @functools.wraps(original)
    def remove_task(self: Any, task_id: Any) -> None:
        removed = [task for task in self.tasks if task.id == task_id]
        original(self, task_id)
        for task in removed:
            _post(self, task, post, closed=True)

    progress.remove_task = remove_task


def _follow(progress: Any, name: str, act: Callable[[Any], None]) -> None:
    """Have `act` called with the display after a method of it."""
    original = getattr(progress, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        act(self)
        return result

    setattr(progress, name, method)


def _show(display: Any, post: Post, *, at_once: bool = False) -> None:
    now_s = time.monotonic()
    is_done = all(task.finished for task in display.tasks)
    if at_once or is_done or now_s - getattr(display, _POSTED_S) >= _PAUSE_S:
        setattr(display, _POSTED_S, now_s)
        for task in display.tasks:
            _post(display, task, post)


def _close(display: Any, post: Post) -> None:
    for task in display.tasks:
        _post(display, task, post, closed=True)


def _post(display: Any, task: Any, post: Post, *, closed: bool = False) -> None:
    """Post a task as a bar; one that is no longer visible once, as one that is over."""
    if getattr(display, _IDS) is None:
        setattr(display, _IDS, {})
    numbers: dict[Any, int] = getattr(display, _IDS)
    is_hidden = (
        display.disable or not task.visible or not is_standard(display.console.file)
    )
    if task.id not in numbers:
        if is_hidden:
            return
        numbers[task.id] = next(bar_ids)
    number = numbers.pop(task.id) if is_hidden else numbers[task.id]
    try:
        bar = Bar(
            id=number, desc=_plain(task.description), n=float(task.completed),
            total=None if task.total is None else float(task.total), unit="it",
            rate=task.finished_speed or task.speed, postfix="", closed=closed or is_hidden,
        )  # fmt: skip
    except (TypeError, ValueError):
        return  # the user's code counts in objects that are no numbers
    post(bar)


def _plain(description: Any) -> str:
    """Return a description without rich's markup, such as `[red]`."""
    text = sys.modules.get("rich.text")
    try:
        return (
            str(text.Text.from_markup(str(description)).plain)
            if text is not None
            else str(description)
        )
    except Exception:  # noqa: BLE001 - brackets that are no markup
        return str(description)

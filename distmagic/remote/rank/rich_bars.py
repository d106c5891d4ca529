"""Shows progress displays of rich in the user's code as bars of the rank. Lightning uses them.

A rank has no terminal, so rich itself only writes the last state. The methods of
`rich.progress.Progress` that change or draw a display are wrapped, so that they also send each
visible task as a bar. A display with its own file is unchanged.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from distmagic.remote.rank import report
from distmagic.remote.rank.bars import is_standard
from distmagic.remote.training import import_hooks
from distmagic.remote.wire.parts import Bar

_PAUSE_S = 0.1  # between two posts of a display that is changed very often
_CHANGING = ("update", "advance", "reset", "stop_task")


def install() -> None:
    """Report the tasks of every rich display in this process."""
    import_hooks.when_imported("rich.progress", _patch)


def _patch(module: ModuleType) -> None:
    progress = module.Progress
    # Attributes of a display.
    progress.distmagic_ids = None  # {number of a task: number of its bar}
    progress.distmagic_posted_s = 0.0  # when it was last posted
    for name in _CHANGING:
        import_hooks.wrap(progress, name, _change)
    import_hooks.wrap(progress, "get_renderable", _draw)
    import_hooks.wrap(progress, "stop", _stop)
    import_hooks.wrap(progress, "remove_task", _remove_task)


# ---- replacements: each is called with rich's own method, followed by that method's arguments


def _change(original: Any, display: Any, /, *args: Any, **kwargs: Any) -> None:
    original(display, *args, **kwargs)
    is_due = time.monotonic() - display.distmagic_posted_s >= _PAUSE_S
    if is_due or all(task.finished for task in display.tasks):
        _post_all(display)


def _draw(original: Any, display: Any) -> Any:
    drawn = original(display)
    _post_all(display)
    return drawn


def _stop(original: Any, display: Any) -> None:
    original(display)
    _post_all(display, closed=True)


def _remove_task(original: Any, display: Any, task_id: Any) -> None:
    removed = [task for task in display.tasks if task.id == task_id]
    original(display, task_id)
    for task in removed:
        _post(display, task, closed=True)


def _post_all(display: Any, *, closed: bool = False) -> None:
    display.distmagic_posted_s = time.monotonic()
    for task in display.tasks:
        _post(display, task, closed=closed)


def _post(display: Any, task: Any, *, closed: bool) -> None:
    """Post a task as a bar; a task that has become invisible is posted once more, as a closed
    bar.
    """
    if display.distmagic_ids is None:
        display.distmagic_ids = {}
    numbers: dict[Any, int] = display.distmagic_ids
    is_hidden = (
        display.disable or not task.visible or not is_standard(display.console.file)
    )
    if task.id not in numbers:
        if is_hidden:
            return
        numbers[task.id] = next(report.bar_ids)
    number = numbers.pop(task.id) if is_hidden else numbers[task.id]
    try:
        bar = Bar(
            id=number, desc=_plain(task.description), n=float(task.completed),
            total=None if task.total is None else float(task.total), unit="it",
            rate=task.finished_speed or task.speed, postfix="", closed=closed or is_hidden,
        )  # fmt: skip
    except (TypeError, ValueError):
        return  # the user's code counts in objects that are no numbers
    report.post_bar(bar)


def _plain(description: Any) -> str:
    """Return a description without rich's markup, such as `[red]`."""
    try:
        text = sys.modules["rich.text"].Text.from_markup(str(description))
    except Exception:  # noqa: BLE001 - brackets that are no markup
        return str(description)
    return str(text.plain)

"""Counts the steps of this rank, and makes all ranks of a run stop after the same step.

If all ranks were interrupted at one moment, some would be in one step and some in the next. Under
DistributedDataParallel that leaves most models unusable: gradients of one step are averaged with
those of another. So ranks agree:

    ask       each rank reports its number of steps, and waits after its next one
    stop_at   it continues to the common step, and raises KeyboardInterrupt after it

No rank passes the step after its count before it has an answer. So no rank has passed the highest
count of all plus one. A rank that gets no answer continues after a time limit.

A step is the end of an optimizer's `step`; without optimizers, of an iteration of `track` or of a
bar of tqdm. Steps inside a backward pass, on another thread, and in compiled code are not counted.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from distmagic.remote.training import import_hooks

PATIENCE_S = 5.0  # time that a rank waits for the step at which to stop
_OPTIMIZER = "torch.optim.optimizer"


class _Counting:
    """The counts and the request in this process.

    `thread` is the counted thread, 0 outside a run.
    """

    def __init__(self) -> None:
        self.thread = 0
        self.is_installed = False
        self.after_each: Callable[[], float] = lambda: math.inf
        self.begin()
        self.news = threading.Condition()

    def begin(self) -> None:
        self.counts: dict[str, int] = {"step": 0, "iteration": 0}
        self.stepped_s = time.monotonic()
        self.step_s = 0.0
        self.rests_until_s = 0.0
        self.is_asked = False
        self.until_s = 0.0
        self.stop: tuple[str, int] | None = None
        self.has_stopped = False


_counting = _Counting()


def install(after_each: Callable[[], float] | None = None) -> None:
    """Count the calling thread's steps from now on.

    `after_each` is called after each step of an optimizer. It returns for how many seconds it need
    not be called again.
    """
    _counting.thread = threading.get_ident()
    _counting.after_each = after_each or _counting.after_each
    _counting.rests_until_s = 0.0
    if not _counting.is_installed:
        _counting.is_installed = True
        import_hooks.when_imported(_OPTIMIZER, _count_steps)
        os.register_at_fork(after_in_child=_leave_to_parent)


def begin() -> None:
    """Restart the counts at 0, without a request."""
    with _counting.news:
        _counting.begin()


def ask(patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """Return the counts so far, and make this rank wait after its next step, until an answer or for
    `patience_s`.

    The counts are fields of a `StepCount`.
    """
    with _counting.news:
        # Before the counts are read: a rank that makes its next step meanwhile already waits.
        _counting.stop = None
        _counting.until_s = time.monotonic() + patience_s
        _counting.is_asked = True
        return {
            "steps": _counting.counts["step"],
            "iterations": _counting.counts["iteration"],
            "idle_s": time.monotonic() - _counting.stepped_s,
            "step_s": _counting.step_s,
        }


def stop_at(kind: str, number: int) -> bool:
    """Raise KeyboardInterrupt after that "step" or "iteration".

    Return False if this rank has already continued, after waiting too long.
    """
    with _counting.news:
        if not _counting.is_asked or _counting.counts[kind] > number:
            return False
        _counting.stop = kind, number
        _counting.news.notify_all()
        return True


def go_on() -> None:
    """Let this rank continue as without a request."""
    with _counting.news:
        _counting.is_asked = False
        _counting.news.notify_all()


def has_stopped() -> bool:
    """Whether this rank was stopped after a step, since `begin`."""
    return _counting.has_stopped


def iterated() -> None:
    """Count one iteration of a loop that has a bar."""
    if threading.get_ident() == _counting.thread:
        _counting.counts["iteration"] += 1
        if _counting.is_asked:
            _wait("iteration")


def _count_steps(optimizer: Any) -> None:
    torch = sys.modules["torch"]
    in_backward = torch._C._current_graph_task_id  # noqa: SLF001

    def stepped(*_: object) -> None:
        # In this order: compiled code must not depend on a count.
        if (
            torch.compiler.is_compiling()
            or in_backward() != -1
            or threading.get_ident() != _counting.thread
        ):
            return
        _counting.counts["step"] += 1
        now_s = time.monotonic()
        _counting.step_s, _counting.stepped_s = now_s - _counting.stepped_s, now_s
        if now_s >= _counting.rests_until_s:
            _counting.rests_until_s = now_s + _counting.after_each()
        if _counting.is_asked and not _is_inner(inspect.currentframe()):
            _wait("step")

    optimizer.register_optimizer_step_post_hook(stepped)


def _is_inner(hook: FrameType | None) -> bool:
    """Whether this step is inside the step of another optimizer, which has not ended yet."""
    wrapper = hook and hook.f_back
    frame = wrapper and wrapper.f_back
    while frame is not None and wrapper is not None:
        if frame.f_code is wrapper.f_code:
            return True
        frame = frame.f_back
    return False


def _wait(kind: str) -> None:
    """Wait for an answer; raise KeyboardInterrupt if this is the step to stop at, or a later
    one.
    """
    with _counting.news:
        while _counting.is_asked and _counting.stop is None:
            left_s = _counting.until_s - time.monotonic()
            if left_s <= 0:
                _counting.is_asked = False
            else:
                _counting.news.wait(left_s)
        if not _counting.is_asked or _counting.stop is None:
            return
        wanted, number = _counting.stop
        if wanted != kind or _counting.counts[kind] < number:
            return
        _counting.is_asked = False
        _counting.has_stopped = True
    raise KeyboardInterrupt(f"stopped after {kind} {_counting.counts[kind]:,}")


def _leave_to_parent() -> None:
    _counting.thread = 0  # the child is no rank
    _counting.news = threading.Condition()

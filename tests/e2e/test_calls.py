"""Ranks that make different collective calls, on real hosts: the view names them long before torch reports anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.errors import Hung, WorkerFailed
from distmagic.render.overview import overview
from distmagic.state.model import RunState
from tests.e2e import runner

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

HERE = __file__


def part(kind: str) -> None:
    """Make two calls together. Then rank 1 makes another call than rank 0."""
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    if rank == 0:
        dist.all_reduce(x)  # MARK first
    elif kind == "call":
        dist.broadcast(x, 1)  # MARK call
    elif kind == "size":
        dist.all_reduce(torch.ones(8))  # MARK size
    elif kind == "early":
        return
    while True:
        time.sleep(0.1)


def line_of(mark: str) -> int:
    """Return the number of this file's line that ends with a mark."""
    lines = Path(HERE).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# MARK {mark}"))


def words_of(state: RunState) -> list[str]:
    return [alert.text for alert in overview(state).alerts if alert.level == "warning"]


class Seen:
    """Keeps how long after the ranks' last advance the view first had words for where they are, and these words."""

    def __init__(self) -> None:
        self.after_s = 0.0
        self.words = ""

    def has_words(self, state: RunState) -> bool:
        found = [
            text for text in words_of(state) if "call 3" in text or "calls" in text
        ]
        if found:
            self.after_s = state.at_s - state.advanced_at_s
            self.words = found[0]
        return bool(found)


RANK_1 = "rank 1 (dm2, local_rank 0)"
RANK_0 = "rank 0 (dm1, local_rank 0)"


def test_ranks_that_part_are_named_by_their_calls(warm_lab):
    """The view has it within 15 s, before the hang's own limit, and torch reports nothing for its 30 minutes."""
    seen = Seen()
    error = runner.failure_warm(
        warm_lab, "dm1:1,dm2:1", part, "call", screen=runner.Watch(seen.has_words), hang_timeout_s=25.0
    )  # fmt: skip
    assert isinstance(error, Hung)
    sentence = (
        f"{RANK_1} calls broadcast [4] at {HERE}, line {line_of('call')} where {RANK_0} calls all_reduce [4] "
        f"at {HERE}, line {line_of('first')} (call 3 of the default group)"
    )
    assert sentence in error.message
    assert sentence in seen.words
    assert f"line {line_of('call')}" in error.stacks
    assert seen.after_s >= 10.0  # no step that is long is a hang


def test_ranks_that_send_different_sizes_are_named_with_both(warm_lab):
    """By itself gloo aborts a rank, and reports two numbers of bytes."""
    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", part, "size")
    assert isinstance(error, WorkerFailed)
    first, other = (f"{HERE}, line {line_of(mark)}" for mark in ("first", "size"))
    sentence = (
        f"Rank 1 (dm2, local_rank 0) calls all_reduce [8] at {other} where {RANK_0} calls all_reduce [4] at {first} "
        "(call 3 of the default group). "
    )
    assert sentence in error.hint


def test_a_rank_that_left_early_is_named_with_the_call_that_it_has_not_made(warm_lab):
    error = runner.failure_warm(warm_lab, "dm1:1,dm2:1", part, "early")
    assert isinstance(error, WorkerFailed)
    assert (
        "Rank 1 ended without call 3 of the default group, all_reduce [4], in which the others wait."
        in error.hint
    )

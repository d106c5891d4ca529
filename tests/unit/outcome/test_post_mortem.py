"""pdb in the frames of a rank that has failed: on the notebook machine, after its process has ended."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from distmagic.errors import UsageError
from distmagic.outcome.post_mortem import FailedRuns, traceback_of
from distmagic.remote.training import frames
from distmagic.remote.training.frames import Frames
from distmagic.remote.values import parcel
from distmagic.remote.wire import protocol as p
from distmagic.state.model import RunState, WorkerState

RATE = 0.5


def train(batches: list[int]) -> float:
    """Fail at the second batch."""
    total = 0.0
    for batch in batches:
        total += RATE / batch
    return total


def kept(labels: str = "train.py") -> Frames:
    with pytest.raises(ZeroDivisionError) as failed:
        train([2, 0])
    calls = failed.value.__traceback__
    assert calls is not None
    return frames.of(calls.tb_next, lambda _: labels, None)


def failed(job: str, *raised: int, first: int = 0) -> RunState:
    workers = {
        rank: WorkerState(
            rank=rank, local_rank=0, node_rank=rank, host="gpu-a", phase="failed",
            ended=p.Ended(rank=rank, restart=0, outcome="raised" if rank in raised else "signalled", result_bytes=9),
        )
        for rank in range(4)
    }  # fmt: skip
    return RunState(job=job, nodes=(), workers=workers, first_failure=first)


@pytest.fixture
def data(tmp_path):
    parcel.dump(kept(), tmp_path / "x")
    return (tmp_path / "x").read_bytes()


@pytest.fixture
def typed(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *_: lines.pop(0))
    return lines


def test_the_debugger_has_names_values_and_source(data, typed, capsys):
    runs = FailedRuns()
    assert runs.add(failed("first-run", 0, 2), {0: data}) == 0
    typed += ["p batch, total", "p [RATE * one for one in batches]", "ll", "where", "q"]
    runs.debug("first", None)
    shown = capsys.readouterr().out
    assert "> <train.py>(" in shown
    assert "(0, 0.25)" in shown
    assert "[1.0, 0.0]" in shown
    assert '"""Fail at the second batch."""' in shown
    assert re.search(r"->\t +total \+= RATE / batch\n", shown)
    assert typed == []


def test_the_newest_run_is_looked_at_and_a_rank_by_its_number(data, typed, capsys):
    runs = FailedRuns()
    runs.add(failed("one", 0), {0: data})
    runs.add(failed("two", 1, 3, first=3), {1: b"", 3: data})
    typed += ["q", "q"]
    runs.debug("", None)
    runs.debug("two", 3)
    assert capsys.readouterr().out.count("train()") == 2


def test_a_run_without_frames_is_none(data):
    runs = FailedRuns()
    assert runs.add(failed("killed"), {0: data}) is None
    assert runs.add(failed("lost", 0), {}) is None
    with pytest.raises(UsageError):
        runs.debug("", None)


@pytest.mark.parametrize("first", [None, 0])
def test_a_rank_with_frames_is_chosen_where_the_first_failure_has_none(data, first):
    state = replace(failed("of-another-kernel", 2, 3), first_failure=first)
    assert FailedRuns().add(state, {3: data, 2: data}) == 2


def test_what_has_no_frames(data, golden):
    runs = FailedRuns()
    for number in range(7):
        runs.add(failed(f"run-{number}", 0, 1, 3), {0: data, 1: data, 3: data})
    with golden.raises(UsageError):
        runs.debug("run-1-", None)
    with golden.raises(UsageError):
        FailedRuns().debug("", None)
    with golden.raises(UsageError):
        runs.debug("run-6", 2)


def test_a_value_that_this_python_can_not_rebuild_is_left_out():
    found = kept()
    values = tuple("Tensor [9] on cuda:0" if n else b"?" for n in range(len(found.values)))  # fmt: skip
    calls = traceback_of(replace(found, values=values))
    assert calls is not None
    names = calls.tb_frame.f_locals
    assert repr(names["batches"]) == "<left out: a value is not a stored value.>"
    assert repr(names["total"]) == "<left out: Tensor [9] on cuda:0>"


def test_what_is_no_frames_opens_nothing(tmp_path, golden):
    parcel.dump({"frames": 3}, tmp_path / "x")
    runs = FailedRuns()
    runs.add(failed("odd", 0), {0: (tmp_path / "x").read_bytes()})
    with golden.raises(UsageError):
        runs.debug("odd", None)
    runs.add(failed("cut", 0), {0: b"cut off"})
    with golden.raises(UsageError):
        runs.debug("cut", None)

"""A rank is asked for a profile by a file: it begins after a step, and leaves a trace, or why there is none."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.remote.training import profiling, steps
from distmagic.remote.training.profiling import Profiling


class FakeProfiler:
    """torch.profiler as far as it is used."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails_at = ""

    def profile(self) -> FakeProfiler:
        return self

    def _do(self, what: str) -> None:
        self.log.append(what)
        if what == self.fails_at:
            raise RuntimeError(f"no {what}")

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._do("export")
        Path(path).write_bytes(gzip.compress(b'{"traceEvents": []}'))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeProfiler:
    profiler = FakeProfiler()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(profiler=profiler))  # type: ignore[arg-type]
    return profiler


@pytest.fixture
def rank(tmp_path: Path) -> Profiling:
    for name in ("run", "job"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / f"stacks-{os.getpid()}").touch()
    return Profiling(tmp_path / "run", tmp_path / "job", 3)


def traces(folder: Path, profile: str = "5f0c") -> dict[str, Any]:
    names, _ = profiling.found(folder / "run", folder / "job", profile)
    return {
        name: json.loads(gzip.decompress((folder / "job" / name).read_bytes()))
        for name in names
    }


def test_a_profile_begins_after_a_step_and_ends_after_so_many(rank, torch, tmp_path):
    rank.look()
    assert torch.log == []
    profiling.ask(tmp_path / "run", "5f0c", 2)
    assert profiling.found(tmp_path / "run", tmp_path / "job", "5f0c") == ((), 1)
    rank.look()
    assert torch.log == ["start"]
    rank.look()
    assert torch.log == ["start"]
    rank.look()
    assert torch.log == ["start", "stop", "export"]
    name = f"rank3.{os.getpid()}.5f0c.json.gz"
    assert traces(tmp_path) == {name: {"traceEvents": []}}
    assert profiling.found(tmp_path / "run", tmp_path / "job", "5f0c") == ((name,), 0)
    # Asked once more for the same, as every look of the notebook does.
    profiling.ask(tmp_path / "run", "5f0c", 2)
    rank.look()
    assert len(torch.log) == 3


def test_another_profile_is_another_question(rank, torch, tmp_path):
    for profile in ("5f0c", "5f0d"):
        profiling.ask(tmp_path / "run", profile, 1)
        os.utime(tmp_path / "run" / "profile", ns=(0, int(profile, 16)))
        rank.look()
        rank.look()
    assert torch.log == ["start", "stop", "export"] * 2
    assert len(traces(tmp_path, "5f0d")) == 1


@pytest.mark.parametrize("what", ["start", "stop", "export"])
def test_a_rank_that_cant_be_profiled_says_why_and_trains_on(
    rank, torch, tmp_path, what
):
    torch.fails_at = what
    profiling.ask(tmp_path / "run", "5f0c", 1)
    for _ in range(3):
        rank.look()
    (found,) = traces(tmp_path).values()
    assert found == {"error": f"RuntimeError: no {what}"}


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    (tmp_path / "stacks-999999999").touch()
    assert profiling.found(tmp_path, tmp_path, "5f0c") == ((), 0)


@pytest.mark.parametrize(("profile", "count"), [("../x", 1), ("", 1), ("5f0c", 0)])
def test_only_a_profile_is_asked_for(tmp_path, profile, count):
    with pytest.raises(ValueError, match="is no profile"):
        profiling.ask(tmp_path, profile, count)
    assert list(tmp_path.iterdir()) == []


def test_what_is_called_after_each_step_stays_when_cells_count_them(monkeypatch):
    monkeypatch.setattr(steps, "_counting", steps._Counting())
    monkeypatch.setattr(steps.import_hooks, "when_imported", lambda *_: None)
    steps.install(print)
    steps.install()
    assert steps._counting.after_each is print


def test_what_is_called_after_each_step_rests_as_long_as_it_says(monkeypatch):
    """So that it is not to be seen beside the smallest step."""
    hooks: list[Any] = []
    optimizer = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    torch = SimpleNamespace(
        compiler=SimpleNamespace(is_compiling=lambda: False),
        _C=SimpleNamespace(_current_graph_task_id=lambda: -1),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(steps, "_counting", steps._Counting())
    monkeypatch.setattr(
        steps.import_hooks, "when_imported", lambda _, act: act(optimizer)
    )
    calls: list[int] = []

    def rests() -> float:
        calls.append(1)
        return 1000.0 if len(calls) == 3 else 0.0

    steps.install(rests)
    (stepped,) = hooks
    for _ in range(5):
        stepped()
    assert len(calls) == 3
    steps.begin()
    stepped()
    assert len(calls) == 4

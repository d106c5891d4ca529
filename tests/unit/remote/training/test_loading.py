"""How long a rank loads models is added up, once, and by name if it was most of its time."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distmagic.notebook.local_run import note_loading
from distmagic.remote.training import import_hooks, loading
from distmagic.remote.wire.events import Ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a rank, as `now`; modules of a library that stand for torch's and others'."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loading.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(import_hooks._finder, "patches", {})
    return clock


def library(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> Any:
    """Return a module as transformers: a subclass is loaded by a function of its own, in which torch.load runs."""
    torch, models = ModuleType("torch.serialization"), ModuleType("m")

    def load(f: str, took_s: float = 4.0) -> str:
        clock.now += took_s
        return f

    class PreTrainedModel:
        @classmethod
        def from_pretrained(cls, pretrained_model_name_or_path: str) -> type:
            torch.load("weights.bin")
            clock.now += 1.0
            return cls

    class Qwen(PreTrainedModel):
        pass

    torch.load, models.PreTrainedModel, models.Qwen = load, PreTrainedModel, Qwen
    monkeypatch.setitem(sys.modules, "torch.serialization", torch)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", models)
    return SimpleNamespace(torch=torch, models=models)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_is_loaded_counts_once_under_its_own_name(
    monkeypatch, clock, by_name
):
    there = library(monkeypatch, clock)
    loads = loading.Loading()
    assert loads.what == ""
    name = "Qwen/Qwen3-0.6B"
    load = there.models.Qwen.from_pretrained
    got = load(pretrained_model_name_or_path=name) if by_name else load(name)
    assert got is there.models.Qwen
    assert (loads.total_s, loads.what) == (5.0, "Qwen/Qwen3-0.6B")
    assert there.torch.load("a.pt", took_s=1.0) == "a.pt"
    assert (loads.total_s, loads.what) == (6.0, "Qwen/Qwen3-0.6B")
    clock.now += 10.0
    assert loads.what == "", "the training took longer"


def test_a_small_file_is_not_worth_a_word(monkeypatch, clock):
    there = library(monkeypatch, clock)
    loads = loading.Loading()
    there.torch.load("a.pt", took_s=2.0)
    assert loads.what == ""


def test_ranks_that_stay_are_offered_once_when_a_run_loads_again(capsys, golden):
    ended = Ended(
        rank=2, restart=0, outcome="returned", loaded="/data/a.pt", loading_s=8.2
    )
    state: Any = SimpleNamespace(
        workers={2: SimpleNamespace(ended=ended), 3: SimpleNamespace(ended=None)}
    )
    loaded: set[str] = set()
    note_loading(state, loaded)
    assert capsys.readouterr().out == ""
    note_loading(state, loaded)
    golden(capsys.readouterr().out)
    note_loading(state, loaded)
    assert capsys.readouterr().out == ""

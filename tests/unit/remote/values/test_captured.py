"""Which of the values that came with a call it has changed on its rank."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from distmagic.remote.values.captured import changed, marks


class Trainer:
    def __init__(self):
        self.losses = []
        self.step = 0


Trainer.__module__ = "__main__"


class Odd(dict):
    def __getattribute__(self, name):
        raise RuntimeError(name)


def of_itself():
    value: list = []
    value.append(value)
    return value


def setattr_(value, name, new):
    setattr(value, name, new)


# A value, and what the call does with it; then what it returns of it.
CHANGES = {
    "a list": (list, lambda v: v.append(1)),
    "a dict": (dict, lambda v: v.update(loss=1)),
    "a list in a dict": (lambda: {"loss": []}, lambda v: v["loss"].append(1)),
    "a defaultdict": (lambda: defaultdict(list), lambda v: v["loss"].append(1)),
    "a set": (set, lambda v: v.add(1)),
    "a deque": (deque, lambda v: v.append(1)),
    "an item": (lambda: [1, 2], lambda v: v.__setitem__(0, 3)),
    "an object": (Trainer, lambda v: setattr_(v, "step", 1)),
    "a list of an object": (Trainer, lambda v: v.losses.append(1)),
    "objects in a list": (lambda: [Trainer()], lambda v: v[0].losses.append(1)),
    "a long list": (lambda: [0] * 100_000, lambda v: v.append(1)),
}
SAME = {
    "read": (lambda: [1, 2], len),
    "sorted as it was": (lambda: [1, 2], lambda v: v.sort()),
    "an odd one": (Odd, lambda v: None),
    "a function": (lambda: len, lambda v: v([])),
    "of itself": (of_itself, lambda v: None),
}


@pytest.mark.parametrize("name", [*CHANGES, *SAME])
def test_a_value_that_was_changed_in_place_is_named(name):
    make, act = {**CHANGES, **SAME}[name]
    names = {"value": make(), "_hidden": [], "other": [1]}
    before = marks(names)
    names["_hidden"].append(1)
    act(names["value"])
    expected = "value" if name in CHANGES else ""
    assert changed(names, before, None) == expected
    assert changed(names, before, 0.5) == expected
    # What comes back is not lost.
    for result in (names["value"], [names["value"]], {"x": names["value"]}):
        assert changed(names, before, result) == ""


def test_a_name_that_got_another_value():
    names = {"best": 1, "kept": 2}
    before = marks(names)
    names.update(best=3, new=4)
    assert changed(names, before, None) == "best"
    del names["best"]
    assert changed(names, before, None) == ""


def test_of_many_names_some_are_named():
    names = {f"v{n}": [] for n in range(9)}
    before = marks(names)
    for value in names.values():
        value.append(1)
    assert changed(names, before, None) == "v0, v1, v2, v3, v4, ..."


def train(torch, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


class Meta(type):
    pass


class Lazy:
    """Opens a file at its first use, and counts; of the notebook."""

    __module__ = "__main__"

    def __init__(self):
        self.file = None
        self.seen = {}
        self.count = 0


@pytest.mark.slow
def test_what_was_trained_is_named_unless_the_call_returns_something():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    acts = {
        "array": lambda v: v.__setitem__((1, 0), 5.0),
        "turned": lambda v: v.t().add_(1),
        "model": lambda v: train(torch, v),
        "data": lambda v: v.weight.data.fill_(7.0),
        "norm": lambda v: v(torch.ones(3, 2)),
        "tensor": lambda v: v.add_(1),
        "same": lambda v: v(torch.ones(3, 2)),
    }
    made = {
        "array": numpy.zeros((3, 2)).T,
        "turned": torch.zeros(2, 3).t(),
        "model": torch.nn.Linear(2, 1), "data": torch.nn.Linear(2, 1), "norm": torch.nn.BatchNorm1d(2),
        "tensor": torch.zeros(2), "same": torch.nn.Linear(2, 1),
    }  # fmt: skip
    before = marks(made)
    for name, act in acts.items():
        act(made[name])
    assert changed(made, before, None) == "array, data, model, norm, tensor, ..."
    assert changed(made, before, 0.5) == "array, data, model, norm, tensor, ..."
    assert changed(made, before, {"loss": torch.zeros(1)}) == "array"
    assert changed(made, before, [0.5, made["same"].weight]) == "array"


def test_what_was_only_read_or_moved_is_not_named():
    torch = pytest.importorskip("torch")
    made = {
        "model": torch.nn.Linear(2, 1), "moved": torch.nn.Linear(2, 1), "nan": float("nan"), "kind": Meta("Kind", (), {}),
        "lazy": Lazy(), "history": [],
    }  # fmt: skip
    before = marks(made)
    with torch.no_grad():
        for parameter in made["model"].parameters():
            parameter.copy_(parameter.clone())
    made["moved"].to(torch.float64)
    made["lazy"].file = "opened"
    made["lazy"].seen["a"] = 1
    made["history"].append(1)
    assert changed(made, before, {"out": {"history": made["history"]}}) == ""
    made["lazy"].count = 3
    assert changed(made, before, None) == "history, lazy"

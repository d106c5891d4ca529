"""Exceptions, and objects with a `__getattr__`, through a parcel."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.remote.values import parcel


def through(value, tmp_path: Path):
    parcel.dump(value, tmp_path / "value")
    return parcel.load(tmp_path / "value")


class Diverged(ValueError):
    def __init__(self, step, *, loss):
        super().__init__(f"at step {step}")
        self.step, self.loss = step, loss


class Reduced(Diverged):
    def __reduce__(self):
        return _reduced, (self.step,)


def _reduced(step):
    return Reduced(step, loss=7)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (Diverged(3, loss=0.5), {"step": 3, "loss": 0.5}),
        (Reduced(3, loss=0.5), {"step": 3, "loss": 7}),
        (KeyError("x"), {}),
        (OSError(2, "No such file", "a.txt"), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {}),
        (StopIteration(5), {}),
    ],
)
def test_an_exception_comes_back_whatever_its_init_wants(error, shown, tmp_path):
    found = through([error], tmp_path)[0]
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)  # fmt: skip
    assert vars(found) == shown


class Lazy:
    def __init__(self):
        self.values = {"a": 1}

    def __getattr__(self, name):
        return self.values[name]


class Slotted:
    __slots__ = ("__dict__", "inner")

    def __init__(self):
        self.inner, self.more = [1], 2

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Attributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Settled(Lazy):
    def __setstate__(self, state):
        self.values = {"a": 2}


@pytest.mark.parametrize(
    ("make", "look", "seen"),
    [
        (Lazy, lambda one: one.a, 1),
        (Slotted, lambda one: (one.count(1), one.more), (1, 2)),
        (lambda: Attributes(a=1), lambda one: (one.a, vars(one)), (1, {})),
        (Settled, lambda one: one.a, 2),
    ],
)
def test_an_object_that_hands_on_its_attributes_travels(make, look, seen, tmp_path):
    one = make()
    first, second = through([one, one], tmp_path)
    assert look(first) == seen
    assert first is second

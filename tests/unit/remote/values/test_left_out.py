"""What is kept of a result that can't be pickled whole."""

from __future__ import annotations

import runpy
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from distmagic.remote.values import left_out, parcel


@dataclass(frozen=True)
class Outcome:
    loss: float
    guard: object = None
    history: list[object] = field(default_factory=list)


Pair = namedtuple("Pair", "first second")  # noqa: PYI024


def kept(value: object, tmp_path) -> tuple[object, str]:
    size, sentence = left_out.dump(value, tmp_path / "result")
    assert size == (tmp_path / "result").stat().st_size
    return parcel.load(tmp_path / "result"), sentence


def test_a_value_that_can_be_pickled_is_kept_whole(tmp_path):
    assert kept({"loss": [0.5]}, tmp_path) == ({"loss": [0.5]}, "")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        pytest.param(
            {"loss": 0.5, "lock": threading.Lock()}, "result['lock']", id="dict"
        ),
        pytest.param(
            OrderedDict(lock=threading.Lock()), "result['lock']", id="OrderedDict"
        ),
        pytest.param([1, [2, threading.Lock()]], "result[1][1]", id="list in a list"),
        pytest.param(
            (1, {"a": threading.Lock()}), "result[1]['a']", id="dict in a tuple"
        ),
        pytest.param(Pair(1, threading.Lock()), "result[1]", id="named tuple"),
        pytest.param(Outcome(0.5, threading.Lock()), "result.guard", id="dataclass"),
        pytest.param(
            Outcome(0.5, None, [threading.Lock()]),
            "result.history[0]",
            id="list in a dataclass",
        ),
    ],
)
def test_what_can_not_be_pickled_is_named_by_its_path_and_all_else_is_kept(
    value, path, tmp_path, golden
):
    rest, sentence = kept(value, tmp_path)
    golden(sentence)
    assert type(rest) is type(value)
    hole = eval(path, {"result": rest})
    assert isinstance(hole, left_out.LeftOut)
    golden(repr(hole))


def test_the_other_parts_are_as_they_were(tmp_path):
    shared = [1, 2]
    rest, _ = kept({"a": shared, "b": shared, "lock": threading.Lock()}, tmp_path)
    assert rest["a"] == [1, 2]
    assert rest["a"] is rest["b"]
    rest, _ = kept(Outcome(0.5, threading.Lock(), [1]), tmp_path)
    assert (rest.loss, rest.history) == (0.5, [1])


def test_of_many_parts_the_first_are_named_and_the_others_counted(tmp_path):
    rest, sentence = kept({n: threading.Lock() for n in range(10)}, tmp_path)
    assert len(rest) == 10
    assert sentence.startswith(
        "result[0] is a lock, which can't be pickled; result[1] is a lock"
    )
    assert sentence.endswith("; and 7 more")


def test_a_key_that_can_not_be_pickled_takes_its_value_along(tmp_path):
    rest, sentence = kept({threading.Lock(): 1, "loss": 2}, tmp_path)
    assert rest == {"loss": 2}
    assert sentence.startswith("the key of result[<unlocked _thread.lock object")


def test_a_value_that_holds_itself_ends(tmp_path):
    value: dict[str, object] = {"lock": threading.Lock(), "loss": 2}
    value["self"] = value
    rest, sentence = kept(value, tmp_path)
    assert rest["loss"] == 2
    assert "result['self'] is a dict, which can't be pickled" in sentence


def test_a_value_of_very_many_parts_ends(tmp_path):
    rest, sentence = kept(
        [Fraction(n) for n in range(left_out.MAX_TRIALS + 5)] + [threading.Lock()],
        tmp_path,
    )
    assert rest[:2] == [Fraction(0), Fraction(1)]
    assert "(OverflowError: it has too many parts to try each of them)" in sentence
    assert len(rest) == left_out.MAX_TRIALS + 6


def test_a_value_of_which_nothing_can_be_kept_raises(tmp_path, golden):
    with pytest.raises(parcel.Unpicklable) as caught:
        left_out.dump(threading.Lock(), tmp_path / "result")
    golden(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_globals_of_a_program_are_known(tmp_path):
    (tmp_path / "train.py").write_text("loss = 0.5\n")
    assert left_out.is_program(
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    )
    assert left_out.is_program(runpy.run_module("this", run_name="__main__"))
    assert not left_out.is_program({"__name__": "x", "loss": 0.5})
    assert not left_out.is_program({})
    assert not left_out.is_program(None)

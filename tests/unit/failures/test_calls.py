"""Where ranks part by their collective calls: every pair of kinds, and what is no parting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.failures.calls import Parting, parting
from distmagic.remote.wire import protocol as p


def calls(*names: str, waits: int = 0, first: int = 1) -> tuple[p.CallRecord, ...]:
    """Return calls, each as `all_reduce [4]`; the last `waits` of them are not over."""
    found = []
    for index, name in enumerate(names):
        word, _, sizes = name.partition(" ")
        is_over = index < len(names) - waits
        found.append(
            p.CallRecord(number=first + index, name=word, sizes=sizes, is_over=is_over)
        )
    return tuple(found)


def group(*names: str, waits: int = 1, first: int = 1, **more: object) -> p.GroupRecord:
    made = calls(*names, waits=waits, first=first)
    return p.GroupRecord(backend="gloo", calls=made, **more)


def found(*ranks: object) -> Parting | None:
    """Return where ranks part; each rank is a group, or groups."""
    answers = []
    for rank, groups in enumerate(ranks):
        each = groups if isinstance(groups, tuple) else (groups,)
        answers.append(p.Stacks(request_id="a", rank=rank, local_rank=0, calls=each))
    return parting(answers)


def sides(one: Parting | None) -> list[tuple[tuple[int, ...], str]]:
    assert one is not None
    return [(side.ranks, side.call) for side in one.sides]


KINDS = ("all_reduce [4]", "broadcast [4]", "all_gather [4]", "reduce [4]", "barrier", "scatter [2, 4]", "gather [4]",
         "reduce_scatter [4]", "all_to_all [4]", "all_reduce [9]", "all_reduce [4] Double")  # fmt: skip


@pytest.mark.parametrize("mine", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_every_pair_of_calls(mine, other):
    one = found(group("barrier", mine), group("barrier", other))
    assert one is not None
    if mine == other:
        assert (one.kind, one.number, one.missing) == ("together", 2, ())
    else:
        assert (one.kind, one.number, one.group) == (
            "different",
            2,
            "the default group",
        )
        assert [ranks for ranks, _ in sides(one)] == [(0,), (1,)]


def test_the_first_call_in_which_they_part_counts():
    one = found(
        group("barrier", "broadcast [4]", "all_reduce [4]", waits=2),
        group("barrier", "all_reduce [4]", "all_reduce [4]", waits=1),
        group("barrier", "all_reduce [4]", "all_reduce [4]", waits=1),
    )
    assert sides(one) == [((1, 2), "all_reduce [4]"), ((0,), "broadcast [4]")]
    assert one.number == 2
    assert [side.waiting for side in one.sides] == [(), (0,)]


@pytest.mark.parametrize("call", ["scatter", "gather", "all_to_all", "alltoall_base"])
def test_calls_that_may_take_different_sizes_are_the_same(call):
    assert found(group(f"{call} [4]"), group(f"{call} [9]")).kind == "together"


def test_a_rank_that_has_not_entered_a_call_is_behind():
    one = found(
        group("barrier", "all_reduce [4]", waits_s=12.0), group("barrier", waits=0)
    )
    assert (one.kind, one.number, one.missing, one.waits_s) == ("behind", 2, (1,), 12.0)
    assert sides(one) == [((0,), "all_reduce [4]")]


def test_a_source_that_went_on_waits_for_nobody():
    """A broadcast is over at its source before the others have entered it."""
    assert (
        found(group("barrier", "broadcast [4]", waits=0), group("barrier", waits=0))
        is None
    )
    assert found(group("barrier", waits=0), group("barrier", waits=0)) is None
    assert found() is None


def test_a_rank_that_left_early_is_behind():
    waiting = group("barrier", "all_reduce [4]")
    assert found(waiting, waiting, group("barrier", waits=0)).missing == (2,)
    # Of a rank whose calls are not known nothing is said.
    assert found(waiting, ()).kind == "together"


def test_groups_count_for_themselves():
    inner = {"name": "tp", "ranks": "0-1"}
    first = (group("barrier", waits=0), group("all_reduce [4]", **inner))
    second = (group("barrier", waits=0), group("broadcast [4]", **inner))
    third = group("barrier", waits=0)
    one = found(first, second, third)
    assert (one.kind, one.group, one.missing) == (
        "different",
        "group tp of ranks 0-1",
        (),
    )
    other = {"ranks": "2,5"}
    assert found(third, third, group("barrier", **other)).kind == "together"
    assert (
        found(third, group(), group("barrier", **other)).group
        == "the group of ranks 2, 5"
    )


def test_groups_whose_calls_are_crossed_name_one_that_waits():
    one = found(
        (group("all_reduce [4]", name="a"), group(name="b")),
        (group(name="a"), group("all_reduce [4]", name="b")),
    )
    assert (one.kind, one.group, one.missing) == ("behind", "group a", (1,))


def test_of_two_partings_the_one_whose_ranks_wait_for_nobody_counts():
    """Rank 0 waits for rank 1, which waits for rank 2."""
    pair = {"name": "pair", "ranks": "1-2"}
    one = found(
        group("all_reduce [4]"),
        (group(waits=0), group("barrier", **pair)),
        (group(waits=0), group(waits=0, **pair)),
    )
    assert (one.group, one.missing) == ("group pair of ranks 1-2", (2,))


def test_two_backends_of_a_group_count_for_themselves():
    nccl = replace(group("all_reduce [8]", waits=1), backend="nccl")
    one = found((group("barrier", waits=0), nccl), (group("barrier", waits=0), nccl))
    assert (one.kind, sides(one)) == ("together", [((0, 1), "all_reduce [8]")])


def test_calls_that_are_not_recorded_any_more_part_nobody():
    """Each rank keeps its last calls only; one that is far behind is named all the same."""
    old = group(*["all_reduce [4]"] * 3, "barrier", first=1)
    new = group("broadcast [4]", "barrier", first=3)
    assert found(old, new).number == 3
    ahead = group(*["all_reduce [4]"] * 50, waits=50, first=900)
    one = found(ahead, group("barrier", waits=0, first=7))
    assert (one.kind, one.number, one.missing) == ("behind", 900, (1,))


def test_a_call_that_only_some_have_recorded_parts_nobody():
    """Torch records no monitored_barrier; it counts it all the same."""
    gap = replace(
        group(), calls=(*calls("barrier"), *calls("all_reduce [4]", waits=1, first=5))
    )
    whole = group("barrier", waits=0)
    one = found(
        gap,
        replace(
            whole, calls=(*calls("barrier"), *calls("all_reduce [4]", waits=1, first=5))
        ),
    )
    assert (one.kind, one.number) == ("together", 5)


NUMBERS = st.integers(0, 6)
CALLS = st.builds(p.CallRecord, number=NUMBERS, name=st.sampled_from(["a", "b"]), sizes=st.text(max_size=3), is_over=st.booleans())  # fmt: skip
GROUPS = st.builds(p.GroupRecord, ranks=st.one_of(st.text(max_size=5), st.sampled_from(["0-1", "9999999999999-", "1-99999999999"])), calls=st.lists(CALLS, max_size=4).map(tuple))  # fmt: skip


@given(st.lists(st.lists(GROUPS, max_size=3).map(tuple), max_size=4))
def test_whatever_ranks_say_is_compared(ranks):
    one = found(*ranks)
    assert one is None or one.sides

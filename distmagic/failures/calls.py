"""Finds the first collective call at which the ranks of a process group diverge. Pure.

    Stacks of ranks  --parting-->  Parting: the ranks made different calls, some wait for others,
                                   or all wait together

Ranks of a group must make the same calls in the same order. Calls that are no longer recorded are
ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import Literal

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.protocol import CallRecord, GroupRecord, Stacks
from distmagic.request.flag_values import rank_numbers

# Prefixes of the names of calls in which ranks may use different sizes.
_UNEVEN = ("scatter", "gather", "all_to_all", "alltoall")

_Group = tuple[str, str, str]  # name, ranks, backend


@frozen
class Side:
    """Ranks that made the same call, as text: `broadcast [4]`.

    `waiting` are those of them that are still in it. `places` has the line that made the call, for
    each rank: "" if it is unknown.
    """

    ranks: tuple[int, ...]
    call: str
    waiting: tuple[int, ...]
    places: Mapping[int, str] = field(default_factory=dict)

    def place(self, ranks: Collection[int]) -> str:
        """Return the one line that made the call on these ranks; "" for several, or none."""
        known = {self.places.get(rank, "") for rank in ranks} - {""}
        return known.pop() if len(known) == 1 else ""


@frozen
class Parting:
    """The first call, by its number, at which the ranks of a group diverge."""

    # "different": they made different calls. "behind": all ranks of one side wait for those in
    # `missing`. "together": all wait, and none is missing
    kind: Literal["different", "behind", "together"]
    number: int
    group: str
    sides: tuple[Side, ...]  # the unusual calls come last
    missing: tuple[int, ...] = ()
    waits_s: float = 0.0  # for how long ranks have waited


def parting(answers: Iterable[Stacks]) -> Parting | None:
    """Return where ranks diverge, by their recorded calls; None if the records show nothing.

    Of several groups, one with different calls is preferred, then one whose missing ranks
    themselves wait for no other.
    """
    groups: dict[_Group, dict[int, GroupRecord]] = {}
    told = []
    for answer in answers:
        if answer.calls:
            told.append(answer.rank)
        for group in answer.calls:
            key = (group.name, group.ranks, group.backend)
            groups.setdefault(key, {})[answer.rank] = group
    found = []
    waiting: set[int] = set()
    for key, made in groups.items():
        members = _members(key[1])
        there = [rank for rank in told if members is None or rank in members]
        one = _parting_of(_name(key), made, sorted({*there, *made}))
        if one is not None:
            found.append(one)
            waiting.update(r for side in one.sides if side.waiting for r in side.ranks)

    def rank_of(one: Parting) -> tuple[bool, bool, bool]:
        return (
            one.kind != "different",
            one.kind == "together",
            bool(waiting.intersection(one.missing)),
        )

    return min(found, key=rank_of, default=None)


def _parting_of(
    group: str, made: Mapping[int, GroupRecord], members: Collection[int]
) -> Parting | None:
    tables = {
        rank: {call.number: call for call in one.calls} for rank, one in made.items()
    }
    last = {rank: max(table, default=0) for rank, table in tables.items()}
    first = max((min(table) for table in tables.values() if table), default=0)
    waits_s = max((one.waits_s for one in made.values()), default=0.0)
    for number in sorted({one for table in tables.values() for one in table}):
        there = {r: table[number] for r, table in tables.items() if number in table}
        missing = tuple(rank for rank in members if last.get(rank, 0) < number)
        is_waited_in = any(not call.is_over for call in there.values())
        sides = _sides(there)
        if number < first and not (missing and is_waited_in):
            continue  # no longer recorded by all
        if len(sides) > 1:
            return Parting(kind="different", number=number, group=group, sides=sides)
        if not is_waited_in or not (missing or number == max(last.values())):
            continue
        return Parting(
            kind="behind" if missing else "together",
            number=number,
            group=group,
            sides=sides,
            missing=missing,
            waits_s=waits_s,
        )
    return None


def _sides(made: Mapping[int, CallRecord]) -> tuple[Side, ...]:
    """Return which ranks made which call: largest group first, then by lowest rank."""
    together: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(made.items()):
        sizes = "" if call.name.startswith(_UNEVEN) else call.sizes
        together.setdefault((call.name, sizes), []).append(rank)
    ordered = sorted(together.items(), key=lambda item: (-len(item[1]), item[1]))
    return tuple(
        Side(
            ranks=tuple(ranks),
            call=" ".join(part for part in key if part),
            waiting=tuple(rank for rank in ranks if not made[rank].is_over),
            places={rank: _place(made[rank]) for rank in ranks},
        )
        for key, ranks in ordered
    )


def _place(call: CallRecord) -> str:
    return next((f"{one.file}, line {one.line}" for one in call.frames), "")


def _members(ranks: str) -> Collection[int] | None:
    """Return the ranks of `0-3,8`, None for all; an empty collection for an invalid text."""
    try:
        return set(rank_numbers(ranks, "")) if ranks else None
    except UsageError:
        return ()


def _name(group: _Group) -> str:
    name, ranks, _ = group
    if not name and not ranks:
        return "the default group"
    words = f"group {name}" if name else "the group"
    return f"{words} of ranks {ranks.replace(',', ', ')}" if ranks else words

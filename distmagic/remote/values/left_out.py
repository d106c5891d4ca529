"""Pickles the picklable parts of a value: some parts of dicts, lists, tuples and dataclasses are
left out.

A `LeftOut` replaces each part that is left out, so that keys, positions and fields stay the same.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from distmagic.remote.values import parcel
from distmagic.remote.values.reductions.source_form import SourceForm
from distmagic.remote.values.unpicklable import (
    MAX_TRIALS,
    UnpicklablePart,
    ValuePart,
    below,
    describe,
    is_atom,
    parts,
)

_NAMED_AT_MOST = 3
_OF_A_PROGRAM = {"__name__", "__builtins__", "__loader__", "__spec__"}


@dataclass(frozen=True)
class LeftOut:
    """Replaces a part of a result that could not be pickled; `why` describes the part."""

    why: str

    def __repr__(self) -> str:
        return f"<left out: {self.why}>"


def dump(
    value: object, path: str | os.PathLike[str], source: SourceForm | None = None
) -> tuple[int, str]:
    """Write a result to `path`, without the parts that can't be pickled; with `source`, without
    byte code.

    Return the size of the file in bytes, and a sentence about the parts left out, "" if there are
    none. The path of a part starts with `result`. Raises `parcel.Unpicklable` if no part of the
    value can be pickled, and OSError.
    """
    try:
        return parcel.dump(value, path, source=source), ""
    except parcel.Unpicklable:
        sieve = _Sieve(source)
        rest = sieve.sifted(
            ValuePart(owner="", path="result", value=value), frozenset()
        )
        if rest is value or isinstance(rest, LeftOut):
            raise
        return parcel.dump(rest, path, source=source), sieve.sentence


def is_program(value: object) -> bool:
    """Whether a value is the globals of a program, as from `runpy.run_path`: a user does not want
    them as a result.
    """
    return type(value) is dict and value.keys() >= _OF_A_PROGRAM


class _Sieve:
    """Tries the parts of one value, and records those that are left out."""

    def __init__(self, source: SourceForm | None) -> None:
        self._source = source
        self._left_out: list[str] = []
        self._trials = 0

    @property
    def sentence(self) -> str:
        """A sentence about the parts left out."""
        named = "; ".join(self._left_out[:_NAMED_AT_MOST])
        more = len(self._left_out) - _NAMED_AT_MOST
        return f"{named}; and {more:,} more" if more > 0 else named

    def sifted(self, part: ValuePart, around: frozenset[int]) -> object:
        """Return a part unchanged if it can be pickled, else the rest of it.

        `around` has the ids of the values around it.
        """
        error = self._why_not(part.value)
        if error is None:
            return part.value
        if id(part.value) not in around:
            rest = self._taken_apart(part, around | {id(part.value)})
            if rest is not None:
                return rest
        cause = UnpicklablePart(part=part, what=describe(part.value), error=error)
        self._left_out.append(cause.sentence)
        return LeftOut(cause.sentence)

    def _taken_apart(self, part: ValuePart, within: frozenset[int]) -> object:
        """Return a copy with the parts that can be pickled; None for a type that can't be taken
        apart.
        """
        value: Any = part.value
        kind: Any = type(value)
        kept: Any
        if kind in (dict, OrderedDict):
            kept = kind()
            for key, one in zip(value, parts(part), strict=True):
                error = self._why_not(key)
                if error is None:
                    kept[key] = self.sifted(one, within)
                else:
                    why = f"can't be pickled ({type(error).__name__})"
                    self._left_out.append(f"the key of {one.path} {why}")
            return kept
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        if kind in (list, tuple) or is_named:
            rest = [self.sifted(one, within) for one in parts(part)]
            return value._make(rest) if is_named else kind(rest)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kept = copy.copy(value)
            for field in dataclasses.fields(kept):
                if hasattr(kept, field.name):
                    one = below(part, f".{field.name}", getattr(kept, field.name))
                    # It may be frozen.
                    object.__setattr__(kept, field.name, self.sifted(one, within))
            return kept
        return None

    def _why_not(self, value: object) -> Exception | None:
        """Return why a value can't be pickled, None if it can.

        Above a limit of trials every value counts as not picklable.
        """
        if is_atom(value):
            return None
        self._trials += 1
        if self._trials > MAX_TRIALS:
            return OverflowError("it has too many parts to try each of them")
        return parcel.why_not(value, source=self._source)

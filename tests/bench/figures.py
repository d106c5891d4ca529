"""Rows of figures: what was measured of ours and of theirs, and whether a target is met. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

Of = Literal["ratio", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some figures, and the smallest and the largest of them."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At most `limit`: of the ratio ours / theirs, or of our own figure, in the row's unit."""

    limit: float
    of: Of = "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One comparison. `ours` and `theirs` are in `unit`, a figure a round; rounds of both stand side by side.

    Without `theirs` there is nothing to compare with, or it could not be run: `note` says why.
    """

    what: str
    unit: str
    ours: tuple[float, ...]
    against: str = ""
    theirs: tuple[float, ...] = ()
    target: Target | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one section has measured, and when."""

    name: str
    title: str
    rows: tuple[MetricRow, ...]
    when: str
    took_s: float
    machine: str


def spread(figures: tuple[float, ...]) -> Spread | None:
    """Return median, least and most; None for no figure."""
    if not figures:
        return None
    return Spread(
        median=statistics.median(figures), least=min(figures), most=max(figures)
    )


def ratios(row: MetricRow) -> tuple[float, ...]:
    """Return ours / theirs of each round; where the numbers of rounds differ, each of ours by their median."""
    if not row.ours or not row.theirs:
        return ()
    pairs = (
        row.theirs
        if len(row.theirs) == len(row.ours)
        else (statistics.median(row.theirs),) * len(row.ours)
    )
    return tuple(a / b if b else math.inf for a, b in zip(row.ours, pairs, strict=True))


def judged(row: MetricRow) -> Spread | None:
    """Return what the row's target speaks of, None without a target or without a figure."""
    if row.target is None:
        return None
    return spread(ratios(row) if row.target.of == "ratio" else row.ours)


def verdict(row: MetricRow) -> str:
    """Return "met", "missed", "not measured" or, without a target, ""."""
    if row.target is None:
        return ""
    found = judged(row)
    if found is None:
        return "not measured"
    return "met" if found.median <= row.target.limit else "missed"

"""Sizes and numbers in words, for messages."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """Return a size with its unit: 1.5 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return plural(round(size_bytes), "byte")


def plural(number: int, noun: str) -> str:
    """Return `1 rank`, `1024 ranks`, `12,345 ranks`."""
    digits = f"{number:,}" if number >= 10_000 else number
    return f"{digits} {noun}{'s' * (number != 1)}"


def allowance_gib(size_bytes: int) -> int:
    """Return a round number of GiB that has room for this size: a value for --payload-limit."""
    allowed = 1
    while allowed << 30 < 1.1 * size_bytes:
        allowed *= 2
    return allowed

"""Packages that bring systems of their own, as if they were installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distmagic.request import systems

TOY = "toy = tests.builders.toy_system:SYSTEM"


@contextmanager
def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: str
) -> Iterator[None]:
    """Have a package be installed whose entry points bring systems."""
    about = folder / "toys-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    lines = "".join(f"{entry}\n" for entry in entries)
    (about / "entry_points.txt").write_text(f"[{systems.GROUP}]\n{lines}")
    monkeypatch.syspath_prepend(folder)
    systems.systems.cache_clear()
    try:
        yield
    finally:
        systems.systems.cache_clear()

"""Folders for a section's own files, gone after it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import FOLDER


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Yield an empty folder below build/bench, which hosts of the lab see too; remove it afterwards."""
    folder = FOLDER / f"scratch-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Have what distmagic keeps on this machine go into `folder` meanwhile."""
    os.environ["DISTMAGIC_HOME"] = str(folder)
    try:
        yield
    finally:
        del os.environ["DISTMAGIC_HOME"]

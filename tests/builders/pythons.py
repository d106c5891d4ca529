"""Other Pythons of this machine. They need no package of their own, nor torch."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_MINORS = tuple(minor for minor in range(10, 15) if minor != sys.version_info[1])


@functools.cache
def python_of_minor(minor: int) -> str:
    """Return Python 3.`minor` of this machine, "" if there is none."""
    places = Path.home().glob(f".pyenv/versions/*/bin/python3.{minor}")
    for found in (*map(str, places), shutil.which(f"python3.{minor}")):
        if found and subprocess.run([found, "-c", ""], check=False).returncode == 0:
            return found
    return ""


def another_python(minors: tuple[int, ...] = OTHER_MINORS) -> str:
    """Return a Python of one of these minor versions; skip the test where there is none."""
    for minor in minors:
        if found := python_of_minor(minor):
            return found
    pytest.skip("there is no such other Python on this machine")

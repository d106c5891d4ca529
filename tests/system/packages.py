"""Packages of the extra `test` that tests give to hosts or look into, without importing them here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.system.components import in_ci


def folder_of(package: str) -> Path:
    """Return the folder in which a package is installed; skip the test where there is none, in CI fail it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        reason = f"{package} is not installed here: it is one of the extra `test`"
        pytest.fail(f"CI: {reason}") if in_ci() else pytest.skip(reason)
    return Path(spec.origin).parents[1]

"""Packages that take seconds to load: every worker of the tests collects all tests, and few run those that need one."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """A package that is imported when something of it is first used. Without it the test module is skipped."""

    def __init__(self, name: str) -> None:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest and hypothesis ask all names of a test module for marks of theirs.
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

"""A home of its own for each test: what this machine keeps is not touched."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))

"""A home of its own for each test, whose blobs are what it sends."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path_factory.mktemp("home")))

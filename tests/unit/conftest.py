"""What unit tests of several packages have in common: this process as the kernel of a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from distmagic.names import owner


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home of distmagic for this test alone, which is not made yet."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def project(tmp_path) -> Path:
    """An empty folder, in no git repository."""
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.fixture
def kernel(monkeypatch):
    """Return a function that makes this process the kernel of a connection file, with the variables given; it returns its owner."""

    def be(connection_file: str, session_name: str = "", vscode: str = "") -> str:
        app = SimpleNamespace(
            initialized=lambda: True,
            instance=lambda: SimpleNamespace(connection_file=connection_file),
        )
        module = ModuleType("ipykernel.kernelapp")
        module.IPKernelApp = app
        monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", module)
        monkeypatch.setenv("JPY_SESSION_NAME", session_name)
        if vscode:
            monkeypatch.setattr(
                sys.modules["__main__"], "__vsc_ipynb_file__", vscode, raising=False
            )
        return owner()

    return be

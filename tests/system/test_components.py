"""What is said about components that are missing, and the rule for CI."""

import pytest

from tests.system import __main__ as command
from tests.system import components
from tests.system.components import Component


@pytest.fixture
def nothing(monkeypatch):
    """Hide every program."""
    monkeypatch.setattr(Component, "path", lambda self: None)
    monkeypatch.setattr(components.os, "geteuid", lambda: 0)
    monkeypatch.setenv("NO_APT", "1")


def test_without_ci_missing_components_are_named_and_pass(nothing, monkeypatch, capsys):
    monkeypatch.setenv("CI", "")
    assert command.main() == 0
    said = capsys.readouterr().out
    assert all(f"need {name} are skipped" in said for name in components.TEST_NEEDS)
    assert "rsync" not in said, "make sky alone needs it"


def test_in_ci_missing_components_fail(nothing, monkeypatch, capsys):
    monkeypatch.setenv("CI", "true")
    assert command.main() == 1
    assert "tests that need lab fail" in capsys.readouterr().out

"""Runs an exported script as a platform would, with exactly the variables that the platform gives."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping


def refusal(
    script: str, given: Mapping[str, str], change: Mapping[str, str | None]
) -> str:
    """Run a script that must refuse to start; return what it says. `change` replaces variables, None takes one away."""
    changed = {**given, **change}
    environ = {name: text for name, text in changed.items() if text is not None}
    done = subprocess.run(
        ["bash", "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    return done.stderr

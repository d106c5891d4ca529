"""Runs programs to their end; and an exported script as a platform would, with exactly the variables that it gives."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.waiting import HANG_S


def completed(
    argv: Sequence[str | Path],
    *,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input: str | None = None,  # noqa: A002
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed. Raises CalledProcessError if it fails and `check` is set."""
    return subprocess.run(
        argv, check=check, env=env, cwd=cwd, input=input,
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip


def refusal(
    script: str, given: Mapping[str, str], change: Mapping[str, str | None]
) -> str:
    """Run a script that must refuse to start; return what it says. `change` replaces variables, None takes one away."""
    changed = {**given, **change}
    environ = {name: text for name, text in changed.items() if text is not None}
    done = completed(["bash", "-c", script], env=environ, check=False)
    assert done.returncode != 0
    return done.stderr

"""The other tools, each in a virtual environment of the bench's own. Torch comes first and is pinned for all of them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("torchrunx", "accelerate", "ipyparallel", "nbdistributed")
# Of the whole environment: more means that a tool has pulled a torch or CUDA of its own.
_LARGEST_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The environment's Python; `missing` says of tools why they can't be run."""

    python: Path
    missing: dict[str, str]

    @property
    def bin(self) -> Path:
        """Where the tools' programs are."""
        return self.python.parent


def install(folder: Path) -> Peers:
    """Make the environment, or take the one that is there; what can't be installed is named."""
    python = folder / "bin" / "python"
    ready = folder / ".torch"
    pinned = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    if not ready.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([*_pip(python), pinned, "numpy", "ipykernel"])
        ready.write_text(f"{pinned}\n")
    missing = {
        tool: reason for tool in TOOLS if (reason := _install(python, ready, tool))
    }
    return Peers(python=python, missing=missing)


def _install(python: Path, constraints: Path, tool: str) -> str:
    """Install one tool unless it is there; return why it can't be used, "" if it can."""
    done = constraints.with_name(f".{tool}")
    if done.exists():
        return done.read_text()
    reason = ""
    try:
        _run([*_pip(python), "--constraint", str(constraints), tool])
        size = sum(file.lstat().st_size for file in constraints.parent.rglob("*"))
        if size > _LARGEST_BYTES:
            reason = f"it pulled {size / 1e9:.1f} GB in"
    except subprocess.CalledProcessError as error:
        reason = (
            f"pip can't install it: {' '.join((error.stdout or '').split())[-300:]}"
        )
    done.write_text(reason)
    return reason


def _pip(python: Path) -> list[str]:
    return [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]


def _run(argv: list[str]) -> None:
    subprocess.run(
        argv,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

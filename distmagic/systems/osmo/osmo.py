"""Runs NVIDIA OSMO's program `osmo`: submit, query, follow the log, cancel, fetch.

Each call has a time limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from distmagic.errors import Unreachable, UsageError
from distmagic.systems.osmo import osmo_words
from distmagic.systems.osmo.osmo_words import WorkflowState

SUBMIT_S = 120.0
QUERY_S = 30.0
CANCEL_S = 60.0
FETCH_S = 3600.0
_LINE_CHARS = 1 << 17
_LATE = "Try it by hand. Does this machine reach OSMO's service?"
_MAY_RUN = "OSMO may have taken the workflow all the same: osmo workflow list shows it, and osmo workflow cancel ID ends it."
GET_IT = (
    "Install NVIDIA OSMO's command line as its guide describes (Getting Started, Install Client), and log in with "
    "osmo login URL. Without it: --export osmo DIR writes the workflow."
)


def check() -> None:
    """Raise `UsageError` if the program `osmo` is missing."""
    if shutil.which("osmo") is None:
        raise UsageError("--on osmo: the program osmo was not found.", GET_IT)


def submit(path: Path) -> str:
    """Submit a workflow; return its ID.

    Raises `UsageError` if OSMO refuses it, and `Unreachable`.
    """
    words = ("workflow", "submit", str(path), "-t", "json")
    return osmo_words.read_id(_said(words, SUBMIT_S, _MAY_RUN))


def look(workflow_id: str) -> WorkflowState:
    """Return the state of a workflow. Raises `DistmagicError` if it is unknown."""
    words = ("workflow", "query", workflow_id, "-t", "json")
    return osmo_words.read_state(_said(words, QUERY_S))


def cancel(workflow_id: str) -> None:
    """Cancel a workflow. Raises `DistmagicError` if that fails."""
    words = ("workflow", "cancel", workflow_id, "-t", "json")
    out = _said(words, CANCEL_S)
    if not osmo_words.was_cancelled(out):
        raise osmo_words.refused(f"osmo workflow cancel {workflow_id}", 0, out, "")


def fetch(url: str, folder: Path) -> None:
    """Download a storage URL to a folder. Raises `DistmagicError`."""
    folder.mkdir(parents=True, exist_ok=True)
    _said(("data", "download", url, str(folder)), FETCH_S)


def open_log(workflow_id: str) -> subprocess.Popen[bytes]:
    """Start `osmo workflow logs`: it prints all lines from the first on, until the workflow has
    ended, or earlier.
    """
    return _started(("workflow", "logs", workflow_id), subprocess.DEVNULL)


def lines_of(log: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield each line; of an overlong line only the start, because the rest has no task's name.

    The program is ended after the last line, or when the iteration stops.
    """
    assert log.stdout is not None
    is_rest = False
    try:
        while data := log.stdout.readline(_LINE_CHARS):
            if not is_rest:
                yield data.decode(errors="replace").rstrip("\r\n")
            is_rest = not data.endswith(b"\n")
    finally:
        _end(log)


def break_off(log: subprocess.Popen[bytes]) -> None:
    """End the log program: `lines_of` then ends, even on another thread."""
    if log.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(log.pid, signal.SIGKILL)


def _said(words: Sequence[str], limit_s: float, late: str = _LATE) -> str:
    """Return the output of `osmo`.

    Raises `UsageError`, or `Unreachable` after the time limit, with the hint `late`.
    """
    what = " ".join(("osmo", *words[:2]))
    process = _started(words, subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Unreachable(
            "OSMO",
            f"{what} was not done after {limit_s:g} s, and was ended.",
            late,
        ) from None
    finally:
        _end(process)
    said = out.decode(errors="replace")
    if process.returncode != 0:
        raise osmo_words.refused(
            what, process.returncode, said, err.decode(errors="replace")
        )
    return said


def _started(words: Sequence[str], err: int) -> subprocess.Popen[bytes]:
    """Start `osmo` in its own session, so that Ctrl-C in a terminal only reaches the notebook."""
    try:
        return subprocess.Popen(
            ["osmo", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"The program osmo can't be started on the notebook machine: {error}.",
            GET_IT,
        ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running call with its children."""
    with process:  # closes its pipes, and waits
        process.poll()
        break_off(process)

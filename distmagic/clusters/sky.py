"""SkyPilot's program, `sky`: each command with a time limit, its lines as they come, and its end when it is given up.

A command runs while the notebook does other things, until somebody waits for it. It starts SkyPilot's own server where
that does not run yet, which stays: it is SkyPilot's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from distmagic.clusters import sky_words
from distmagic.clusters.sky_words import ClusterState
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, SpecError, Unreachable

STATUS_S = 180.0  # its server may have to start first
_TURN_S = 0.1
_END_S = 3.0  # between SIGTERM and SIGKILL
_LAST_S = 2.0  # for the last lines to come
_MOST_LINES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command has said: `out` on stdout, `said` is the end of all."""

    code: int
    out: str
    said: str


class Command:
    """One `sky` command, begun at once."""

    def __init__(self, words: tuple[str, ...]) -> None:
        """Raises `SpecError` where there is no such program."""
        program = shutil.which("sky")
        if program is None:
            raise SpecError("SkyPilot's program sky is not there.", sky_words.GET_IT)
        self._words = words
        self._out: list[str] = []
        self._all: list[str] = []
        self._process = subprocess.Popen(
            (program, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt of the notebook is none of its
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in (
                (self._process.stdout, self._out),
                (self._process.stderr, None),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], out: list[str] | None) -> None:
        with pipe:
            for line in pipe:
                if out is not None:
                    out.append(line)
                text = sky_words.plain(line)
                if text:
                    self._all.append(text)
                del self._all[:-_MOST_LINES]

    def wait(
        self,
        asker: NotebookAsker,
        timeout_s: float,
        tell: Callable[[str], object] = lambda _: None,
    ) -> Answer:
        """Return how it ended; `tell` gets what it says last, as long as it runs.

        Call it on the main thread: questions are asked there meanwhile. Raises `Unreachable` if it takes too long; then,
        and for an interrupt, it is ended.
        """
        end_s, told = time.monotonic() + timeout_s, ""
        try:
            while self._process.poll() is None and time.monotonic() < end_s:
                asker.serve(_TURN_S)
                last = self._all[-1] if self._all else ""
                if last != told:
                    told = last
                    tell(last)
        except BaseException:
            self.end()
            raise
        return self.result(0.0)

    def result(self, timeout_s: float) -> Answer:
        """Return how it ended, from any thread. Raises `Unreachable` if it takes too long; then it is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.poll() is None:
            self.end()
            raise Unreachable(
                "sky",
                f"sky {self._words[0]} took too long, and was ended.",
                "Try it by hand; sky api status shows what its server is doing.",
            )
        for reader in self._readers:
            reader.join(_LAST_S)
        return Answer(
            code=self._process.returncode,
            out="".join(self._out),
            said=sky_words.last_words(self._all),
        )

    def end(self) -> None:
        """End it, if it still runs. What it has asked SkyPilot's server for goes on there."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def read_states(command: Command, asker: NotebookAsker) -> tuple[ClusterState, ...]:
    """Return what a `status` that was begun has to say. Raises `Unreachable`."""
    answer = command.wait(asker, STATUS_S)
    try:
        if answer.code == 0:
            return sky_words.states(answer.out)
    except (ValueError, KeyError, TypeError):
        pass
    raise failed("sky status", answer)


def failed(what: str, answer: Answer) -> DistmagicError:
    """Return the error of a command that has failed, with the last lines that it printed."""
    said = answer.said or "it printed nothing"
    return Unreachable(
        "sky", f"{what} failed (exit code {answer.code}):\n{said}", "Try it by hand."
    )

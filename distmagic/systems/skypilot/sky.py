"""Runs SkyPilot's program, `sky`: status, launch, hold, down. Each has a time limit.

A command runs in the background until a caller waits for it. It starts SkyPilot's own server if
necessary, which keeps running.

SkyPilot stops a cluster whose job queue was empty for some minutes (autostop). Ranks of distmagic
are not in that queue, and an SSH session without a terminal does not count either. So distmagic
puts a job into the queue, hold.py, which lives as long as a distmagic job runs on the cluster, plus
the idle time.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from distmagic import sanitize
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.remote.system import threads
from distmagic.request.allocation import SkyRequest
from distmagic.systems.skypilot import sky_words
from distmagic.systems.skypilot.sky_words import ClusterState
from distmagic.transports import Argv, program_text

STATUS_S = 180.0  # its server may have to start first
LAUNCH_S = 2 * 3600.0  # a cloud may try many zones
EXEC_S = 600.0
DOWN_S = 600.0
_SOON_S = 60.0  # for a request to be taken in
_STOP_MINUTES = 5  # of the idle time: SkyPilot's own part. It looks once a minute
_LEAST_S = 300.0  # time until a job starts, which may have to send much first
_TURN_S = 0.1
_END_S = 3.0  # between SIGTERM and SIGKILL
_TAIL_BYTES = 1 << 16  # size of the end of the output that is kept
_LAST_LINES = 6
Tell = Callable[[str], object]


class SkyCommand:
    """One `sky` command, started at once."""

    def __init__(self, words: Argv) -> None:
        """Raises `UsageError` if the program is missing."""
        program = shutil.which("sky")
        if program is None:
            raise UsageError("SkyPilot's program sky was not found.", sky_words.GET_IT)
        self._words = words
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the command
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - of `status`
        for file in (self._said, self._out):
            weakref.finalize(self, file.close)
        self._process = subprocess.Popen(
            (program, *words),
            stdin=subprocess.DEVNULL,
            stdout=self._out if words[0] == "status" else self._said,
            stderr=self._said,
            start_new_session=True,  # an interrupt of the notebook is none of its
        )

    def _last_lines(self, count: int) -> str:
        """Return the last non-empty lines."""
        file = self._said.fileno()
        begin = max(os.fstat(file).st_size - _TAIL_BYTES, 0)
        text = os.pread(file, _TAIL_BYTES, begin).decode(errors="replace")
        lines = [sky_words.plain(line) for line in text.split("\n")]
        return "\n".join([line for line in lines if line][-count:])

    def wait(
        self,
        asker: NotebookAsker,
        timeout_s: float,
        what: str,
        tell: Tell = lambda _: None,
    ) -> None:
        """Wait for the end; `tell` gets the latest line of output.

        Call it on the main thread, which also asks questions meanwhile. Raises `Unreachable` if it
        takes too long or fails, by the name `what`. If it takes too long, and for an interrupt, the
        command is ended.
        """
        end_s, told = time.monotonic() + timeout_s, ""
        try:
            while self._process.poll() is None and time.monotonic() < end_s:
                asker.serve(_TURN_S)
                last = self._last_lines(1)
                if last != told:
                    told = last
                    tell(last)
        except BaseException:
            self.end()
            raise
        if self.code(0.0) != 0:
            raise self.failed(what)

    def code(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code, on any thread.

        Raises `Unreachable` if it takes too long, and ends it.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.poll() is None:
            self.end()
            raise Unreachable(
                "sky",
                f"sky {self._words[0]} took too long, and was ended.",
                "Try it by hand; sky api status shows what its server is doing.",
            )
        return self._process.returncode

    def out(self) -> str:
        """Return stdout of `sky status`, "" for other commands."""
        self._out.seek(0)
        return self._out.read().decode(errors="replace")

    def said(self) -> str:
        """Return the last lines of its output, without `out`."""
        return self._last_lines(_LAST_LINES)

    def failed(self, what: str) -> DistmagicError:
        """Return the error of a command that has failed, with the last lines that it printed."""
        said = self.said() or "it printed nothing"
        return Unreachable(
            "sky",
            f"{what} failed (exit code {self._process.returncode}):\n{said}",
            "Try it by hand.",
        )

    def end(self) -> None:
        """End the command, if it still runs. SkyPilot's server continues with its request."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def read_states(command: SkyCommand, asker: NotebookAsker) -> dict[str, ClusterState]:
    """Return {name: state} from a `status` that was started. Raises `Unreachable`."""
    command.wait(asker, STATUS_S, "sky status")
    try:
        return {one.name: one for one in sky_words.states(command.out())}
    except (ValueError, KeyError, TypeError):
        raise command.failed("sky status") from None


# ---- launched, held, taken down


def launch_words(request: SkyRequest, cluster: str) -> Argv:
    """Return the arguments that launch a cluster and run the user's task on it.

    A task without `run` only sets up the hosts.
    """
    words = ["launch", "--yes", "--detach-run", "--cluster", cluster]
    if request.nodes:
        words += ["--num-nodes", str(request.nodes)]
    if request.gpus:
        words += ["--gpus", request.gpus]
    words += ["--idle-minutes-to-autostop", str(_stop_minutes(request)), "--down"]
    return (*words, request.file) if request.file else tuple(words)


def hold_words(request: SkyRequest, cluster: str) -> Argv:
    """Return the arguments that queue the job which keeps the cluster up."""
    argv = program_text.command("python3", "hold", {"idle_s": hold_s(request)})
    name = ("--detach-run", "--name", "distmagic-hold")
    return ("exec", *name, cluster, "--", shlex.join(argv))


def hold_s(request: SkyRequest) -> float:
    """Return how long the queue stays non-empty after the last job; only a short time for a user's
    own cluster.
    """
    if request.name:
        return _LEAST_S
    return max(request.idle_s - 60.0 * _stop_minutes(request), _LEAST_S)


def _stop_minutes(request: SkyRequest) -> int:
    return min(_STOP_MINUTES, math.ceil(request.idle_s / 60))


def launch(
    request: SkyRequest,
    cluster: str,
    begin: Callable[[Argv], SkyCommand],
    asker: NotebookAsker,
    tell: Tell,
) -> None:
    """Launch a cluster, and queue the holding job; `tell` gets SkyPilot's output.

    `begin` starts a command. Raises its errors, `Unreachable` with SkyPilot's last output, and
    KeyboardInterrupt; the launch then continues until the cluster is shut down.
    """

    doing = f"SkyPilot launches the cluster {cluster}: "
    tell(f"{doing}it was asked to.")
    launching = begin(launch_words(request, cluster))
    launching.wait(
        asker, LAUNCH_S, f"sky launch of {cluster}", lambda line: tell(doing + line)
    )
    tell(f"The cluster {cluster} is up; a job in its queue keeps it from stopping.")
    holding = begin(hold_words(request, cluster))
    holding.wait(asker, EXEC_S, f"sky exec on {cluster}")


def hold_in_background(request: SkyRequest, cluster: str) -> None:
    """Queue another holding job, because the previous one may be about to end.

    A failure is printed.
    """

    def hold() -> None:
        said = _failure(hold_words(request, cluster), EXEC_S)
        if said:
            text = f"SkyPilot may stop the cluster {cluster} while a job runs on it; sky exec reports: {said}"
            print(sanitize.lines(text), file=sys.stderr)  # noqa: T201 - a line for people

    threads.begin("hold", hold)


def take_down(cluster: str, asker: NotebookAsker) -> str:
    """Shut a cluster down, and return SkyPilot's message once it is gone. Raises `Unreachable`."""
    down = SkyCommand(("down", "--yes", cluster))
    down.wait(asker, DOWN_S, f"sky down {cluster}")
    return down.said()


def take_down_soon(cluster: str) -> str:
    """Ask SkyPilot to shut down a cluster whose launch failed or was interrupted, without waiting
    for the shutdown.

    Returns a sentence for the user: the shutdown has begun, or why it has not and which command
    repeats it.
    """
    said = _failure(("down", "--yes", "--async", cluster), _SOON_S)
    if said:
        return (
            f"SkyPilot may not have taken it down: {said}\nBy hand: sky down {cluster}"
        )
    return "It is being taken down."


def _failure(words: Argv, limit_s: float) -> str:
    """Run a command; return its error, "" for success."""
    try:
        command = SkyCommand(words)
        code = command.code(limit_s)
    except DistmagicError as error:
        return error.message
    return (command.said() or f"exit code {code}") if code else ""

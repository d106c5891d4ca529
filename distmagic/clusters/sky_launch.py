"""Launches a cluster of SkyPilot, keeps it from stopping while a job runs there, and takes it down. Three commands.

SkyPilot stops a cluster by itself when its queue of jobs was empty for some minutes (autostop). Ranks of ours are in no
queue, and an SSH session without a terminal does not count either. So one job of its queue is ours: hold.py, which lives
as long as a job of distmagic runs there, and for the idle time after that.
"""

from __future__ import annotations

import math
import shlex
import sys
import threading
from collections.abc import Callable

from distmagic.clusters import sky
from distmagic.clusters.sky import Command
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError
from distmagic.request.allocation import ClusterRequest
from distmagic.transports import program_text

LAUNCH_S = 2 * 3600.0  # a cloud may try many zones
EXEC_S = 600.0
DOWN_S = 600.0
_SOON_S = 60.0  # for a request to be taken in
_STOP_MINUTES = 5  # of the idle time: SkyPilot's own part. It looks once a minute
_LEAST_S = 120.0  # until a job has begun


def launch_words(request: ClusterRequest, cluster: str) -> tuple[str, ...]:
    """Return the arguments that launch a cluster. Without a task's `run` it only sets the hosts up."""
    words = ["launch", "--yes", "--detach-run", "--cluster", cluster]
    if request.nodes:
        words += ["--num-nodes", str(request.nodes)]
    if request.gpus:
        words += ["--gpus", request.gpus]
    words += ["--idle-minutes-to-autostop", str(_stop_minutes(request)), "--down"]
    return (*words, request.file) if request.file else tuple(words)


def hold_words(request: ClusterRequest, cluster: str) -> tuple[str, ...]:
    """Return the arguments that put the job into the queue that keeps the cluster from stopping."""
    argv = program_text.command("python3", "hold", {"idle_s": hold_s(request)})
    name = ("--detach-run", "--name", "distmagic-hold")
    return ("exec", *name, cluster, "--", shlex.join(argv))


def hold_s(request: ClusterRequest) -> float:
    """Return for how long the queue is not empty when the last job has ended."""
    return max(request.idle_s - 60.0 * _stop_minutes(request), _LEAST_S)


def _stop_minutes(request: ClusterRequest) -> int:
    return min(_STOP_MINUTES, math.ceil(request.idle_s / 60))


def launch(
    request: ClusterRequest,
    cluster: str,
    asker: NotebookAsker,
    tell: Callable[[str], object],
) -> None:
    """Launch a cluster, and put the job that holds it into its queue; `tell` gets what SkyPilot says.

    Raises `Unreachable` with SkyPilot's last words, and KeyboardInterrupt; it goes on launching then until it is taken
    down.
    """

    def say(line: str) -> None:
        tell(f"SkyPilot launches the cluster {cluster}: {line}")

    say("it was asked to.")
    answer = Command(launch_words(request, cluster)).wait(asker, LAUNCH_S, say)
    if answer.code != 0:
        raise sky.failed(f"sky launch of {cluster}", answer)
    tell(f"The cluster {cluster} is up; a job in its queue keeps it from stopping.")
    answer = Command(hold_words(request, cluster)).wait(asker, EXEC_S)
    if answer.code != 0:
        raise sky.failed(f"sky exec on {cluster}", answer)


def hold_in_background(request: ClusterRequest, cluster: str) -> None:
    """Put another holding job into the queue: the one before may be about to end. A failure is printed."""

    def hold() -> None:
        try:
            answer = Command(hold_words(request, cluster)).result(EXEC_S)
            said = answer.said if answer.code else ""
        except DistmagicError as error:
            said = error.message
        if said:
            print(  # noqa: T201 - a line for people
                f"SkyPilot may stop the cluster {cluster} while a job runs there; sky exec says: {said}",
                file=sys.stderr,
            )

    threading.Thread(target=hold, name="distmagic-hold", daemon=True).start()


def take_down(cluster: str, asker: NotebookAsker) -> str:
    """Take a cluster down; when it is gone, return what SkyPilot says. Raises `Unreachable`."""
    answer = Command(("down", "--yes", cluster)).wait(asker, DOWN_S)
    if answer.code != 0:
        raise sky.failed(f"sky down {cluster}", answer)
    return answer.said


def take_down_soon(cluster: str) -> str:
    """Have a cluster that is being launched be taken down; return in words how far that is."""
    try:
        answer = Command(("down", "--yes", "--async", cluster)).result(_SOON_S)
    except DistmagicError as error:
        return f"Whether it will be taken down is not known: {error.message} By hand: sky down {cluster}"
    if answer.code != 0:
        return f"It could not be taken down: {answer.said} By hand: sky down {cluster}"
    return "It is being taken down."

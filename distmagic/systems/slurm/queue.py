"""Jobs that a kernel waits for on one log-in node: one question to squeue for all of them, less and less often.

A job is asked for from its first `look` to `forget`. Safe to use from threads: cells may wait at the same time.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distmagic.systems.slurm import commands
from distmagic.systems.slurm.job_states import JobState
from distmagic.systems.slurm.shell import Shell
from distmagic.transports.asking import Asker


def pauses() -> Iterator[float]:
    """Yield the seconds between looks at a pending job: most begin at once, and the others need no hurry."""
    yield from [0.25] * 4
    yield from [1.0] * 9
    yield from [5.0] * 6
    yield from [15.0] * 8
    yield from itertools.repeat(30.0)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What squeue has said of these jobs, and when."""

    jobs: frozenset[str] = frozenset()
    states: Mapping[str, JobState]
    at: float = -math.inf


class SlurmQueue:
    """What Slurm knows of this kernel's pending jobs, through the `shell` of one log-in node."""

    def __init__(
        self, shell: Shell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shell = shell
        self._clock = clock
        self._waiting: dict[str, set[str]] = {}  # jobs, by their cluster
        self._answers: dict[str, _Answer] = {}
        self._asking = threading.Lock()

    def look(
        self, job: str, cluster: str, asker: Asker, max_age_s: float
    ) -> JobState | None:
        """Return how a job stands, as of `max_age_s` ago at the longest; None: Slurm knows it no longer.

        Where the last answer is older, it asks for all jobs that are waited for. Raises `Unreachable` where Slurm can't
        be asked: that says nothing.
        """
        with self._asking:
            waiting = self._waiting.setdefault(cluster, set())
            waiting.add(job)
            answer = self._answers.get(cluster, _Answer(states={}))
            if job not in answer.jobs or self._clock() > answer.at + max_age_s:
                jobs = tuple(sorted(waiting, key=int))
                states = commands.look(self.shell, jobs, cluster, asker)
                answer = _Answer(jobs=frozenset(jobs), states=states, at=self._clock())
                self._answers[cluster] = answer
        return answer.states.get(job)

    def forget(self, job: str, cluster: str) -> None:
        """No longer ask for a job: its keepers answer, or it has ended."""
        with self._asking:
            self._waiting.get(cluster, set()).discard(job)

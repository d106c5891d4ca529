"""How the agent ends everything below it: SIGTERM, patience, SIGKILL, until the tree is empty. No waiting in here."""

from __future__ import annotations

import os
import signal

from distmagic.remote.system import processes

_UNKILLABLE_S = 10.0  # what has not gone this long after SIGKILL sits in the kernel


class Termination:
    """The ending of a process tree in small steps. `step` is called again and again until `is_done`."""

    def __init__(self) -> None:
        self._kill_at: float | None = None
        self._asked: set[tuple[int, int]] = set()
        self.is_done = False
        self.survivors: tuple[str, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether anybody was told to end."""
        return self._kill_at is not None

    def begin(self, now: float, grace_s: float) -> None:
        """Ask everything to end; whoever hasn't after `grace_s` is killed. A second call can only shorten it."""
        kill_at = now + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self.step(now)

    def step(self, now: float) -> None:
        """Do what is due."""
        if self._kill_at is None or self.is_done:
            return
        tree = processes.descendants(os.getpid())
        self.is_done = not tree
        for process in tree:
            if now >= self._kill_at:
                processes.send(process, signal.SIGKILL)
            elif (process.pid, process.started) not in self._asked:
                self._asked.add((process.pid, process.started))
                processes.send(process, signal.SIGTERM)
        if tree and now > self._kill_at + _UNKILLABLE_S:
            self.survivors = tuple(f"{p.name} (pid {p.pid}, state {p.state})" for p in tree)
            self.is_done = True

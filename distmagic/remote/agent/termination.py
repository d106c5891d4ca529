"""Ends all descendants of the agent: SIGTERM, a grace time, SIGKILL, until none is left.

It never blocks.

In a polite stop, polite_stop.py sends the first signals: this module sends nothing before its grace
time is over.
"""

from __future__ import annotations

import os
import signal

from distmagic.remote.system import processes

# A process that lives this long after SIGKILL is in a system call of the kernel.
_UNKILLABLE_S = 10.0


class Termination:
    """The end of this process's descendants, in small steps. Call `step` until `is_done`.

    `survivors` describes the processes that SIGKILL did not end.
    """

    def __init__(self) -> None:
        self._kill_at: float | None = None
        self._asks = True
        self._sigterm_sent: set[tuple[int, int]] = set()  # (pid, start time)
        self.is_done = False
        self.survivors: tuple[str, ...] = ()

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._kill_at is not None

    def begin(self, now: float, grace_s: float, *, asks: bool = True) -> None:
        """Send SIGTERM now if `asks`, and SIGKILL after `grace_s`.

        A second call can only shorten that time.
        """
        self._asks = asks
        kill_at = now + grace_s
        self._kill_at = (
            kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        )
        self.step(now)

    def step(self, now: float) -> None:
        """Send the signals that are due, also to processes that were started meanwhile."""
        if self._kill_at is None or self.is_done:
            return
        # The agent adopts orphans, so without a child it has no descendant.
        has_any = processes.has_child()
        tree = processes.descendants(os.getpid()) if has_any else ()
        self.is_done = not tree
        for process in tree:
            identity = (process.pid, process.started)
            if now >= self._kill_at:
                processes.send(process, signal.SIGKILL)
            elif self._asks and identity not in self._sigterm_sent:
                self._sigterm_sent.add(identity)
                processes.send(process, signal.SIGTERM)
        if tree and now > self._kill_at + _UNKILLABLE_S:
            self.survivors = tuple(map(str, tree))
            self.is_done = True

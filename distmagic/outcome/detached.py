"""The value of a run's variable when the job runs on detached from the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmagic import sanitize
from distmagic.outcome.shown import cell_number, display_page, leave_out


class Detached:
    """A job that runs without the notebook.

    `attach()` follows it to its end and returns its `Run`; `stop()` ends it. `job` is its name, and
    `hosts` are the names of its hosts. `attach()` raises the run's error if it fails. Both raise a
    `HostError` for a host that can't be reached.
    """

    def __init__(
        self,
        job: str,
        hosts: tuple[str, ...],
        *,
        attach: Callable[[], object],
        stop: Callable[[], None],
    ) -> None:
        self.job, self.hosts = job, hosts
        self.attach, self.stop = attach, stop
        self._left_in = cell_number()

    def _ipython_display_(self) -> None:
        """Show the job, except in the cell that started it, whose view shows the same."""
        if self._left_in is not None and self._left_in == cell_number():
            leave_out(f"<job {self.job}>")
        else:
            display_page({"text/plain": repr(self)})

    def __getattr__(self, name: str) -> Any:
        if name in ("results", "logs", "metrics", "state"):
            raise AttributeError(
                f"job {self.job} is detached, so it has no {name!r}. Attach to get its run: "
                f"run = job.attach(), or %distributed attach {self.job} run."
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def __repr__(self) -> str:
        text = (
            f"job {self.job} runs on {', '.join(self.hosts)} without this notebook: "
            f"%distributed attach {self.job} follows it, %distributed stop {self.job} ends it"
        )
        # A job found on hosts has the host names that these reported.
        return sanitize.lines(text)

"""How long torchrun waits in vain to start ranks again. Pure."""

from __future__ import annotations

# For torchrun to start the ranks again where another node's have all returned. A notebook that follows the job waits 15 s.
RESTART_S = 20.0


class RestartWait:
    """Since when two things hold without a break: a rank here has failed, and another node's ranks have all returned.

    torchrun waits for that node to start ranks again with it, and that node has only to end. So it never meets the others
    again, and holds its place in the rendezvous until its own torchrun has waited 300 s for them to end (torch 2.13:
    `exit_barrier_timeout` in elastic/agent/server/api.py).
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def is_in_vain(
        self, now: float, failed_at: float | None, *, has_returned_node: bool
    ) -> bool:
        """Whether both have held for `RESTART_S`, as far as this was asked in every turn.

        `failed_at` is when a rank failed that torchrun has not started again since, None where there is none.
        """
        if failed_at is None or not has_returned_node:
            self._since = None
            return False
        # Between two turns ranks may be started again, and fail again.
        if self._since is None or self._since < failed_at:
            self._since = now
        return now - self._since >= RESTART_S

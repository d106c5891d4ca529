"""How long torchrun waits in vain for a restart of ranks. Pure."""

from __future__ import annotations

# Time for torchrun to restart the ranks after all ranks of another node have returned. A notebook that follows the job
# waits 15 s.
RESTART_S = 20.0


class RestartWait:
    """Measures how long two conditions have held together: a rank of this node has failed, and another node's ranks
    have all returned.

    torchrun waits for that node to restart ranks together, but that node only waits for the end. So it never rejoins
    the others. It keeps its place in the rendezvous until its own torchrun has waited 300 s (torch 2.13:
    `exit_barrier_timeout` in elastic/agent/server/api.py).
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def is_in_vain(
        self, now: float, failed_at: float | None, *, has_returned_node: bool
    ) -> bool:
        """Whether both have held for `RESTART_S`. Must be called in every turn.

        `failed_at` is when a rank failed that torchrun has not restarted since, None if there is none.
        """
        if failed_at is None or not has_returned_node:
            self._since = None
            return False
        # Between two turns ranks may be restarted and fail again.
        if self._since is None or self._since < failed_at:
            self._since = now
        return now - self._since >= RESTART_S

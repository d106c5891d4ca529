"""Before a run is stopped that goes nowhere, its ranks are asked where they are. Decides when to ask, and to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from distmagic.remote.wire.vocabulary import StopReason
from distmagic.state.hangs import is_hung, roll_of, unheard
from distmagic.state.model import RunState

WORTH_ASKING_S = 30.0  # an interrupt of a run that has stood still for this long is told where the ranks were
PATIENCE_S = 6.0  # agents themselves wait 4 s for ranks that don't answer


class HangResponse:
    """The inquiry of one run. `ask` asks all ranks, at once, and returns the request's name."""

    def __init__(self, ask: Callable[[], str], hang_timeout_s: float | None) -> None:
        self._ask, self._hang_timeout_s = ask, hang_timeout_s
        self._reason = ""
        self._request_id = ""
        self._give_up_at_s = 0.0

    def poll(self, state: RunState) -> StopReason | Literal[""]:
        """Return why the run must be stopped now, "" if it goes on or its ranks are still being asked."""
        if state.stopping or state.is_over:
            return ""
        hangs = is_hung(state, self._hang_timeout_s)
        if self._reason == "hung" and not hangs:
            self._reason = ""  # a rank has advanced meanwhile
        if hangs and not self._reason:
            self._begin(state, "hung")
        answered = not unheard(state, roll_of(state, self._request_id))
        return self._reason if answered or state.at_s > self._give_up_at_s else ""

    def interrupt(self, state: RunState) -> bool:
        """Whether an interrupt has to wait, until `poll` returns it, because it is worth asking first."""
        stands = state.at_s - state.advanced_at_s > WORTH_ASKING_S and any(
            worker.phase == "running" for worker in state.workers.values()
        )
        if self._reason or state.stopping or not stands:
            return False
        self._begin(state, "interrupted")
        return True

    def _begin(self, state: RunState, reason: str) -> None:
        self._reason, self._request_id = reason, self._ask()
        self._give_up_at_s = state.at_s + PATIENCE_S

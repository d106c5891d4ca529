"""Hosts of an elastic job that were lost, or not there yet: they are tried again and again while the job is followed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, DistmagicError, SpecError, Unreachable
from distmagic.planning.plan import Plan
from distmagic.runner.node_joiner import NodeJoiner

NOWHERE = -1  # the place of a host that this notebook does not know
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between attempts to connect again
_REFUSED_PAUSE_S = 60.0  # after one that was refused
_SEAT_S = 0.2  # between two looks whether the job is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """How hosts come to an elastic job. A host is known by its place.

    `open_lead` opens one more conversation with the first node's host, `place_of` finds a host by its name (NOWHERE for
    one that this notebook does not know), `awaited` are those that were not there at the beginning.
    """

    open_lead: Callable[[], Link]
    place_of: Callable[[str], int]
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a job's growth rests on, of the launch that follows it. A host is known by its place.

    `reopen` connects to a host once more; `is_over` waits so many seconds, or until the job is over; `newest` is the
    last node that a host was, -1 for none; `lose` is for a node that was counted and then could not be started; `warn`
    tells the user something.
    """

    reopen: Callable[[int], Link]
    is_over: Callable[[float], bool]
    newest: Callable[[int], int]
    lose: Callable[[int, str], None]
    warn: Callable[[str], None]


class Growth:
    """Takes hosts in, one for each thread that calls `come_back`."""

    def __init__(self, newcomers: NodeJoiner, ground: Ground) -> None:
        self._newcomers, self._ground = newcomers, ground
        self._seats: dict[str, Future[int]] = {}

    def take_seat(self, request_id: str, node_rank: int) -> bool:
        """Hear from the lead that a host is counted as this node; return whether it is this notebook that starts it."""
        seat = self._seats.pop(request_id, None)
        if seat is not None:
            seat.set_result(node_rank)
        return seat is not None

    def come_back(self, place: int) -> tuple[int, Link] | None:
        """Try until a host is a new node that has started; None when the job is over, or another notebook has done it."""
        pause, own = FIRST_PAUSE_S, {self._ground.newest(place)}
        while not self._ground.is_over(pause) and self._ground.newest(place) in own:
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                link = self._ground.reopen(place)
                return self._start(link, own), link
            except (ConnectionLost, Unreachable, SpecError):  # a SpecError: the node that it was is not over yet
                continue
            except DistmagicError as error:  # it may pass: a machine that boots lets nobody in at first
                self._ground.warn(f"{error.message} The run goes on without this host.")
                pause = _REFUSED_PAUSE_S
            except Exception as error:  # noqa: BLE001 - on a thread nobody would hear of it
                self._ground.warn(f"a fault of distmagic: {error!r}. The run goes on without this host.")
                return None
        return None

    def _start(self, link: Link, own: set[int]) -> int:
        """Start a host as a new node, which is added to `own`."""
        seat = self._seats[request_id := secrets.token_hex(8)] = Future()
        try:
            start = self._newcomers.admit(link, request_id)
            own.add(start.node_rank)
            self._wait(seat)
            link.start(start)
        except BaseException as error:
            link.close()
            self._seats.pop(request_id, None)
            if seat.done():
                self._ground.lose(seat.result(), str(error))
            raise
        return start.node_rank

    def _wait(self, seat: Future[int]) -> None:
        """Wait until this notebook has heard of the new node what all hear. Raises `ConnectionLost` when it is over."""
        while True:
            try:
                seat.result(timeout=_SEAT_S)
            except NotYet:
                if self._ground.is_over(0.0):
                    raise ConnectionLost("the job is over") from None
            else:
                return


def lost_at_start(plan: Plan, errors: Sequence[BaseException | None]) -> dict[int, str]:
    """Return the nodes without which an elastic job can begin, and why they did not start; {} if it can't, or needn't.

    `errors` are what the start of each node ended with.
    """
    failed = {node_rank: error for node_rank, error in enumerate(errors) if error is not None}
    are_out_of_reach = all(isinstance(error, (ConnectionLost, Unreachable)) for error in failed.values())
    is_enough = 0 not in failed and len(errors) - len(failed) >= plan.terms.min_nodes
    if plan.join_template is None or not (are_out_of_reach and is_enough):
        return {}
    return {node_rank: str(error).partition("\n")[0] for node_rank, error in failed.items()}

"""Rolls a start back that came about on some hosts only: what had started is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

from distmagic.connection.link import Link
from distmagic.connection.parallel import threads_for
from distmagic.errors import Cancelled, ConnectionLost, DistmagicError, Unreachable
from distmagic.remote.wire import protocol
from distmagic.runner import interrupts

_PATIENCE_S = (
    5.0  # for hosts to tell that they have started, and again that they have ended
)


def roll_back(links: Sequence[Link], started: Sequence[Future[None]]) -> list[str]:
    """Stop the nodes that did start, and wait until they are gone; return the hosts that did not confirm it.

    No interrupt ends this, but its limits do.
    """
    with interrupts.sent_to(_hold):
        tried = []
        for link, future in zip(links, started, strict=False):
            if not future.cancel():
                tried.append((link, future))
        wait([future for _, future in tried], _PATIENCE_S)
        running = []
        for link, future in tried:
            if future.done() and future.exception() is None:
                running.append(link)
        stopping = threads_for(
            len(running), "rollback"
        )  # those of the starts may hang yet
        stops = [stopping.submit(_stop_and_wait, link) for link in running]
        stopping.shutdown(wait=False)
        wait(stops, _PATIENCE_S)
    unsure = []
    for link, future in tried:
        if not future.done() or _may_run(future.exception()):
            unsure.append(link.host.name)
    for link, stop in zip(running, stops, strict=True):
        if not _is_confirmed(stop):
            unsure.append(link.host.name)
    return unsure


def cancelled(*, began: bool, unsure: Sequence[str]) -> Cancelled:
    """Return the error of an interrupt while hosts start; `unsure` are those that did not confirm their end."""
    if not began:
        return Cancelled(
            "Interrupted while the hosts were being sent what they need; nothing was started."
        )
    if not unsure:
        return Cancelled(
            "Interrupted while the hosts were starting; what had started was stopped."
        )
    names = ", ".join(unsure)
    return Cancelled(
        f"Interrupted while the hosts were starting; {names} did not confirm that nothing runs there any more.",
        f"What may still run on {names} ends by itself when its lease runs out.",
    )


def _stop_and_wait(link: Link) -> bool:
    """Return whether nothing of the run is left there."""
    try:
        link.send(protocol.StopNode(grace_s=0.0, reason="another host could not start"))
        for _, what in link.events():
            if isinstance(
                what, protocol.Final
            ):  # the agent itself may have to wait for the other nodes yet
                return not what.survivors
    except DistmagicError:
        pass  # the first error is the one to raise; this node's lease ends what is left
    return False


def _is_confirmed(stop: Future[bool]) -> bool:
    return stop.done() and stop.exception() is None and stop.result()


def _may_run(error: BaseException | None) -> bool:
    """Whether an agent may run all the same where its start ended so."""
    return isinstance(error, ConnectionLost | Unreachable)


def _hold(*_: object) -> None:
    """Ignore an interrupt: the start is being rolled back already."""

"""Starts a job: sends its hosts the missing files, and then starts every node, or none.

If only some hosts start, they are stopped again before the error is raised.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, wait

from distmagic.connection.connections import Connections
from distmagic.connection.lease_keeper import LeaseKeeper
from distmagic.connection.link import Link
from distmagic.connection.parallel import (
    begin_all,
    in_parallel,
    raise_first,
    threads_for,
)
from distmagic.connection.requests.host_requests import free_port
from distmagic.errors import (
    Cancelled,
    ConnectionLost,
    DistmagicError,
    PreflightError,
    Unreachable,
)
from distmagic.payload.pack import Payload
from distmagic.planning.plan import Plan, at_port
from distmagic.planning.start_messages import start_messages
from distmagic.remote.wire import protocol
from distmagic.runner import interrupts
from distmagic.runner.delivery import Delivery
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.run_loop import RunLoop
from distmagic.state.events import Sending, Starting, Warned

# Time for hosts to confirm their start, and to confirm their end.
_PATIENCE_S = 5.0


def start_all(
    loop: RunLoop,
    connections: Connections,
    plan: Plan,
    payload: Payload,
    links: Sequence[Link],
) -> protocol.StartNode:
    """Send missing files to hosts, start all nodes, and return the message that started the lead.

    `links` are by node rank. If the job can't start, no node of it is left running. Raises
    `Cancelled` for an interrupt.
    """
    pool = threads_for(len(links), "start")
    # Nodes that have started have a lease, and a slow host may take longer than the lease to start.
    lease_keeper = LeaseKeeper(plan.terms.lease_s)

    def start_node(link: Link, request: protocol.StartNode) -> None:
        link.start(request)
        lease_keeper.keep_over_one_more(link)

    started: list[Future[None]] = []
    try:
        addresses = [node.address for node in plan.nodes]
        loop.result(pool.submit(_deliver, loop.queue, links, addresses, payload))
        plan = loop.result(pool.submit(_at_free_port, links[0], plan))
        secret = secrets.token_hex(32)  # for heartbeats
        warm = [link.warm for link in links]
        requests = start_messages(plan, payload, secret, warm)
        loop.note_all((Starting(), node) for node in range(len(requests)))
        for link, request in zip(links, requests, strict=True):
            started.append(pool.submit(start_node, link, request))
        loop.wait_for(started)
        raise_first(started)
        _tell_of_work_dirs(loop, links)
    except BaseException as error:
        unsure = roll_back(links, started)
        refused = [
            link
            for link, start in zip(links, started, strict=False)
            if start.done()
            and not start.cancelled()
            and isinstance(start.exception(), PreflightError)
        ]
        # No answer is pending on the link of a host that has refused to start.
        in_parallel(connections.give_back, refused)
        in_parallel(Link.close, [link for link in links if link not in refused])
        if isinstance(error, KeyboardInterrupt):
            raise cancelled(began=bool(started), unsure=unsure) from None
        if isinstance(error, ConnectionLost) and not error.hint:
            error.hint = "Processes on the other hosts were stopped. Look at that host's memory and disk, and run it again."
        raise
    finally:
        lease_keeper.close()
        pool.shutdown(wait=False)
    return requests[0]


def _deliver(
    queue: EventQueue, links: Sequence[Link], addresses: Sequence[str], payload: Payload
) -> None:
    def tell(node_rank: int, sent_bytes: int, total_bytes: int) -> None:
        queue.tell(
            Sending(sent_bytes=sent_bytes, total_bytes=total_bytes),
            node_rank=node_rank,
        )

    def note(node_rank: int, text: str) -> None:
        host = links[node_rank].host.name
        queue.tell(Warned(text=f"{host}: {text}"), node_rank=node_rank)

    Delivery(links, addresses, payload.blobs, tell, note).run()


def _at_free_port(lead: Link, plan: Plan) -> Plan:
    """Return the plan with a port that is free now: minutes may have passed since it was made."""
    if not plan.chose_port:
        return plan
    try:
        port = free_port(lead, plan.nodes[0].address)
    except PreflightError:
        # The host can't test ports at this address: the previous port is as good as any.
        return plan
    return at_port(plan, port)


def _tell_of_work_dirs(loop: RunLoop, links: Sequence[Link]) -> None:
    hosts: dict[str, list[str]] = {}
    for link in links:
        if link.work is not None and link.work.notice:
            hosts.setdefault(link.work.notice, []).append(link.host.name)
    for notice, names in hosts.items():
        loop.note(Warned(text=f"{', '.join(names)}: {notice}"))


def roll_back(links: Sequence[Link], started: Sequence[Future[None]]) -> list[str]:
    """Stop the nodes that have started, and wait until they have ended; return the hosts that did
    not confirm it.

    An interrupt is ignored. Waits at most `_PATIENCE_S` for the starts, and again for the ends.
    """
    with interrupts.sent_to(_hold):
        tried = [
            (link, future)
            for link, future in zip(links, started, strict=False)
            if not future.cancel()
        ]
        wait([future for _, future in tried], _PATIENCE_S)
        running = [
            link
            for link, future in tried
            if future.done() and future.exception() is None
        ]
        # On new threads: those of the starts may still hang.
        stops = begin_all("rollback", _stop_and_wait, running)
        wait(stops, _PATIENCE_S)
    unsure = [
        link.host.name
        for link, future in tried
        # After these errors an agent may still run on the host.
        if not future.done()
        or isinstance(future.exception(), ConnectionLost | Unreachable)
    ]
    unsure += [
        link.host.name
        for link, stop in zip(running, stops, strict=True)
        if not (stop.done() and stop.exception() is None and stop.result())
    ]
    return unsure


def cancelled(*, began: bool, unsure: Sequence[str]) -> Cancelled:
    """Return the error for an interrupt while a job starts.

    `began`: a host was asked to start its node. `unsure` are the hosts that did not confirm that
    all processes of the job have ended.
    """
    if not began:
        return Cancelled(
            "Interrupted while files were sent to the hosts; nothing was started."
        )
    if not unsure:
        return Cancelled(
            "Interrupted while the hosts were starting; what had started was stopped."
        )
    names = ", ".join(unsure)
    return Cancelled(
        f"Interrupted while the hosts were starting; {names} did not confirm that all processes of the run have ended.",
        f"What may still run on {names} ends by itself when its lease runs out.",
    )


def _stop_and_wait(link: Link) -> bool:
    """Stop the node of a link; return whether nothing of the run is left on it."""
    try:
        link.send(protocol.StopNode(grace_s=0.0, reason="another host could not start"))
        for _, what in link.events():
            # The agent itself may have to wait for the other nodes.
            if isinstance(what, protocol.Final):
                return not what.survivors
    except DistmagicError:
        pass  # the first error is the one to raise; this node's lease ends the rest
    return False


def _hold(*_: object) -> None:
    """Ignore an interrupt: the start is already being rolled back."""

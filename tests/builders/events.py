"""Events of a run of two hosts with two ranks each, and the states that they are folded into."""

from __future__ import annotations

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from tests.builders.terms import terms

HOSTS = ("gpu-a", "gpu-b")


def at(what: object, node: int = 0, at_s: float = 1.0) -> Event:
    return Event(node_rank=node, at_s=at_s, what=what)


def hello(node: int) -> Event:
    return at(
        p.Hello(
            protocol=p.PROTOCOL, job="j", node_rank=node, hostname=f"host{node}", pid=9
        ),
        node,
    )


def worker(
    rank: int, node: int = 0, restart: int = 0, world: int = 4, local: int = 0
) -> Event:
    return at(
        p.Worker(
            rank=rank,
            local_rank=local,
            world_size=world,
            restart=restart,
            pid=100 + rank,
        ),
        node,
    )


def progress(
    rank: int, node: int = 0, at_s: float = 1.0, restart: int = 0, **more: object
) -> Event:
    return at(p.Progress(rank=rank, restart=restart, at_s=at_s, **more), node)


def output(
    text: str, rank: int = 0, node: int = 0, stream: str = "stdout", skipped: int = 0
) -> Event:
    return at(
        p.Output(rank=rank, stream=stream, offset=0, text=text, skipped_bytes=skipped),
        node,
    )


def ended(
    rank: int, node: int = 0, restart: int = 0, at_s: float = 1.0, **more: object
) -> Event:
    return at(
        p.Ended(rank=rank, restart=restart, **{"outcome": "returned", **more}),
        node,
        at_s,
    )


def raised(rank: int, node: int = 0, message: str = "no", at_s: float = 1.0) -> Event:
    failure = p.Failure(type="RuntimeError", message=message, traceback="Traceback")
    return ended(rank, node, at_s=at_s, outcome="raised", code=1, failure=failure)


def killed(rank: int, node: int = 0, number: int = 9, at_s: float = 1.0) -> Event:
    return ended(rank, node, at_s=at_s, outcome="signalled", code=-number)


def begun(*events: Event, restarts: int = 0) -> RunState:
    """Return a run of two nodes with two ranks each, and what happened then."""
    start = [
        hello(0),
        hello(1),
        worker(0, 0),
        worker(1, 0, local=1),
        worker(2, 1),
        worker(3, 1, local=1),
    ]
    return fold(begin("j", HOSTS, terms(restarts)), [*start, *events])


def texts(state: RunState) -> list[str]:
    return [line.text for line in state.lines]

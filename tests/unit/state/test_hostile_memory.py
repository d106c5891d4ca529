"""Many hosts that flood the notebook with the largest messages of every type: what is kept of them has a stated size."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache

import pytest

from distmagic.connection.limits import DECODER
from distmagic.remote.wire import codec, events
from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.series import Series

NODES = 64
RANKS_A_NODE = 2
WORLD = NODES * RANKS_A_NODE
LINE_BYTES = 200_000
KEPT_BYTES = 96 << 20  # of all that 64 such hosts say
# Of what 64 hosts say that are ahead of the lead; half a mebibyte of lines each.
HELD_BYTES = 160 << 20
WIDE = "\N{PILE OF POO}"  # takes 4 bytes in memory, and every other character beside it, too


def wide(chars: int, number: int) -> str:
    return f"{number} {WIDE}" + "x" * chars


# The largest PNG that is taken, as far as anybody looks into it.
PICTURE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\0\x10\0" * 2 + bytes(140_000)
).decode()


def flood(kind: type, rank: int, number: int) -> dict[str, object]:
    """Return an event of a type, as large as a line of `LINE_BYTES` can make it; no two texts are the same."""
    return FLOODS[kind](rank, number)


def progress(rank: int, number: int) -> dict[str, object]:
    row = {"at_s": number, "metrics": {wide(180, name): number for name in range(60)}}
    bars = [
        {"id": i, "desc": wide(190, i), "unit": wide(190, i), "postfix": wide(490, i)}
        for i in range(40)
    ]
    return {"rank": rank, "restart": 0, "at_s": number, "rows": [row] * 3, "bars": bars, "device": wide(190, number)}  # fmt: skip


def stacks(rank: int, number: int) -> dict[str, object]:
    frame = {
        "file": wide(190, number),
        "line": number,
        "function": wide(190, rank),
        "text": wide(190, number + 1),
    }
    threads = [{"frames": [frame] * 50}] * 3
    return {"request_id": str(number // 1000), "rank": rank, "local_rank": 0, "threads": threads}  # fmt: skip


def ended(rank: int, number: int) -> dict[str, object]:
    failure = {
        "type": wide(1900, number),
        "message": wide(39_000, number),
        "traceback": wide(70_000, number),
    }
    return {"rank": rank, "restart": 0, "outcome": "raised", "code": 1, "failure": failure, "meaning": wide(1900, number)}  # fmt: skip


FLOODS: dict[type, Callable[[int, int], dict[str, object]]] = {
    p.Hello: lambda rank, number: {"protocol": 2, "job": wide(900, number), "node_rank": 0, "hostname": wide(900, number), "pid": 1},
    p.Endpoint: lambda rank, number: {"state": "unreached", "detail": wide(1900, number)},
    p.Worker: lambda rank, number: {"rank": rank, "restart": 0, "local_rank": 0, "world_size": WORLD, "pid": number},
    p.Progress: progress,
    p.Output: lambda rank, number: {
        "rank": number, "stream": "stdout", "offset": 0, "text": f"{wide(1900, number)}\n" * 30 + wide(1900, rank)
    },
    p.Paused: lambda rank, number: {
        "rank": rank, "restart": 0, "prompt": number, "file": wide(190, number), "line": number, "asks": wide(190, number)
    },
    p.Resumed: lambda rank, number: {"rank": rank, "restart": 0, "prompt": number},
    p.Ended: ended,
    p.EngineEnded: lambda rank, number: {"code": 1, "exits": [{"rank": rank, "local_rank": 0, "pid": 1, "code": 1}] * 50},
    p.Notice: lambda rank, number: {"text": wide(1900, number)},
    p.PeerState: lambda rank, number: {"node_rank": number % NODES, "state": "joined"},
    p.NodeAdded: lambda rank, number: {"request_id": "a", "hosts": [wide(900, i) for i in range(NODES)]},
    p.Stacks: stacks,
    p.NodeStopping: lambda rank, number: {"reason": wide(1900, number)},
    p.Detached: lambda rank, number: {"why": wide(1900, number)},
    p.Skipped: lambda rank, number: {"through": number},
    p.Picture: lambda rank, number: {"rank": rank, "restart": 0, "data": PICTURE},
    p.Hardware: lambda rank, number: {"used_bytes": number, "gpus": [{"used_bytes": number, "total_bytes": 1}] * 300},
    p.StacksDone: lambda rank, number: {"request_id": str(number), "ranks": number},
    p.Final: lambda rank, number: {"reason": wide(1900, number), "survivors": [wide(290, i) for i in range(300)]},
}  # fmt: skip


def test_the_flood_has_an_event_of_every_type():
    assert set(FLOODS) == {
        kind for kind in codec._NAMES if kind.__module__ == events.__name__
    }


def event(node: int, kind: type, content: dict[str, object]) -> Event:
    """Return an event as it comes from a host."""
    line = json.dumps(
        {"t": codec._NAMES[kind], "n": 1, **content}, ensure_ascii=False
    ).encode()
    assert len(line) <= LINE_BYTES
    return Event(
        node_rank=node, at_s=1.0, what=DECODER.decode(line)[1], size_bytes=len(line)
    )


@cache
def begun() -> RunState:
    """Return the state after all ranks have begun."""
    state = begin("j", [f"h{node}" for node in range(NODES)])
    for rank in range(WORLD):
        content = flood(p.Worker, rank, 0)
        state = fold(state, [event(rank // RANKS_A_NODE, p.Worker, content)])
    assert len(state.workers) == WORLD
    return state


def flooded(state: RunState, kinds: Iterable[type], rounds: range) -> RunState:
    """Return the state after all nodes have sent these rounds of events of these types."""
    for number in rounds:
        for node in range(NODES):
            rank = RANKS_A_NODE * node + number % RANKS_A_NODE
            for kind in kinds:
                content = flood(kind, rank, 1000 * number + node)
                state = fold(state, [event(node, kind, content)])
    return state


def size_of(value: object, seen: set[int]) -> int:
    """Return the bytes that a value takes up with all that is in it, and counts no part twice."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    return sys.getsizeof(value) + sum(size_of(part, seen) for part in parts(value))


def parts(value: object) -> Iterator[object]:
    if is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
    elif isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, Series):
        yield value._table
    elif isinstance(value, tuple | list) and not isinstance(value, array):
        yield from value


@pytest.mark.parametrize("kind", FLOODS, ids=lambda kind: kind.__name__)
def test_a_flood_of_one_type_from_64_hosts(kind):
    """However often it comes: after more rounds hardly more is kept, or little is."""
    # In two rounds each rank has its turn; stacks of four requests are kept, and a round is one request.
    rounds = 4 if kind is p.Stacks else 2
    state = flooded(begun(), [kind], range(rounds))
    few = size_of(state, set())
    many = size_of(flooded(state, [kind], range(rounds, rounds + rounds // 2)), set())
    assert many < KEPT_BYTES / 2
    assert many < max(1.2 * few, 8 << 20)


def test_a_flood_of_all_types_from_64_hosts():
    state = flooded(begun(), FLOODS, range(2))
    assert size_of(state, set()) < KEPT_BYTES


def test_what_waits_for_the_lead_is_bounded_in_bytes():
    """All hosts but the first claim a later round, so that their events are held: each may hold little more than half a mebibyte."""
    state = begin("j", [f"h{node}" for node in range(NODES)])
    ahead = {**flood(p.Worker, 0, 0), "round": 1}
    state = fold(state, [event(node, p.Worker, ahead) for node in range(1, NODES)])
    for number in range(2):  # of each as much as four times what it may hold
        kinds = (p.Progress, p.Output, p.Ended, p.EngineEnded, p.Final, p.Stacks)
        found = [
            event(node, kind, flood(kind, 0, number))
            for kind in kinds
            for node in range(1, NODES)
        ]
        state = fold(state, found)
    assert set(state.held) == set(range(1, NODES))
    assert size_of(state.held, set()) < HELD_BYTES
    assert all(
        sum(one.size_bytes for one in held) <= 576 << 10 for held in state.held.values()
    )


@pytest.mark.parametrize(
    ("world_size", "metrics", "points", "bars"),
    # Of all ranks together 100,000 metrics, 128,000 points of each and 40,000 bars.
    [(64, 50, 2000, 20), (1024, 50, 125, 20), (4096, 24, 50, 9), (16_384, 6, 50, 2)],
)
def test_the_more_ranks_a_world_has_the_less_is_kept_of_each(
    world_size, metrics, points, bars
):
    """What two ranks say of very many: the others need not speak."""
    state = replace(begin("j", ["h0"]), planned_world_size=world_size)
    for rank in (0, world_size - 1):
        content = {**flood(p.Worker, rank, 0), "world_size": world_size}
        said = [event(0, p.Worker, content)]
        for number in range(60):
            rows = [
                {"at_s": at, "metrics": {"loss": at}}
                for at in range(40 * number, 40 * number + 40)
            ]
            said.append(event(0, p.Progress, {**progress(rank, number), "rows": rows}))
        said.append(event(0, p.Progress, progress(rank, 3000)))
        state = fold(state, said)
    assert state.world_size == world_size
    for rank in (0, world_size - 1):
        assert len(state.series[rank]) == metrics
        # A series that is full is thinned to less than its half.
        assert points / 4 < len(state.series[rank]["loss"]) <= points
        assert len(state.workers[rank].bars) == bars

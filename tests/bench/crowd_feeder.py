"""Plays the agents of a large job, in the words of the wire: `python -m tests.bench.crowd_feeder SOCKET NODES SECONDS`.

Each node has 8 ranks; each rank reports ten times a second, and each node sends what its ranks said as an agent does,
in the rhythm of the real one. Nodes are not in step with each other.
"""

from __future__ import annotations

import math
import selectors
import socket
import sys
import time
from collections.abc import Iterator

from distmagic.remote.agent.rank_table import pace_s
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines

RANKS_A_NODE = 8
HZ = 10


def opening(node: int, nodes: int) -> Iterator[protocol.Message]:
    """Yield what a node says before its first report."""
    yield protocol.Hello(
        protocol=protocol.PROTOCOL,
        job="crowd",
        node_rank=node,
        hostname=f"host-{node}",
        pid=1,
    )
    for local_rank in range(RANKS_A_NODE):
        yield protocol.Worker(
            rank=node * RANKS_A_NODE + local_rank, local_rank=local_rank, world_size=nodes * RANKS_A_NODE, restart=0,
            pid=100 + local_rank,
        )  # fmt: skip


def closing(node: int) -> Iterator[protocol.Message]:
    """Yield what a node says in the end."""
    for local_rank in range(RANKS_A_NODE):
        yield protocol.Ended(
            rank=node * RANKS_A_NODE + local_rank,
            restart=0,
            outcome="returned",
            result_bytes=0,
        )
    yield protocol.EngineEnded(code=0)
    yield protocol.Final(reason="done")


def beats_a_line(nodes: int) -> int:
    """Return how many reports of a rank an agent sends together, in a job of so many nodes."""
    return max(1, round(pace_s(nodes * RANKS_A_NODE) * HZ))


def reports(node: int, beats: range) -> Iterator[protocol.Progress]:
    """Yield what the ranks of a node report in these tenths of a second."""
    for local_rank in range(RANKS_A_NODE):
        rank, last = node * RANKS_A_NODE + local_rank, beats[-1]
        rows = tuple(
            protocol.MetricRow(
                at_s=beat / HZ, step=float(beat), metrics=_metrics(rank, beat)
            )
            for beat in beats
        )
        yield protocol.Progress(
            rank=rank,
            restart=0,
            at_s=last / HZ,
            step=float(last),
            total=36000.0,
            points=protocol.points_of(rows),
        )


def _metrics(rank: int, beat: int) -> dict[str, float]:
    return {
        "loss": 2.3 * math.exp(-beat / 400) + 0.01 * math.sin(rank + beat),
        "accuracy": 1 - math.exp(-beat / 300),
    }


def script(node: int, nodes: int, seconds: float) -> list[bytes]:
    """Return all that a node sends: its beginning, the reports of each turn, its end."""
    step = beats_a_line(nodes)
    turns: list[Iterator[protocol.Message]] = [opening(node, nodes)]
    for beat in range(0, int(seconds * HZ), step):
        turns.append(reports(node, range(beat, beat + step)))
    turns.append(closing(node))
    number, parts = 0, []
    for messages in turns:
        data = bytearray()
        for message in messages:
            number += 1
            data += protocol.encode(message, number)
        parts.append(bytes(data))
    parts[-1] += protocol.encode(protocol.AgentGone())
    return parts


def main() -> None:
    """Serve all nodes until their time is over. What they say is written before: sending it takes next to no time."""
    path, nodes, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    scripts = [script(node, nodes, seconds) for node in range(nodes)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(nodes)
        served = dict(_accept(listener) for _ in range(nodes))
    for node, conn in served.items():
        conn.sendall(scripts[node][0])
    began, late_s = time.monotonic(), 0.0
    turn_s = beats_a_line(nodes) / HZ
    for turn in range(1, len(scripts[0]) - 1):
        for node, conn in sorted(served.items()):
            due = began + turn_s * (turn + node / nodes)
            late_s = max(late_s, -_wait_until(due))
            conn.sendall(scripts[node][turn])
    for node, conn in served.items():
        conn.sendall(scripts[node][-1])
    print(f"{late_s:.3f}")
    _until_closed(list(served.values()))


def _accept(listener: socket.socket) -> tuple[int, socket.socket]:
    """Return the next node that somebody follows, and the connection to that one."""
    conn, _ = listener.accept()
    lines = Lines()
    while (line := lines.line()) is None:
        lines.feed(conn.recv(65536))
    request = protocol.decode(line)[1]
    assert isinstance(request, protocol.FollowJob)
    return request.node_rank, conn


def _wait_until(due: float) -> float:
    left = due - time.monotonic()
    if left > 0:
        time.sleep(left)
    return left


def _until_closed(served: list[socket.socket]) -> None:
    """Read what the notebook says, leases, until it hangs up everywhere."""
    with selectors.DefaultSelector() as selector:
        for conn in served:
            selector.register(conn, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                conn = key.fileobj
                assert isinstance(conn, socket.socket)
                if not conn.recv(65536):
                    selector.unregister(conn)


if __name__ == "__main__":
    main()

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
            rows=rows,
        )


def _metrics(rank: int, beat: int) -> dict[str, float]:
    return {
        "loss": 2.3 * math.exp(-beat / 400) + 0.01 * math.sin(rank + beat),
        "accuracy": 1 - math.exp(-beat / 300),
    }


class Node:
    """One node's end of the wire."""

    def __init__(self, number: int, nodes: int, conn: socket.socket) -> None:
        self.number, self.nodes, self.conn = number, nodes, conn
        self.last = 0

    def say(self, messages: Iterator[protocol.Message]) -> None:
        """Send messages under the next numbers."""
        data = bytearray()
        for message in messages:
            self.last += 1
            data += protocol.encode(message, self.last)
        self.conn.sendall(data)

    def end(self) -> None:
        """Say that all is over."""
        self.say(closing(self.number))
        self.conn.sendall(protocol.encode(protocol.AgentGone()))


def main() -> None:
    """Serve all nodes until their time is over."""
    path, nodes, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(nodes)
        served = [_accept(listener, nodes) for _ in range(nodes)]
    for node in served:
        node.say(opening(node.number, nodes))
    began, late_s = time.monotonic(), 0.0
    step = beats_a_line(nodes)
    for beat in range(0, int(seconds * HZ), step):
        for i, node in enumerate(served):
            due = began + (beat + step * (1 + i / nodes)) / HZ
            late_s = max(late_s, -_wait_until(due))
            node.say(reports(node.number, range(beat, beat + step)))
    for node in served:
        node.end()
    print(f"{late_s:.3f}")
    _until_closed(served)


def _accept(listener: socket.socket, nodes: int) -> Node:
    conn, _ = listener.accept()
    lines = Lines()
    while (line := lines.line()) is None:
        lines.feed(conn.recv(65536))
    request = protocol.decode(line)[1]
    assert isinstance(request, protocol.FollowJob)
    return Node(request.node_rank, nodes, conn)


def _wait_until(due: float) -> float:
    left = due - time.monotonic()
    if left > 0:
        time.sleep(left)
    return left


def _until_closed(served: list[Node]) -> None:
    """Read what the notebook says, leases, until it hangs up everywhere."""
    with selectors.DefaultSelector() as selector:
        for node in served:
            selector.register(node.conn, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                conn = key.fileobj
                assert isinstance(conn, socket.socket)
                if not conn.recv(65536):
                    selector.unregister(conn)


if __name__ == "__main__":
    main()

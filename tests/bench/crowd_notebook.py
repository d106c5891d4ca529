"""The notebook's side of the crowd: what a cell of a real kernel calls. All of distmagic but SSH is at work."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from pathlib import Path

from distmagic.connection.link import Link
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines
from distmagic.request.hosts import Host
from distmagic.runner.event_queue import EventQueue
from distmagic.runner.executor import Executor
from distmagic.runner.interrupts import Interrupts
from distmagic.runner.node_table import NodeTable
from distmagic.runner.run_loop import RunLoop, new_clock
from distmagic.screens.board import Board
from distmagic.screens.notebook import NotebookScreen
from distmagic.state.decide import Limits
from distmagic.state.events import Event
from distmagic.state.fold import begin, fold
from tests.bench import crowd_feeder

SENT = "sent"  # beside the socket too: what the live view has sent to its page
BEGUN = (
    "begun"  # a file of this name appears beside the socket when all nodes are attached
)


class SocketProcess:
    """A node that is at the other end of a unix socket, behind the seam of transports."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def write(self, data: bytes) -> None:
        """Send all of it."""
        self._socket.sendall(data)

    def read(self, max_bytes: int = 65536) -> bytes:
        """Return what is there."""
        return self._socket.recv(max_bytes)

    def stderr(self) -> str:
        """Return nothing: it has none."""
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return at once."""
        return 0

    def close_stdin(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Hang up. Whoever reads meanwhile reads the end; closing alone would not wake that thread."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class FewHosts:
    """What is left of reaching hosts here: links end, none is opened again."""

    @property
    def connections(self) -> FewHosts:
        """What takes links back."""
        return self

    def keep_idle(self, link: Link) -> None:
        """End a link."""
        link.finish()


def follow(path: Path, nodes: int) -> str:
    """Follow the job at `path` to its end, on this kernel's own screen; return its phase."""
    links = {
        node: Link(Host(name=f"host-{node}"), SocketProcess(_dial(path)))
        for node in range(nodes)
    }
    clock = new_clock()
    state = begin("crowd", [link.host.name for link in links.values()])
    sent = Sent()
    screen = NotebookScreen(lambda _: _board_in_a_page(sent))
    queue = EventQueue(clock)
    loop = RunLoop(
        state, queue, screen, lambda _: None, Interrupts(), clock, lambda: "id"
    )
    table = NodeTable(range(nodes), 60.0, lambda: "id")
    executor = Executor("crowd", queue, FewHosts(), 60.0)
    try:
        for node, link in links.items():
            link.attach(protocol.FollowJob(job="crowd", node_rank=node))
        path.with_name(BEGUN).touch()
        loop.follow(table, executor, links, Limits())
        loop.finish()
        state = loop.state
    finally:
        executor.close(table.links)
    assert len(state.workers) == nodes * crowd_feeder.RANKS_A_NODE
    path.with_name(SENT).write_text(f"{sent.messages} {sent.size_bytes} {state.at_s}")
    return state.phase


class Sent:
    """What a live view has sent to its page so far."""

    messages = 0
    size_bytes = 0


def _board_in_a_page(sent: Sent) -> Board:
    """Return a live view that sends all it would send to a page, and counts it."""
    board = Board()
    comm = board._view.comm
    send = comm.send

    def counted(data: object = None, **more: object) -> None:
        sent.messages += 1
        sent.size_bytes += len(json.dumps(data).encode())
        send(data, **more)

    comm.send = counted
    board.answer({"op": "hello"})
    return board


def _dial(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))
    return made


def memory_of_an_hour(nodes: int) -> list[float]:
    """Fold an hour's events of `nodes` nodes, as fast as it goes; return the peak memory every 10 minutes in MB."""
    state = begin("crowd", [f"host-{i}" for i in range(nodes)])
    lines, numbers, found = [Lines() for _ in range(nodes)], [0] * nodes, []
    for beat in range(3600 * crowd_feeder.HZ):
        events: list[Event] = []
        for node in range(nodes):
            messages = (
                crowd_feeder.reports(node, range(beat, beat + 1))
                if beat
                else crowd_feeder.opening(node, nodes)
            )
            for message in messages:
                numbers[node] += 1
                lines[node].feed(protocol.encode(message, numbers[node]))
            while (line := lines[node].line()) is not None:
                events.append(
                    Event(
                        node_rank=node,
                        at_s=beat / crowd_feeder.HZ,
                        what=protocol.decode(line)[1],
                    )
                )
        state = fold(state, events)
        if (beat + 1) % (600 * crowd_feeder.HZ) == 0:
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found

"""Forwards bytes between the notebook and one agent."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distmagic.remote.records import journal, listing, places
from distmagic.remote.system import socket_peer
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation
    from distmagic.remote.wire.lines import Lines

# How often, and how far apart, to check whether an agent that has closed its connection ends.
_DYING_LOOKS = 10
_DYING_S = 0.05


def connect(path: Path) -> socket.socket:
    """Return a connection to an agent.

    Raises OSError; `BlockingIOError` if too many others already wait for one.
    """
    conn = socket.socket(socket.AF_UNIX)
    try:
        # A connection to a stopped agent would wait forever.
        conn.setblocking(False)
        conn.connect(str(path))
        conn.setblocking(True)
        socket_peer.check(conn)
    except BaseException:
        conn.close()
        raise
    return conn


def relay(
    notebook: Conversation, conn: socket.socket, attach: protocol.FollowJob
) -> bool:
    """Forward bytes both ways until the agent closes; return whether it sent anything.

    An agent closes as its last act. It also drops a connection that takes nothing, so the last
    events may be missing: they are in the journal. If the agent still runs, this process exits, and
    the notebook connects again.
    """
    has_spoken = False
    # The number of the last forwarded event.
    last = None if attach.live else attach.after
    torn = b""  # the start of a line: only whole lines are forwarded
    # What the notebook has not taken. A full pipe must not stop its requests, which renew the
    # lease: it may wait for its user, or for another program.
    left = b""
    agent = conn.fileno()
    with conn:
        # An agent that has already ended is noticed below.
        with suppress(ConnectionError):
            conn.sendall(protocol.encode(attach))
        _forward(notebook.lines, conn)
        while True:
            if left:
                readable, writable, _ = select.select([0], [notebook.out], [])
            else:
                readable, writable, _ = select.select([0, agent], [], [])
            if writable:
                left = left[os.write(notebook.out, left[: select.PIPE_BUF]) :]
            if agent in readable:
                data = b""
                with suppress(ConnectionResetError):
                    data = conn.recv(1 << 18)
                if not data:
                    _end(notebook, attach, last if has_spoken else None)
                    return has_spoken
                has_spoken = True
                whole, newline, torn = (torn + data).rpartition(b"\n")
                left = whole + newline
                last = _last_number(whole) or last
            if 0 in readable:
                data = os.read(0, 65536)
                if not data:
                    notebook.write(left)
                    sys.exit(0)  # the channel has ended; the agent waits for its lease
                notebook.lines.feed(data)
                if _forward(notebook.lines, conn):
                    notebook.renew_templates()


def _end(notebook: Conversation, attach: protocol.FollowJob, last: int | None) -> None:
    """Send the events after number `last`, or exit if the agent still runs."""
    if _still_runs(attach):
        sys.exit(0)
    if last is not None:
        replay(notebook, replace(attach, after=last))


def _forward(requests: Lines, conn: socket.socket) -> bool:
    """Send an agent the notebook's complete requests, and return whether there were any; empty
    lines are none. An incomplete one stays in `requests`: it may be for the contact.
    """
    has_any = False
    while (line := requests.line()) is not None:
        if line:
            has_any = True
            # It ends; its last output must still be read.
            with suppress(ConnectionError):
                conn.sendall(line + b"\n")
    return has_any


def _still_runs(attach: protocol.FollowJob) -> bool:
    """Whether the agent that closed its connection still runs.

    A killed process closes its sockets one by one.
    """
    for _ in range(_DYING_LOOKS):
        if not listing.is_running(attach.job, attach.node_rank):
            return False
        time.sleep(_DYING_S)
    return True


def replay(notebook: Conversation, request: protocol.FollowJob) -> None:
    """Send the events of a job from its journal."""
    for line in journal.replay(
        places.job_dir(request.job, request.node_rank), request.after
    ):
        notebook.write(line)


def _last_number(lines: bytes) -> int:
    """Return the number of the last event in these lines, 0 for none."""
    for line in reversed(lines.split(b"\n")):
        if not line:
            continue
        number, message = protocol.decode(line)
        if number:
            return message.through if isinstance(message, protocol.Skipped) else number
    return 0

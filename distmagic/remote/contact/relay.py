"""Carries bytes between the notebook and one agent, and notices an agent whose process is stopped."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distmagic.remote.records import journal, listing, places
from distmagic.remote.system import processes, socket_peer
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation

_LOOK_S = 1.0  # between two looks at an agent's process
# How often, and how far apart, it is looked whether an agent that has closed its connection ends.
_DYING_LOOKS = 10
_DYING_S = 0.05
_STOPPED = ("T", "t")  # by a signal, or by a debugger: see proc_pid_stat(5)


def connect(path: Path) -> socket.socket:
    """Return a connection to an agent. Raises OSError, `BlockingIOError` where too many others wait for one already."""
    conn = socket.socket(socket.AF_UNIX)
    try:
        # Of an agent that is stopped the connection would wait for ever.
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
    """Carry bytes both ways until the agent closes; return whether it sent anything.

    An agent closes as its last act. It also drops a connection that takes nothing, so the last events may be missing:
    they are in the journal. If the agent still runs, this process exits, and the notebook connects again. Raises
    TimeoutError when the agent's process has been stopped for the length of its lease.
    """
    has_spoken = False
    # The number of the last event that was sent on.
    last = None if attach.live else attach.after
    torn = b""  # the beginning of a line: only whole lines are sent on
    watch = _StoppedAgent(attach)
    with conn, selectors.DefaultSelector() as selector:
        # An agent that has ended already is noticed below.
        with contextlib.suppress(ConnectionError):
            conn.sendall(protocol.encode(attach) + notebook.take_rest())
        selector.register(0, selectors.EVENT_READ, "notebook")
        selector.register(conn, selectors.EVENT_READ, "agent")
        while True:
            sides = [key.data for key, _ in selector.select(_LOOK_S)]
            if "agent" in sides:
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    data = conn.recv(1 << 18)
                if not data and _still_runs(attach):
                    sys.exit(0)
                if not data:
                    if has_spoken and last is not None:
                        replay(notebook, replace(attach, after=last))
                    return has_spoken
                has_spoken = True
                whole, newline, torn = (torn + data).rpartition(b"\n")
                notebook.write(whole + newline)
                last = _last_number(whole) or last
            else:
                watch.look(time.monotonic())
            if "notebook" in sides:
                data = os.read(0, 65536)
                if not data:
                    sys.exit(0)  # the channel is gone; the agent waits for its lease
                # It ends; what it has said is still to be read.
                with contextlib.suppress(ConnectionError):
                    conn.sendall(data)
                notebook.renew_templates()


def _still_runs(attach: protocol.FollowJob) -> bool:
    """Whether the agent that has closed its connection is there. One that was killed closes its sockets one by one."""
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


class _StoppedAgent:
    """How long the process of a silent agent has been stopped.

    One that goes on within its lease has lost nothing. After that it would end its ranks as soon as it goes on: nobody
    has to wait for it any longer.
    """

    def __init__(self, attach: protocol.FollowJob) -> None:
        self._job = attach.job
        self._pid_file = places.run_dir(attach.job, attach.node_rank) / places.PID
        self._lease_s = listing.lease_s(attach.job, attach.node_rank)
        self._next_look_s = 0.0
        self._stopped_at_s: float | None = None

    def look(self, now_s: float) -> None:
        """Look at its process, at most every `_LOOK_S`. Raises TimeoutError where it has been stopped for too long."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        agent = processes.noted(self._pid_file)
        if agent is None or agent.state not in _STOPPED:
            self._stopped_at_s = None
        elif self._stopped_at_s is None:
            self._stopped_at_s = now_s
        elif now_s - self._stopped_at_s > self._lease_s:
            text = f"the agent of job {self._job} (pid {agent.pid}) has been stopped by a signal for {self._lease_s:g} s"
            raise TimeoutError(text)


def _last_number(lines: bytes) -> int:
    """Return the number of the last event in these lines, 0 for none."""
    for line in reversed(lines.split(b"\n")):
        if not line:
            continue
        number, message = protocol.decode(line)
        if number:
            return message.through if isinstance(message, protocol.Skipped) else number
    return 0

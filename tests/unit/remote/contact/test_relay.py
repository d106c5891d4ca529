"""The relay between notebook and agent, in a process of its own."""

from __future__ import annotations

import array
import fcntl
import select
import socket
import subprocess
import sys
import termios
import threading
from typing import Any

from distmagic.remote.contact import relay as relay_module
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.lines import Lines
from tests.lab.waiting import HANG_S, wait_until

PROGRAM = """
import socket, sys
from distmagic.remote.contact import relay
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines
class Notebook:
    out = 1
    lines = Lines()
    def renew_templates(self):
        pass
relay._still_runs = lambda _: False
follow = protocol.FollowJob(job="j", node_rank=0, live=True)
relay.relay(Notebook(), socket.socket(fileno=int(sys.argv[1])), follow)
"""


def started(agent: socket.socket, theirs: socket.socket) -> subprocess.Popen[bytes]:
    agent.settimeout(HANG_S)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_an_agent_gets_whole_requests_and_no_empty_lines():
    """Empty lines answer what comes from the host; an agent of an older version takes them for errors."""
    agent, theirs = socket.socketpair()
    with theirs:
        relay = started(agent, theirs)
    request = p.encode(p.StopNode(grace_s=3.0))
    with agent, relay:
        assert p.decode(agent.recv(1 << 16))[1] == p.FollowJob(job="j", node_rank=0, live=True)  # fmt: skip
        for piece in (b"\n", b"\n\n" + request[:5], request[5:] + b"\n", request):
            relay.stdin.write(piece)
            relay.stdin.flush()
        relay.stdin.close()
        received = b""
        while data := agent.recv(1 << 16):
            received += data
        assert received == 2 * request


def test_the_start_of_a_request_stays_for_the_contact_when_an_agent_ends():
    agent, theirs = socket.socketpair()
    requests = Lines()
    requests.feed(p.encode(p.RenewLease()) + b'{"t":"get')
    with agent, theirs:
        assert relay_module._forward(requests, theirs)
        assert agent.recv(1 << 16) == p.encode(p.RenewLease())
    assert requests.take(100) == b'{"t":"get'


def test_requests_pass_while_the_notebook_takes_nothing():
    """A notebook that waits for its user, or for a tracker, still renews its lease."""
    agent, theirs = socket.socketpair()
    with theirs:
        relay = started(agent, theirs)
    with agent, relay:
        attach = agent.recv(1 << 16)
        lines = b"".join(
            p.encode(p.Notice(text=f"{number} {'.' * 900}")) for number in range(1000)
        )

        def report() -> None:
            agent.sendall(lines)
            agent.shutdown(socket.SHUT_WR)

        reports = threading.Thread(target=report)
        reports.start()
        wait_until(lambda: is_full(relay.stdout), "a full pipe to the notebook")
        request = p.encode(p.RenewLease())
        relay.stdin.write(request)
        relay.stdin.flush()
        assert agent.recv(1 << 16) == request
        assert relay.stdout.read() == lines
        reports.join()
        assert relay.wait(HANG_S) == 0
    assert p.decode(attach)[1] == p.FollowJob(job="j", node_rank=0, live=True)


def is_full(pipe: Any) -> bool:
    unread = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0] > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - select.PIPE_BUF

"""The process of an agent: its start, its signal handlers, and what it does if the agent itself
crashes.

`main` reads a `StartNode` line from standard input. Its first argument is the descriptor of the
listening socket for readers, which `contact` has made; the others are descriptors that reserve the
job's devices. An agent that is forked from a template starts with `serve`.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence

from distmagic.remote.agent.agent import Agent
from distmagic.remote.agent.termination import Termination
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol

_TICK_S = 0.05


def main(argv: list[str]) -> None:
    """Read a `StartNode` line from stdin and run its agent."""
    start = protocol.decode(sys.stdin.buffer.readline())[1]
    assert isinstance(start, protocol.StartNode)
    listener, *devices = map(int, argv)
    serve(start, socket.socket(fileno=listener), devices)


def serve(
    start: protocol.StartNode, listener: socket.socket, devices: Sequence[int] = ()
) -> None:
    """Run the agent of one node from start to end; its readers connect to `listener`.

    Never returns. While the descriptors `devices` are open, no other job gets the devices of this
    one.
    """
    # If this job was started from within a rank of another job.
    os.environ.pop("DISTMAGIC_WORKER", None)
    processes.become_subreaper()
    processes.mark_by_limit(start.job)
    agent = Agent(start, listener, time.monotonic, devices)
    signal.signal(signal.SIGTERM, lambda *_: setattr(agent.ending, "got_sigterm", True))
    # A handler is needed so that the signal writes to the wakeup descriptor.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Python writes to this pipe at each signal, which wakes the loop.
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    agent.selector.register(
        reading, selectors.EVENT_READ, lambda: os.read(reading, 4096)
    )
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        agent.begin()
        agent.run()
    except Exception:
        # The job ends with its agent. The run_dir is removed last: while it exists, the next
        # contact to this host sees that a job died on it, and ends the rest. End all processes of
        # the job, including detached ones.
        termination = Termination()
        termination.begin(time.monotonic(), 0.0)
        while not termination.is_done:
            # torchrun's orphans become children of this process, and zombies have no descendants.
            processes.reap()
            time.sleep(_TICK_S)
            termination.step(time.monotonic())
        shutil.rmtree(agent.run_dir, ignore_errors=True)
        raise
    os._exit(0)

"""Runs one node of a job as a task of a platform, such as OSMO, to which no notebook can open a
channel.

    python BUNDLE task FOLDER TORCHRUN'S FLAGS...

`FOLDER` has a `StartNode` message in the file `start`, and its blobs. The task plays the notebook's
part for a contact: it starts the contact, requests the agent, and renews the lease. The agent's
events become lines of the task's log (wire/log_lines.py), at most one line per second and rank. The
task exits with 0 or 1, like its agent.
"""

from __future__ import annotations

import base64
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from distmagic.remote.agent import rank_process
from distmagic.remote.records import places
from distmagic.remote.system import processes
from distmagic.remote.wire import log_lines, protocol
from distmagic.remote.wire.codec import Numbers
from distmagic.remote.wire.lines import Lines

START = "start"  # file name in the folder
MOST_RESULT_BYTES = 1 << 20  # size limit of rank 0's return value
_EVERY_S = 1.0
# A platform only keeps the last lines of a log: the latest of these messages of each rank or host
# is repeated now and then.
_SELDOM_S = {protocol.Picture: 10.0, protocol.Hardware: 30.0}
_ROWS = 50  # points of one metric of one rank in one line
_TEXT_CHARS = 32_000
_NOTICE_CHARS = 1000
# A platform ends the other tasks after the first one has ended: they may still have lines to write.
_LINGER_S = 3.0
_ROLES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class MessageLog:
    """Writes messages as lines. Progress and output of a rank within one second become one line.

    Stacks are left out, because nobody can ask for them.
    """

    _out: IO[str]
    _clock: Callable[[], float] = time.monotonic
    _waiting: list[protocol.Message] = field(default_factory=list)
    # When the next message of a kind and a rank may be written.
    _due_s: dict[tuple[type, int], float] = field(default_factory=dict)
    _number: int = 0

    def add(self, message: protocol.Message) -> None:
        """Add a message; an urgent one is written at once, after those before it."""
        if isinstance(message, protocol.Stacks | protocol.StacksDone):
            return
        if type(message) not in (protocol.Progress, protocol.Output, *_SELDOM_S):
            self.flush()
            self._write(message)
            return
        for place, before in enumerate(self._waiting):
            joined = merged(before, message)
            if joined is not None:
                self._waiting[place] = joined
                return
        self._waiting.append(message)

    def flush(self, *, is_end: bool = False) -> None:
        """Write the waiting messages; of the repeated ones, those that are due, or all at the
        end.
        """
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            key = (type(message), getattr(message, "rank", -1))
            if is_end or now >= self._due_s.get(key, now):
                self._due_s[key] = now + _SELDOM_S.get(key[0], 0.0)
                self._write(message)
            else:
                self._waiting.append(message)

    def result(self, rank: int, data: bytes) -> None:
        """Write a rank's return value."""
        text = base64.b64encode(data).decode()
        self._print(log_lines.written(log_lines.RESULT, rank, text))

    def _write(self, message: protocol.Message) -> None:
        self._number += 1
        text = protocol.encode(message, self._number).decode().rstrip("\n")
        self._print(log_lines.written(log_lines.EVENT, self._number, text))

    def _print(self, lines: list[str]) -> None:
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()


def merged(
    before: protocol.Message, message: protocol.Message
) -> protocol.Message | None:
    """Return two messages merged into one, the later one taking precedence; None if they can't be
    merged. Pure.
    """
    of_one_rank = getattr(before, "rank", -1) == getattr(message, "rank", -1)
    if type(before) is not type(message) or not of_one_rank:
        return None
    if type(message) in _SELDOM_S:
        return message
    if isinstance(before, protocol.Progress) and isinstance(message, protocol.Progress):
        if before.restart != message.restart:
            return None
        both = rank_process.joined(before, message)
        points = {name: Numbers(one[-3 * _ROWS :]) for name, one in both.points.items()}
        return replace(both, points=points)
    if isinstance(before, protocol.Output) and isinstance(message, protocol.Output):
        is_next = (
            before.stream == message.stream
            and not message.skipped_bytes
            and len(before.text) + len(message.text) <= _TEXT_CHARS
        )
        return replace(before, text=before.text + message.text) if is_next else None
    return None


class Task:
    """The conversation with this task's contact."""

    def __init__(self, folder: Path, flags: tuple[str, ...], log: MessageLog) -> None:
        self._log = log
        self._start = _start_message(folder, flags)
        # The payload is placed where agents look for it.
        for name in (self._start.call, self._start.code, *self._start.side_files):
            target = places.blob(name)
            places.make_private(target.parent)
            shutil.copyfile(folder / name, target)
            target.chmod(0o600)
        self._contact = subprocess.Popen(
            processes.command("contact"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lines = Lines()
        self._work = ""
        self._result_bytes: int | None = None
        self._code: int | None = None
        self._final: protocol.Final | None = None  # its line is the very last one
        self._must_stop = False

    def run(self) -> int:
        """Follow the agent to its end; return the task's exit code."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_must_stop", True))
        self._next()  # skips the facts, which are not needed
        self._send(self._start)
        is_stopping = False
        renewed_at = flushed_at = time.monotonic()
        while True:
            message = self._next(_EVERY_S)
            now = time.monotonic()
            if self._must_stop and not is_stopping:
                is_stopping = True
                # For this reason, ranks that handle SIGTERM get it, as they would from OSMO.
                grace_s = self._start.terms.grace_s
                why = "the agent was asked to end"
                self._send(protocol.StopNode(grace_s=grace_s, reason=why))
            if now - renewed_at > self._start.terms.lease_s / 4:
                renewed_at = now
                self._send(protocol.RenewLease())
            if now - flushed_at >= _EVERY_S:
                flushed_at = now
                self._log.flush()
            if message is None:
                continue
            if isinstance(message, protocol.AgentGone | protocol.Refused):
                break
            self._take(message)
        return self._end(message.error)

    def _end(self, error: str) -> int:
        """Write the remaining messages, the last event last; return the exit code."""
        self._log.flush(is_end=True)
        if error:
            self._log.add(protocol.Notice(text=f"its agent reports: {error}"))
        if self._start.lead:
            self._keep_results()
        if self._final is not None:
            self._log.add(self._final)
        if self._start.lead and len(self._start.hosts) > 1:
            time.sleep(_LINGER_S)
        is_done = self._final is not None and self._final.reason == "done"
        return 0 if is_done and self._code == 0 else 1

    def _take(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.WorkDirReady):
            self._work = message.path
            return
        if isinstance(message, protocol.Ended) and message.rank == 0:
            has_returned = message.outcome == "returned"
            self._result_bytes = message.result_bytes if has_returned else None
        elif isinstance(message, protocol.EngineEnded):
            self._code = message.code
        elif isinstance(message, protocol.Final):
            self._final = message
            return
        self._log.add(message)

    def _keep_results(self) -> None:
        """Write rank 0's return value, if rank 0 ran on this node, and copy its files to the
        platform's output folder.
        """
        if self._result_bytes and self._result_bytes <= MOST_RESULT_BYTES:
            self._log.result(0, self._result())
        output = os.environ.get("OUTPUT_DIR", "")
        if not (output and self._work):
            return
        try:
            shutil.copytree(self._work, output, symlinks=True, dirs_exist_ok=True)
        except OSError as error:
            # A pipe or an unreadable file; all others are copied by then.
            text = f"not all files of {self._work} were kept: {error}"
            self._log.add(protocol.Notice(text=text[:_NOTICE_CHARS]))

    def _result(self) -> bytes:
        job, node_rank = self._start.job, self._start.node_rank
        request = protocol.GetFile(job=job, node_rank=node_rank, name="rank0.result")
        self._send(request)
        answer = self._next()
        if not isinstance(answer, protocol.Data):
            return b""
        found = b""
        while len(found) < answer.size_bytes:
            found += self._lines.take(answer.size_bytes - len(found)) or self._more()
        return found

    # ---- bytes

    def _send(self, message: protocol.Message) -> None:
        assert self._contact.stdin is not None
        self._contact.stdin.write(protocol.encode(message))
        self._contact.stdin.flush()

    def _next(self, timeout_s: float | None = None) -> protocol.Message | None:
        """Return the contact's next message; None for a timeout or an unknown message."""
        assert self._contact.stdout is not None
        while (line := self._lines.line()) is None:
            ready, _, _ = select.select([self._contact.stdout], [], [], timeout_s)
            if not ready:
                return None
            self._lines.feed(self._more())
        return protocol.decode(line)[1]

    def _more(self) -> bytes:
        assert self._contact.stdout is not None
        data = os.read(self._contact.stdout.fileno(), 1 << 16)
        if not data:
            sys.exit("distmagic: the contact of this task has ended")
        return data


def _start_message(folder: Path, flags: tuple[str, ...]) -> protocol.StartNode:
    """Return the start message of this node: the common message, with this node's number, flags and
    endpoint.
    """
    missing = [name for name in _ROLES if not os.environ.get(name)]
    if missing:
        sys.exit(
            f"distmagic: {', '.join(missing)} not set: the workflow gives each task its own"
        )
    text = os.environ["NODE_RANK"]
    start = protocol.decode((folder / START).read_bytes())[1]
    assert isinstance(start, protocol.StartNode)
    if not text.isdecimal() or int(text) >= len(start.hosts):
        sys.exit(f"distmagic: NODE_RANK={text} is not a node of {len(start.hosts)}")
    endpoint = ""
    if len(start.hosts) > 1:
        address = socket.gethostbyname(os.environ["MASTER_ADDR"])
        endpoint = f"{address} {os.environ['MASTER_PORT']}"
    return replace(
        start,
        node_rank=int(text),
        torchrun=flags,
        endpoint=endpoint,
        lead=text == "0",
    )


def main(argv: list[str]) -> None:
    """Run this task's node; the first argument is the folder, the others are torchrun's flags."""
    folder = Path(argv[0])
    os.environ.setdefault("DISTMAGIC_HOME", str(folder.parent / "home"))
    sys.exit(Task(folder, tuple(argv[1:]), MessageLog(sys.stdout)).run())

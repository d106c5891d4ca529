"""The notebook's end of one conversation with one host: requests and answers, a job's events, bytes
of files.

A `Link` is one `contact` process on the host, reached over a transport. Malformed data from the
host raises `ProtocolError`, and end of file raises `ConnectionLost`; both name the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

from distmagic.connection import limits
from distmagic.errors import (
    ConnectionLost,
    PayloadError,
    PreflightError,
    ProtocolError,
    Unreachable,
)
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines
from distmagic.request.hosts import Host
from distmagic.transports import Process, Transport
from distmagic.transports.time_limits import TimeLimit

BOOT_TIMEOUT_S = 30.0
# Time limit of a request for which the host looks at all files below a folder. A slow file server
# takes half a minute for a thousand jobs.
WALK_S = 600.0
_CHUNK = 1 << 18
_S_PER_FILE = 0.02
_SLOWEST_BYTES_PER_S = 5e6
# Empty lines that may lie unread while a host sends files: it reads nothing meanwhile.
_MOST_ANSWERS = 1000

M = TypeVar("M")


def patience_s(files: int, size_bytes: int) -> float:
    """Return how long a host may read or copy files: its home may be on a slow, shared file
    server.
    """
    return BOOT_TIMEOUT_S + _S_PER_FILE * files + size_bytes / _SLOWEST_BYTES_PER_S


class Link:
    """One open conversation with a host.

    Methods block; `close` from another thread ends them. `facts` describe the host.

    `opening.open_link` opens one; the package `requests` has the requests to send over it.

    After `events` have ended, `agent_error` is the last output of an agent that crashed. `warm`
    describes the warm process from which this run starts, None for exec. `kept` is the warm process
    of the host, whose link is kept idle between runs. `line_bytes` is the length of the last line,
    which contained the last of `events`.
    """

    def __init__(
        self, host: Host, process: Process, transport: Transport | None = None
    ) -> None:
        self.host = host
        self.transport = transport
        self.by_hand = host.by_hand()
        # Whether the log-in shell, if any, has started the given command.
        self.is_past_shell = True
        self.shell_trouble = ""  # what the shell does instead
        self._process = process
        self._lines = Lines()
        self._is_following = False  # whether events of a job come
        # Whether nothing was sent since something has come (`Source.needs_answers`).
        self._owes_answer = False
        self._answers_left = _MOST_ANSWERS
        self._writing = threading.Lock()
        self.is_closed = False
        self._hello: tuple[int, protocol.Hello] | None = None
        self._last = 0
        self.line_bytes = 0
        self.agent_error = ""
        self.facts: protocol.Facts
        self.interpreter = ""  # the Python that was started
        self.python: tuple[int, ...] = ()  # its version
        self.warm: protocol.TemplateRequest | None = None
        self.kept: protocol.TemplateRequest | None = None
        # Working directory of the started job.
        self.work: protocol.WorkDirReady | None = None
        self.warnings: tuple[str, ...] = ()

    @contextmanager
    def bounded(self, timeout_s: float, what: str = "gave no answer") -> Iterator[None]:
        """Close the link if the block takes longer than `timeout_s`.

        The block then ends with `Unreachable`, for the reason `what`.
        """
        with TimeLimit(timeout_s, self.close) as limit:
            try:
                yield
            except ConnectionLost:
                if not limit.is_over:
                    raise
                hint = "Is the machine overloaded, or its home directory's file server down?"
                if not self.is_past_shell:
                    what = "its log-in shell did not come to Python"
                    hint = f"Do its start-up files wait for something? {hint}"
                raise Unreachable(
                    self.host.name,
                    f"connected, but {what} within {timeout_s:g} s.",
                    f"{hint} Try: {self.by_hand} true",
                ) from None

    # ---- requests and answers

    def send(self, message: protocol.Message) -> None:
        """Send a message. Raises `ConnectionLost`."""
        self._answers_left = _MOST_ANSWERS
        self.write(protocol.encode(message))

    def query(
        self, request: protocol.Message, kind: type[M], limit_s: float | None = None
    ) -> M:
        """Send a request whose answer is one line of this type, and return the answer.

        Raises `PreflightError` if the host refuses, `Unreachable` after `limit_s`, by default
        `BOOT_TIMEOUT_S`, and the errors of `answer`.
        """
        with self.bounded(limit_s or BOOT_TIMEOUT_S):
            self.send(request)
            return self.answer(kind)

    def answer(self, kind: type[M], *more: type[object]) -> M:
        """Return the next answer, which has one of these types.

        Raises `PreflightError` for a refusal.
        """
        return self._numbered_answer(kind, *more)[1]

    def message(self) -> protocol.Message | None:
        """Return the next message, whatever its number; None for one of a newer protocol."""
        return self._next()[1]

    def _next(self) -> tuple[int, protocol.Message | None]:
        line = self.line()
        self.line_bytes = len(line)
        try:
            return limits.DECODER.decode(line)
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None

    def _numbered_answer(self, kind: type[M], *more: type[object]) -> tuple[int, M]:
        n, message = self._next()
        if isinstance(message, protocol.Refused):
            raise self._refusal(message)
        if isinstance(message, protocol.AgentGone):
            raise PreflightError(
                self.host.name,
                f"its agent ended at once: {message.error or 'it reported no reason'}.",
            )
        if not isinstance(message, (kind, *more)):
            raise ProtocolError(
                f"{self.host.name} sent {type(message).__name__} instead of {kind.__name__}."
            )
        return n, cast(M, message)  # a caller that passes `more` checks the type

    def _refusal(self, message: protocol.Refused) -> PreflightError:
        error = f"{message.error.removesuffix('.')}."
        return PreflightError(
            self.host.name, error, _REFUSAL_HINTS.get(message.what, "")
        )

    # ---- a job

    def start(self, request: protocol.StartNode) -> None:
        """Start the job's agent on the host; return when its first message has come.

        Before that the host puts the files of the run into its working directory. Raises
        `PreflightError` if it can't start.
        """
        self._last = 0
        self.agent_error = ""
        self._is_following = True
        try:
            if request.work is not None:
                with self.bounded(
                    patience_s(request.work.files, request.work.size_bytes),
                    "did not bring its files into the working directory",
                ):
                    self.send(request)
                    self.work = self.answer(protocol.WorkDirReady)
            else:
                self.send(request)
            with self.bounded(BOOT_TIMEOUT_S):
                self._hello = self._numbered_answer(protocol.Hello)
        except BaseException:
            self._is_following = False
            raise

    def attach(self, request: protocol.FollowJob) -> None:
        """Continue a job's events after number `request.after`, over this new link."""
        self.send(request)
        self._is_following = True
        self._last = request.after
        self._hello = None
        self.agent_error = ""

    def events(self) -> Iterator[tuple[int, protocol.Message]]:
        """Yield (number, event) until the agent ends: from its first event, or from the position
        given to `attach`.

        Raises `ConnectionLost` if the connection ends before that, `PreflightError` if the host
        refuses to send events, and `ProtocolError`, also for a gap in the numbers.
        """
        n = self._last
        if self._hello is not None:
            n, hello = self._hello
            yield n, hello
        while True:
            number, message = self._next()
            if isinstance(message, protocol.AgentGone):
                self._is_following = False
                self.agent_error = message.error
                return
            if isinstance(message, protocol.Refused):
                self._is_following = False
                raise self._refusal(message)
            if isinstance(message, protocol.Hardware):
                yield n, message  # no event, but information for the current reader
            if number == 0:
                continue  # no event
            if number != n + 1:
                raise ProtocolError(
                    f"{self.host.name}: event {number} came after event {n}."
                )
            if (
                isinstance(message, protocol.Hello)
                and message.protocol != protocol.PROTOCOL
            ):
                why = protocol.another_version(message.job, message.protocol)
                raise ProtocolError(f"{self.host.name}: {why}.")
            n = self._number_of_last(number, message)
            if message is not None:  # else of a newer protocol
                yield n, message

    def _number_of_last(self, number: int, message: protocol.Message | None) -> int:
        """Return the number of the last event in a line. Raises `ProtocolError`."""
        if not isinstance(message, protocol.Skipped):
            return number
        if message.through < number:
            raise ProtocolError(
                f"{self.host.name}: event {number} continues an event that has not started."
            )
        return message.through

    # ---- bytes

    def write(self, data: bytes) -> None:
        """Send bytes. Raises `ConnectionLost`."""
        with self._writing:
            self._owes_answer = False
            self._process.write(data)

    def line(self) -> bytes:
        """Return the next non-empty line. Raises `ConnectionLost` and `ProtocolError`.

        Empty lines are no messages: a host that reserves devices for this notebook detects by them
        whether it is still connected, and both ends answer by them (`Source.needs_answers`).
        """
        try:
            while not (line := self._lines.line()):
                if line is None:
                    if self._is_following:
                        self._answer_by_nothing()
                    self._lines.feed(self._read())
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None
        return line

    def _answer_by_nothing(self) -> None:
        """Send an empty line before waiting for more, if the host may wait for an answer.

        Never where the host expects the bytes of a file.
        """
        source = self.host.allocation
        if self._owes_answer and source is not None and source.needs_answers:
            with suppress(ConnectionLost):  # the next read reports it
                self.write(b"\n")

    def pour(self, local: LocalBlob, offset: int = 0) -> Iterator[int]:
        """Send a file's bytes from `offset` on, which the host expects; yield the number of bytes
        after each block.

        Raises `PayloadError` if the file has become shorter: the conversation can't continue then.
        """
        left = local.blob.size_bytes - offset
        with local.path.open("rb") as file:
            file.seek(offset)
            while left:
                data = file.read(min(left, _CHUNK))
                if not data:
                    self.close()
                    raise PayloadError(
                        f"{local.path} became shorter while it was being sent.",
                        "Run it again.",
                    )
                self.write(data)
                left -= len(data)
                yield len(data)

    def take(self, size: int, write: Callable[[bytes], object]) -> None:
        """Pass the next `size` bytes, which an answer has announced, to `write`."""
        while size > 0:
            most = min(size, _CHUNK)
            data = self._lines.take(most)
            if not data:
                if self._answers_left:
                    self._answers_left -= 1
                    self._answer_by_nothing()
                data = self._read(most)
            size -= len(data)
            write(data)

    def _read(self, size: int = 65536) -> bytes:
        data = self._process.read(size)
        if not data:
            words = self._process.stderr()[-500:]
            raise ConnectionLost(
                f"{self.host.name}: the connection ended. {words}".strip()
            )
        self._owes_answer = bool(data.strip(b"\n"))
        return data

    # ---- the end

    def close(self) -> None:
        """Close the link. An agent runs on under its lease."""
        self.is_closed = True
        self._process.close()

    def end_requests(self) -> None:
        """Announce that no request will follow, so that the host's process ends by itself.

        `finish` waits for that.
        """
        self._process.close_stdin()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Let the host's process end by itself, and wait for it at most `timeout_s`."""
        self.end_requests()
        self._process.wait(timeout_s)
        self.close()


_REFUSAL_HINTS = {
    "offer_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "receive_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "start_node": "Correct this on the host, or choose another directory with --cwd or DISTMAGIC_HOME.",
    "sync_environment": "If a package is at fault, leave it out with --requirements FILE. For another "
    "package index set PIP_INDEX_URL in the host's start-up files, for uv UV_INDEX_URL.",
    "get_file": "Logs and results are kept for 7 days, at most 2 GiB of them.",
}

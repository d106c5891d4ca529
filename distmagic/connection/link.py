"""The notebook's end of one conversation with one host: requests and answers, a job's events, bytes of files.

A `Link` is one `contact` process on the host, reached over a transport. Every wrong byte from the host becomes a
`ProtocolError`, every end of file a `ConnectionLost`, each naming the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
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
_CHUNK = 1 << 18
_S_PER_FILE = 0.02
_SLOWEST_BYTES_PER_S = 5e6
_STRANGE = 1000  # messages of a younger protocol before the answer that is waited for

M = TypeVar("M")


class Link:
    """One open conversation. Methods block; `close` from another thread ends them. `facts` tell what the host is.

    `opening.open_link` opens one; what can be asked over it is in the package `requests`.

    `agent_error` is what an agent that broke down said last, after `events` have come to their end. `warm` is what this
    run starts from, None for exec; `kept` what the host keeps loaded: such a conversation rests between runs.
    `line_bytes` is the length of the line that was read last, which the last of `events` came in.
    """

    def __init__(
        self, host: Host, process: Process, transport: Transport | None = None
    ) -> None:
        self.host = host
        self.transport = transport
        self.by_hand = host.by_hand()
        # The log-in shell, where there is one, has come to the command that it was given.
        self.is_past_shell = True
        self.shell_trouble = ""  # what it does in place of that
        self._process = process
        self._lines = Lines()
        self._writing = threading.Lock()
        self.is_closed = False
        self._hello: tuple[int, protocol.Hello] | None = None
        self._last = 0
        self.line_bytes = 0
        self.agent_error = ""
        self.facts: protocol.Facts
        self.interpreter = ""  # the Python that was started
        self.python: tuple[int, ...] = ()  # its version on the host
        self.warm: protocol.TemplateRequest | None = None
        self.kept: protocol.TemplateRequest | None = None
        self.work: protocol.WorkDirReady | None = None  # of the job that was started
        self.warnings: tuple[str, ...] = ()

    @contextmanager
    def bounded(self, timeout_s: float, what: str = "gave no answer") -> Iterator[None]:
        """Close the conversation when the block takes too long, and raise `Unreachable`; `what` are its words for why."""
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
        """Say something. Raises `ConnectionLost`."""
        self.write(protocol.encode(message))

    def query(self, request: protocol.Message, kind: type[M]) -> M:
        """Ask something that is answered at once by one line of this kind.

        Raises `PreflightError` if the host refuses it, `Unreachable` after `BOOT_TIMEOUT_S`, and what `answer` raises.
        """
        with self.bounded(BOOT_TIMEOUT_S):
            self.send(request)
            return self.answer(kind)

    def answer(self, kind: type[M], *more: type[object]) -> M:
        """Return the next answer, which is of one of these kinds. Raises `PreflightError` if it is a refusal."""
        return self._numbered_answer(kind, *more)[1]

    def messages(
        self, timeout_s: float
    ) -> Generator[protocol.Message | None, None, None]:
        """Yield what the host says, without a look at its numbers. Raises `Unreachable` after `timeout_s`."""
        with self.bounded(timeout_s):
            while True:
                _, message = self._next()
                yield message

    def _next(self) -> tuple[int, protocol.Message | None]:
        line = self.line()
        self.line_bytes = len(line)
        try:
            return limits.DECODER.decode(line)
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None

    def _numbered_answer(self, kind: type[M], *more: type[object]) -> tuple[int, M]:
        n, message = self._next()
        for _ in range(_STRANGE):
            if message is not None:
                break
            n, message = self._next()  # the one before was of a younger protocol
        if isinstance(message, protocol.Refused):
            raise self._refusal(message)
        if isinstance(message, protocol.AgentGone):
            raise PreflightError(
                self.host.name,
                f"its agent ended at once: {message.error or 'without a word'}.",
            )
        if not isinstance(message, (kind, *more)):
            raise ProtocolError(
                f"{self.host.name} sent {type(message).__name__} instead of {kind.__name__}."
            )
        return n, cast(M, message)  # one of `more` is for who asked for these

    def _refusal(self, message: protocol.Refused) -> PreflightError:
        error = f"{message.error}.".replace("..", ".")
        return PreflightError(
            self.host.name, error, _REFUSAL_HINTS.get(message.what, "")
        )

    # ---- a job

    def start(self, request: protocol.StartNode) -> None:
        """Start the job's agent on the host; returns when it has said hello. Raises `PreflightError` if it can't.

        Before that the host brings the files of the run into its working directory.
        """
        self._last = 0
        self.agent_error = ""
        if request.work is not None:
            # The host's home may be on a slow file server, and shared.
            patience_s = (
                BOOT_TIMEOUT_S
                + _S_PER_FILE * request.work.files
                + request.work.size_bytes / _SLOWEST_BYTES_PER_S
            )
            with self.bounded(
                patience_s,
                "did not bring its files into the working directory",
            ):
                self.send(request)
                self.work = self.answer(protocol.WorkDirReady)
        else:
            self.send(request)
        with self.bounded(BOOT_TIMEOUT_S):
            self._hello = self._numbered_answer(protocol.Hello)

    def attach(self, request: protocol.FollowJob) -> None:
        """Go on with a job's events after number `request.after`, over this new conversation."""
        self.send(request)
        self._last = request.after
        self._hello = None
        self.agent_error = ""

    def events(self) -> Iterator[tuple[int, protocol.Message]]:
        """Yield (number, event) until the agent is gone: from hello on, or from where `attach` said.

        Raises `ConnectionLost` when the connection ends before that, `PreflightError` if the host refuses to tell them,
        and `ProtocolError`, also for a gap.
        """
        n = self._last
        if self._hello is not None:
            n, hello = self._hello
            yield n, hello
        while True:
            number, message = self._next()
            if isinstance(message, protocol.AgentGone):
                self.agent_error = message.error
                return
            if isinstance(message, protocol.Refused):
                raise self._refusal(message)
            if isinstance(message, protocol.Hardware):
                yield n, message  # no event, but news for whoever listens just now
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
            if message is not None:  # else of a younger protocol
                yield n, message

    def _number_of_last(self, number: int, message: protocol.Message | None) -> int:
        """Return the number of the last event that a line stands for. Raises `ProtocolError`."""
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
            self._process.write(data)

    def line(self) -> bytes:
        """Return the next line that is not empty. Raises `ConnectionLost` and `ProtocolError`.

        A host that keeps devices for this notebook sends empty ones, by which it learns whether anybody is there.
        """
        try:
            while not (line := self._lines.line()):
                if line is None:
                    self._lines.feed(self._read())
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None
        return line

    def pour(self, local: LocalBlob, offset: int = 0) -> Iterator[int]:
        """Send a file's bytes from `offset` on, which the host waits for; yield how many, each time some are sent.

        Raises `PayloadError` if the file has become shorter since it was looked at: the conversation is at its end then.
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
        """Hand the next `size` bytes, which an answer has announced, to `write`."""
        while size > 0:
            most = min(size, _CHUNK)
            data = self._lines.take(most) or self._read(most)
            size -= len(data)
            write(data)

    def _read(self, size: int = 65536) -> bytes:
        data = self._process.read(size)
        if not data:
            words = self._process.stderr()[-500:]
            raise ConnectionLost(
                f"{self.host.name}: the connection ended. {words}".strip()
            )
        return data

    # ---- the end

    def close(self) -> None:
        """Hang up. The agent, if there is one, goes on under its lease."""
        self.is_closed = True
        self._process.close()

    def end_requests(self) -> None:
        """Tell the host that no request will follow, so that its process ends by itself. `finish` waits for that."""
        self._process.close_stdin()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Let the host's process end by itself, and wait for it, but not longer than `timeout_s`."""
        self.end_requests()
        self._process.wait(timeout_s)
        self.close()


_REFUSAL_HINTS = {
    "offer_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "receive_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "start_node": "Correct this on the host, or choose another directory with --cwd or DISTMAGIC_HOME.",
    "sync_environment": "If a package is at fault, leave it out with --requirements FILE. A host's start-up files name another index "
    "of packages: PIP_INDEX_URL, for uv UV_INDEX_URL.",
    "get_file": "Logs and results are kept for 7 days, at most 2 GiB of them.",
}

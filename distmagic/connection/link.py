"""The notebook's end of one conversation with one host: boot, facts, blobs, start, events, files.

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
from distmagic.planning import preflight
from distmagic.remote.contact import boot
from distmagic.remote.wire import protocol
from distmagic.remote.wire.lines import Lines
from distmagic.remote.wire.protocol import Blob
from distmagic.request.command_prefix import SETUP_LIMIT_S, interpreter_words
from distmagic.request.hosts import Host
from distmagic.transports import Process, Transport

BOOT_TIMEOUT_S = 30.0
STOP_GRACE_S = 3.0
# An agent takes the grace and 10 s more at the longest; the rest is for the job's events, which all come first.
STOP_TIMEOUT_S = 60.0
_NOISE_BYTES = 1 << 20  # of log-in banners before our first line
_CHUNK = 1 << 18
_S_PER_FILE = 0.02
_SLOWEST_BYTES_PER_S = 5e6
_LISTING_BYTES = (
    16 << 20
)  # of a host's list of jobs; 10,000 jobs of 64 hosts each are smaller
LOG_LIMIT_BYTES = 1 << 30  # a longer log is no text to have in memory
_STRANGE = 1000  # messages of a younger protocol before the answer that is waited for

M = TypeVar("M")


class Link:
    """One open conversation. Methods block; `close` from another thread ends them. `facts` tell what the host is.

    `agent_error` is what an agent that broke down said last, after `events` have come to their end. `warm` is what this
    run starts from, None for exec; `kept` what the host keeps loaded: such a conversation rests between runs.
    `line_bytes` is the length of the line that was read last, which the last of `events` came in.
    """

    def __init__(
        self, host: Host, process: Process, transport: Transport | None = None
    ) -> None:
        self.host = host
        self.transport = transport
        self._process = process
        self._lines = Lines()
        self._writing = threading.Lock()
        self._closed = False
        self._hello: tuple[int, protocol.Hello] | None = None
        self._last = 0
        self.line_bytes = 0
        self.agent_error = ""
        self.facts: protocol.Facts
        self.python: tuple[int, ...] = ()  # its version on the host
        self.warm: protocol.TemplateRequest | None = None
        self.kept: protocol.TemplateRequest | None = None
        self.work: protocol.WorkDirReady | None = None  # of the job that was started
        self.warnings: tuple[str, ...] = ()

    # ---- opening

    @classmethod
    def open(
        cls,
        host: Host,
        transport: Transport,
        python: str,
        bundle: LocalBlob,
        before_python: tuple[str, ...] = (),
        setup_line: bytes = b"",
    ) -> Link:
        """Start `contact` on the host and gather its facts. Raises `HostError`, `ConnectionLost`, `ProtocolError`.

        `before_python` are words in front of the Python on its command line, and read the `setup_line` first.
        """
        words = (*before_python, *interpreter_words(python))
        argv = (*words, "-u", "-c", boot.BOOTSTRAP)
        link = cls(host, transport.start(argv), transport)
        link.warnings = tuple(f"{host.name}: {text}" for text in transport.warnings)
        try:
            limit_s = BOOT_TIMEOUT_S + (SETUP_LIMIT_S if setup_line else 0)
            with link.bounded(limit_s):
                link._boot(python, bundle, setup_line)
                link.facts = link._expect(protocol.Facts)
        except BaseException:
            link.close()
            raise
        return link

    @contextmanager
    def bounded(self, timeout_s: float, what: str = "gave no answer") -> Iterator[None]:
        """Close the conversation when the block takes too long, and raise `Unreachable`; `what` are its words for why."""
        late = threading.Event()

        def hang_up() -> None:
            late.set()
            self.close()

        timer = threading.Timer(timeout_s, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except ConnectionLost:
            if late.is_set():
                name = self.host.name
                raise Unreachable(
                    name,
                    f"connected, but {what} within {timeout_s:g} s.",
                    f"Is the machine overloaded, or its home directory's file server down? Try: {self.host.by_hand} true",
                ) from None
            raise
        finally:
            timer.cancel()

    def _boot(self, python: str, bundle: LocalBlob, setup_line: bytes) -> None:
        try:
            self._write(setup_line + boot.program(bundle.blob.sha256))
        except ConnectionLost:
            raise self._no_python(
                python
            ) from None  # it ended even before we could say anything
        reply = self._boot_reply(python)
        name = self.host.name
        preflight.check_system(name, reply.system)
        self.python = reply.python
        preflight.check_oldest_python(name, reply.python, str(reply.executable))
        if reply.error:
            raise PreflightError(
                name,
                f"can't write to {reply.home}: {reply.error}.",
                "Make room or make it writable, or set DISTMAGIC_HOME on the host to a directory elsewhere.",
            )
        if reply.have:
            self._write(b"0\n")
        else:
            size = f"{bundle.blob.size_bytes}\n"
            self._write(size.encode() + bundle.path.read_bytes())

    def _boot_reply(self, python: str) -> limits.FirstReply:
        """Return the first line that is ours; log-in shells may have printed anything before it."""
        noise = 0
        while noise < _NOISE_BYTES:
            try:
                line = self._line()
            except ConnectionLost:
                raise self._no_python(python) from None
            noise += len(line) + 1
            start = line.find(boot.MARK)
            if start >= 0:
                return limits.first_reply(
                    line[start + len(boot.MARK) :], self.host.name
                )
        raise ProtocolError(
            f"{self.host.name}: its log-in shell prints without end.",
            "Look at its start-up files.",
        )

    def _no_python(self, python: str) -> Exception:
        if self._closed:
            return ConnectionLost(f"{self.host.name}: the connection was closed.")
        code = self._process.wait(2.0)
        words = self._process.stderr().split()
        return preflight.no_python(
            self.host.name, python, code, " ".join(words), self.host.by_hand
        )

    # ---- before the start

    def route_to(self, peer: str) -> protocol.Route:
        """Return the address, and its interface, from which this host dials `peer`; "": its address towards this notebook."""
        return self.query(protocol.GetRoute(peer=peer), protocol.Route)

    def free_port(self, address: str) -> int:
        """Return a port of this host's own `address` that is free now. Raises `PreflightError` where it has no such address."""
        return self.query(protocol.GetFreePort(address=address), protocol.FreePort).port

    def deliver(
        self,
        blobs: tuple[LocalBlob, ...],
        tell: Callable[[int, int], object] = lambda *_: None,
    ) -> int:
        """Bring the host what it lacks; return the bytes sent. `tell` is called with (bytes sent so far, bytes in all)."""
        self.send(protocol.OfferBlobs(blobs=tuple(local.blob for local in blobs)))
        wanted = self._expect(protocol.MissingBlobs).sha256
        sending = [local for local in blobs if local.blob.sha256 in wanted]
        total = sum(local.blob.size_bytes for local in sending)
        sent = 0
        tell(sent, total)
        for local in sending:
            for size in self.pour(local):
                sent += size
                tell(sent, total)
        if sending:
            self._expect(protocol.MissingBlobs)
        return total

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
                self._write(data)
                left -= len(data)
                yield len(data)

    def answer(self, kind: type[M], *more: type[object]) -> M:
        """Return the next answer, which is of one of these kinds. Raises `PreflightError` if it is a refusal."""
        return self._expect(kind, *more)

    def query(self, request: protocol.Message, kind: type[M]) -> M:
        """Ask something that is answered at once by one line of this kind. Raises what `open` raises."""
        with self.bounded(BOOT_TIMEOUT_S):
            self.send(request)
            return self._expect(kind)

    # ---- a job

    def start(self, request: protocol.StartNode) -> None:
        """Start the job's agent on the host; returns when it has said hello. Raises `PreflightError` if it can't.

        Before that the host brings the files of the run into its working directory.
        """
        self._last = 0
        self.agent_error = ""
        if request.work is not None:
            with self.bounded(
                _patience_s(request.work),
                "did not bring its files into the working directory",
            ):
                self.send(request)
                self.work = self._expect(protocol.WorkDirReady)
        else:
            self.send(request)
        with self.bounded(BOOT_TIMEOUT_S):
            self._hello = self._expect_numbered(protocol.Hello)

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
            if number == 0:
                continue  # no event
            if number != n + 1:
                raise ProtocolError(
                    f"{self.host.name}: event {number} came after event {n}."
                )
            n = message.through if isinstance(message, protocol.Skipped) else number
            if n < number:
                raise ProtocolError(
                    f"{self.host.name}: event {number} goes on before itself."
                )
            if (
                isinstance(message, protocol.Hello)
                and message.protocol != protocol.PROTOCOL
            ):
                raise ProtocolError(
                    f"{self.host.name}: {protocol.another_version(message.job, message.protocol)}."
                )
            if message is not None:  # else of a younger protocol
                yield n, message

    def send(self, message: protocol.Message) -> None:
        """Say something. Raises `ConnectionLost`."""
        self._write(protocol.encode(message))

    def fetch(
        self,
        request: protocol.GetFile,
        write: Callable[[bytes], object],
        *,
        limit_bytes: int,
    ) -> int:
        """Hand a file of a job to `write`, piece by piece; return its size.

        Raises `PreflightError` if it isn't there, and `ProtocolError`, having taken nothing, if it is larger than
        `limit_bytes`; the conversation is at its end then.
        """
        self.send(request)
        size = self._expect(protocol.Data).size_bytes
        if not 0 <= size <= limit_bytes:
            self.close()
            raise ProtocolError(
                f"{self.host.name}: {request.name} is {size:,} bytes long; at most {limit_bytes:,} are taken.",
                f"It is on that host, under ~/.distmagic/jobs/{request.job}.",
            )
        self.take(size, write)
        return size

    def fetch_blob(self, blob: Blob, write: Callable[[bytes], object]) -> None:
        """Hand a blob that the host has to `write`. Raises `PreflightError` if it isn't there, and `ProtocolError`."""
        self.send(protocol.GetBlob(sha256=blob.sha256))
        size = self._expect(protocol.Data).size_bytes
        if size != blob.size_bytes:
            self.close()
            raise ProtocolError(
                f"{self.host.name}: a file is {size:,} bytes long, and should be {blob.size_bytes:,}."
            )
        self.take(size, write)

    def take(self, size: int, write: Callable[[bytes], object]) -> None:
        """Hand the next `size` bytes, which an answer has announced, to `write`."""
        while size > 0:
            most = min(size, _CHUNK)
            data = self._lines.take(most) or self._read(most)
            size -= len(data)
            write(data)

    def jobs(self, job: str = "") -> tuple[protocol.JobListing, ...]:
        """Return what the host has of jobs, or of one `job`; the oldest first, and of very many only these."""
        found: list[protocol.JobListing] = []
        size_bytes = 0
        with self.bounded(BOOT_TIMEOUT_S):
            self.send(protocol.ListJobs(job=job))
            while some := self._expect(protocol.Jobs).jobs:
                size_bytes += self.line_bytes
                if size_bytes <= _LISTING_BYTES:
                    found += some[: limits.MOST_JOBS - len(found)]
        return tuple(found)

    def remove(self, job: str) -> int:
        """Remove what a job that has ended left on the host; return the bytes. Raises `PreflightError` if it runs."""
        return self.query(protocol.RemoveJob(job=job), protocol.Removed).size_bytes

    def clear(self, *, removes: bool) -> int:
        """Return how many bytes of unused blobs the host keeps; with `removes` it has removed them."""
        return self.query(
            protocol.PruneBlobs(removes=removes), protocol.Removed
        ).size_bytes

    def work_dirs(self) -> tuple[protocol.KeptWorkDir, ...]:
        """Return the working directories that the host keeps."""
        return self.query(protocol.ListWorkDirs(), protocol.WorkDirs).dirs

    def remove_work_dir(self, name: str) -> int:
        """Remove a working directory on the host; return the bytes. Raises `PreflightError` if a job uses it."""
        return self.query(
            protocol.RemoveWorkDir(name=name), protocol.Removed
        ).size_bytes

    def stop(self, job: str, node_rank: int) -> None:
        """End a job on this node, which runs; returns when nothing of it is left.

        Raises `Unreachable` where that takes longer than `STOP_TIMEOUT_S`, and what `events` raises.
        """
        with self.bounded(STOP_TIMEOUT_S, f"job {job} did not confirm its end"):
            self.attach(protocol.FollowJob(job=job, node_rank=node_rank))
            self.send(protocol.StopNode(grace_s=STOP_GRACE_S))
            for _ in self.events():
                continue

    def messages(
        self, timeout_s: float
    ) -> Generator[protocol.Message | None, None, None]:
        """Yield what the host says, without a look at its numbers. Raises `Unreachable` after `timeout_s`."""
        with self.bounded(timeout_s):
            while True:
                _, message = self._next()
                yield message

    def sweep(self, job: str, node_rank: int | None = None) -> protocol.Final:
        """End what is left there of this node, and what dead agents of this job left; return what could not be ended."""
        return self.query(
            protocol.SweepJob(job=job, node_rank=node_rank), protocol.Final
        )

    def close(self) -> None:
        """Hang up. The agent, if there is one, goes on under its lease."""
        self._closed = True
        self._process.close()

    def end_requests(self) -> None:
        """Tell the host that no request will follow, so that its process ends by itself. `finish` waits for that."""
        self._process.close_stdin()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Let the host's process end by itself, and wait for it, but not longer than `timeout_s`."""
        self.end_requests()
        self._process.wait(timeout_s)
        self.close()

    # ---- bytes

    def _write(self, data: bytes) -> None:
        with self._writing:
            self._process.write(data)

    def _read(self, size: int = 65536) -> bytes:
        data = self._process.read(size)
        if not data:
            words = self._process.stderr()[-500:]
            raise ConnectionLost(
                f"{self.host.name}: the connection ended. {words}".strip()
            )
        return data

    def _line(self) -> bytes:
        try:
            while (line := self._lines.line()) is None:
                self._lines.feed(self._read())
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None
        return line

    def _next(self) -> tuple[int, protocol.Message | None]:
        line = self._line()
        self.line_bytes = len(line)
        try:
            return limits.DECODER.decode(line)
        except protocol.BadLine as error:
            raise ProtocolError(f"{self.host.name} sent {error}.") from None

    def _expect(self, kind: type[M], *more: type[object]) -> M:
        return self._expect_numbered(kind, *more)[1]

    def _expect_numbered(self, kind: type[M], *more: type[object]) -> tuple[int, M]:
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
                f"{self.host.name} sent {type(message).__name__} in place of {kind.__name__}."
            )
        return n, cast(M, message)  # one of `more` is for who asked for these

    def _refusal(self, message: protocol.Refused) -> PreflightError:
        error = f"{message.error}.".replace("..", ".")
        return PreflightError(
            self.host.name, error, _REFUSAL_HINTS.get(message.what, "")
        )


def _patience_s(work: protocol.WorkDir) -> float:
    """Return how long a host may take for the files of a run; its home may be on a slow file server, and shared."""
    return (
        BOOT_TIMEOUT_S
        + _S_PER_FILE * work.files
        + work.size_bytes / _SLOWEST_BYTES_PER_S
    )


_REFUSAL_HINTS = {
    "offer_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "receive_blobs": "Make room on the host's disk, or set DISTMAGIC_HOME on the host to a directory on another one.",
    "start_node": "Mend this on the host, or choose another directory with --cwd or DISTMAGIC_HOME.",
    "sync_environment": "Leave the package out with --requirements FILE, or mend it on the host: an index of packages is "
    "named by PIP_INDEX_URL, for uv by UV_INDEX_URL, in its start-up files.",
    "get_file": "Logs and results are kept for 7 days, at most 2 GiB of them.",
}

"""The process behind one SSH channel: answers the notebook, starts agents, and carries bytes between the two.

It holds nothing: when its channel ends it ends, and agents go on under their lease.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from distmagic.remote import facts, journal, listing, logout, logs, peers, places, processes, protocol, warmth
from distmagic.remote.lines import Lines

_CHUNK = 1 << 20
_AGENT_LOG = "agent.log"
_GONE_S = 10.0  # its socket is closed already


class Contact:
    """The conversation on stdin and stdout. Standard output is ours alone: stray prints go to stderr."""

    def __init__(self, umask: int) -> None:
        self._umask = umask  # the user's own, for the ranks
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._lines = Lines()
        self._owner = ""

    def run(self) -> None:
        """Tell the facts, then answer until end of file."""
        _sweep_dead()
        places.expire()
        self._say(replace(facts.gather(), running=listing.running()))
        while (line := self._line()) is not None:
            _, request = protocol.decode(line)
            handler = _HANDLERS.get(type(request))
            if handler is not None:  # an order to an agent that ended meanwhile has none
                self._handle(handler, request)

    def _handle(self, handler: object, request: protocol.Message) -> None:
        try:
            handler(self, request)  # type: ignore[operator]
        except (OSError, ValueError) as error:
            self._say(protocol.Refused(what=type(request).__name__.lower(), error=str(error)))

    # ---- bytes

    def _say(self, message: protocol.Message) -> None:
        self._write(protocol.encode(message))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._out, view) :]

    def _line(self) -> bytes | None:
        while (line := self._lines.line()) is None:
            data = os.read(0, 65536)
            if not data:
                return None
            self._lines.feed(data)
        return line

    # ---- answers

    def ask(self, request: protocol.Ask) -> None:
        """Tell from which address this host dials a peer."""
        address, interface = facts.route(request.peer)
        self._say(protocol.Route(address=address, interface=interface))

    def offer(self, request: protocol.Offer) -> None:
        """Say which files are wanted, and take them."""
        wanted = [blob for blob in request.blobs if not _is_whole(blob)]
        self._say(protocol.Want(sha256=tuple(blob.sha256 for blob in wanted)))
        failed = [error for blob in wanted if (error := self._receive(blob)) is not None]
        if failed:
            raise failed[0]
        for blob in request.blobs:
            os.utime(places.blob(blob.sha256))  # young again
        if wanted:
            self._say(protocol.Want())

    def _receive(self, blob: protocol.Blob) -> OSError | None:
        """Take a file; return why it can't be kept. All of it is read in any case: the conversation must stay whole."""
        path, pieces, digest = places.blob(blob.sha256), self._pieces(blob.size_bytes), hashlib.sha256()
        aside = path.with_name(f"{path.name}.{secrets.token_hex(6)}")  # another host may share this home
        try:
            with aside.open("wb") as file:
                for data in pieces:
                    digest.update(data)
                    file.write(data)
            if digest.hexdigest() != blob.sha256:
                return OSError("a file arrived damaged")
            aside.rename(path)
        except OSError as error:
            for _ in pieces:
                continue
            return error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
        return None

    def _pieces(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes from the notebook."""
        while size:
            data = self._lines.take(min(size, _CHUNK)) or os.read(0, min(size, _CHUNK))
            if not data:
                sys.exit(0)  # the channel is gone in the middle of a file
            size -= len(data)
            yield data

    def start(self, request: protocol.Start) -> None:
        """Start an agent, and carry bytes until it is gone."""
        folder = places.job_dir(request.job, request.node_rank)
        cwd = os.path.expanduser(request.cwd)
        if not os.path.isdir(cwd):
            raise FileNotFoundError(f"the directory {request.cwd} (--cwd) does not exist")
        places.log_limit_bytes(request.env)
        try:
            prefix = logout.survivor_prefix() if request.stays else ()
        except PermissionError as error:
            self._say(protocol.Refused(what="detach", error=str(error)))
            return
        for each in (folder.parent.parent, folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=each is not folder)
        listing.remember(folder, request)
        run_dir = places.make_run_dir(request.job, request.node_rank)
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(run_dir / "readers"))
            (run_dir / "readers").chmod(0o600)
            listener.listen(16)
            wait = self._spawn(replace(request, cwd=cwd), listener, folder, prefix)
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        listener.close()
        self._relay(run_dir / "readers", protocol.Attach(job=request.job, node_rank=request.node_rank))
        wait()
        self._say(protocol.Over(error=_last_line(folder / _AGENT_LOG)))

    def _spawn(
        self, request: protocol.Start, listener: socket.socket, folder: Path, prefix: tuple[str, ...]
    ) -> Callable[[], object]:
        """Start the agent, by fork or by exec; return a function that waits for its end."""
        with (folder / _AGENT_LOG).open("wb") as log:
            if request.warm is not None and not prefix:
                self._owner = request.warm.owner
                agent = warmth.fork_agent(request, listener, log.fileno(), self._umask)
                if agent is not None:
                    return partial(processes.wait_gone, agent, _GONE_S)
            return _exec(request, listener, log, prefix, self._umask)

    def attach(self, request: protocol.Attach) -> None:
        """Carry bytes to and from an agent that runs."""
        run_dir = places.run_dir(request.job, request.node_rank)
        try:
            places.check_run_dir(run_dir)
            self._relay(run_dir / "readers", request)
        except (FileNotFoundError, ConnectionRefusedError):
            self._replay(request)  # the agent has ended meanwhile; its journal says how
        folder = places.job_dir(request.job, request.node_rank)
        self._say(protocol.Over(error=_last_line(folder / _AGENT_LOG)))

    def _replay(self, request: protocol.Attach) -> None:
        for line in journal.replay(places.job_dir(request.job, request.node_rank), request.after):
            self._write(line)

    def _relay(self, path: Path, attach: protocol.Attach) -> None:
        """Carry bytes both ways until the agent closes, which it does as its last act."""
        with socket.socket(socket.AF_UNIX) as conn, selectors.DefaultSelector() as selector:
            conn.connect(str(path))
            peers.check(conn)
            conn.sendall(protocol.encode(attach) + self._lines.take(_CHUNK))
            selector.register(0, selectors.EVENT_READ, "notebook")
            selector.register(conn, selectors.EVENT_READ, "agent")
            while True:
                sides = [key.data for key, _ in selector.select()]
                if "agent" in sides:
                    data = _receive(conn)
                    if not data:
                        return
                    self._write(data)
                if "notebook" in sides:
                    data = os.read(0, 65536)
                    if not data:
                        sys.exit(0)  # the channel is gone; the agent waits for its lease
                    conn.sendall(data)
                    self.renew()

    def fetch(self, request: protocol.Fetch) -> None:
        """Send a file of a job."""
        path = places.job_dir(request.job, request.node_rank) / request.name
        with contextlib.ExitStack() as stack:
            parts = logs.open_all(path, stack) if request.name == path.name and path.parent.is_dir() else []
            if not parts:
                raise FileNotFoundError(f"{request.name} of job {request.job} is not on this host (any more)")
            skip = request.offset
            self._say(protocol.Data(size_bytes=max(0, sum(size for _, size in parts) - skip)))
            for file, size in parts:
                self._send_part(file, min(skip, size), size)
                skip -= min(skip, size)

    def _send_part(self, file: BinaryIO, at: int, end: int) -> None:
        file.seek(at)
        while at < end and (data := file.read(min(end - at, _CHUNK))):
            at += len(data)
            self._write(data)

    def list(self, _: protocol.List) -> None:
        """Tell the jobs of this host."""
        self._say(protocol.Jobs(jobs=listing.jobs()))

    def remove(self, request: protocol.Remove) -> None:
        """Remove what a job that has ended left here."""
        self._say(protocol.Removed(size_bytes=listing.remove(request.job)))

    # ---- templates

    def describe(self, _: protocol.Describe) -> None:
        """Tell the facts once more: a port that was free need not be so any more."""
        self._say(replace(facts.gather(), running=listing.running()))

    def warm(self, request: protocol.Warm) -> None:
        """Have a template. No answer: where there can be none, jobs are started by exec."""
        self._owner = request.owner
        with contextlib.suppress(OSError, ValueError):
            warmth.ensure(request, self._umask)

    def renew(self, _: protocol.Renew | None = None) -> None:
        """Renew the lease of the templates of whoever this is."""
        if self._owner:
            warmth.renew(self._owner)

    def look(self, request: protocol.Look) -> None:
        """Tell what is kept warm for a notebook."""
        self._say(protocol.Templates(templates=warmth.templates(request.owner)))

    def cool(self, request: protocol.Cool) -> None:
        """End what is kept warm for a notebook."""
        warmth.end_all(request.owner)
        self._say(protocol.Templates())

    # ---- the dead

    def sweep(self, request: protocol.Sweep) -> None:
        """End what a dead agent left running."""
        left = processes.sweep(request.job)
        for path in places.run_dirs(request.job):
            shutil.rmtree(path, ignore_errors=True)
        names = tuple(f"{p.name} (pid {p.pid}, state {p.state})" for p in left)
        self._say(protocol.Final(reason="swept", survivors=names))


def _sweep_dead() -> None:
    """End what agents left that were killed together with their notebook: nobody else came to do it."""
    for job, folders in places.dead_runs().items():
        processes.sweep(job, timeout_s=1.0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in places.dead_templates():
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(blob: protocol.Blob) -> bool:
    """Whether a file is here, and not cut short or empty as the loss of power leaves them."""
    try:
        with places.blob(blob.sha256).open("rb") as file:
            if not places.is_private(os.fstat(file.fileno())):
                return False  # somebody else could change it later
            digest = hashlib.sha256()
            while data := file.read(_CHUNK):
                digest.update(data)
    except OSError:
        return False
    return digest.hexdigest() == blob.sha256


def _last_line(path: Path) -> str:
    """Return the last line of a log that isn't blank, "" for none; of a long one its beginning."""
    try:
        lines = path.read_bytes()[-8192:].decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")


def _receive(conn: socket.socket) -> bytes:
    try:
        return conn.recv(1 << 18)
    except ConnectionResetError:
        return b""


def _exec(
    request: protocol.Start, listener: socket.socket, log: IO[bytes], prefix: tuple[str, ...], umask: int
) -> Callable[[], object]:
    """Start the agent in its own session, its listening socket inherited, its `Start` on stdin: no secret in argv."""
    env = {**os.environ, processes.MARK: request.job, places.LOG_BYTES_NAME: str(places.log_limit_bytes(request.env))}
    child = subprocess.Popen(
        [*prefix, sys.executable, "-u", sys.path[0], "agent", str(listener.fileno())], stdin=subprocess.PIPE, stdout=log,
        stderr=log, env=env, pass_fds=(listener.fileno(),), start_new_session=True, umask=umask,
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(protocol.encode(request))
    child.stdin.close()
    return child.wait


_HANDLERS = {
    protocol.Ask: Contact.ask,
    protocol.Offer: Contact.offer,
    protocol.Start: Contact.start,
    protocol.Attach: Contact.attach,
    protocol.Fetch: Contact.fetch,
    protocol.Sweep: Contact.sweep,
    protocol.List: Contact.list,
    protocol.Remove: Contact.remove,
    protocol.Describe: Contact.describe,
    protocol.Warm: Contact.warm,
    protocol.Renew: Contact.renew,
    protocol.Look: Contact.look,
    protocol.Cool: Contact.cool,
}


def main(_: list[str]) -> None:
    """Serve one channel."""
    try:
        Contact(os.umask(0o077)).run()
    except BrokenPipeError:
        sys.exit(0)  # nobody reads any more

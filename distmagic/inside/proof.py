"""How the nodes of a job know each other: by a secret that all of them have, by Slurm's munge, or by a shared home.

    DISTMAGIC_SECRET  both ends have the certificate that follows from it and from the job (connection/certificate)
    munge             the node that dials makes a certificate of its own, and sends it in a credential first: encrypted for
                      this user alone, on machines of this cluster alone. Node 0 takes one of its own user and job, and
                      goes on with that certificate
    a shared home     node 0 makes a secret and writes it there, where the others read it (shared_home.py); the rest is as
                      with DISTMAGIC_SECRET. Under Slurm, where there is no munge

Then all are the same: TLS 1.3, and each end goes on only if the other shows the certificate.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from distmagic.connection.certificate import one_time_secret, shared_secret
from distmagic.errors import UsageError
from distmagic.inside import shared_home
from distmagic.inside.job_node import JobNode
from distmagic.remote.contact import mutual_tls
from distmagic.remote.system import threads
from distmagic.remote.wire.protocol import Secret

SECRET = "DISTMAGIC_SECRET"  # noqa: S105 - its name
_LEAST_CHARS = 16
_MUNGE_S = 10.0  # for a program of munge
_LINE_BYTES = 8192  # a credential has about 2,000
_MOST_AT_ONCE = 16
_TICK_S = 0.1


class WrongSecret(OSError):
    """The other end is a node as this one, of another secret, user or job."""


class Door(Protocol):
    """What lets in who proves himself, at node 0. `refused` counts the nodes of another secret, user or job."""

    refused: int

    def look(self, timeout_s: float) -> ssl.SSLSocket | None:
        """Go on with all who are at the door; return one who has proved himself."""

    def close(self) -> None:
        """Turn all away."""


class Proof(Protocol):
    """One way to prove that a node is of a job."""

    def door(self, listener: socket.socket) -> Door:
        """Return what lets in who connects to `listener`."""

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Prove this node to node 0, and have it prove itself. Raises OSError: `WrongSecret` where it is another node 0."""

    def withdraw(self) -> None:
        """Leave nothing on node 0 with which another process could prove itself: all nodes have come, or it ends."""


def proof_of(environ: Mapping[str, str], place: JobNode) -> Proof | None:
    """Return how this node proves itself, None if it can't. Raises `UsageError` for a secret that is easily guessed."""
    text = environ.get(SECRET, "")
    if text and len(text) < _LEAST_CHARS:
        raise UsageError(
            f"{place.words}: {SECRET} has {len(text)} characters, and whoever guesses it can run programs on your nodes.",
            f"Use {_LEAST_CHARS} or more, such as those of: openssl rand -hex 16",
        )
    if text:
        return SharedSecret(shared_secret(text, place.key))
    if not place.key.startswith("slurm "):
        return None
    if shutil.which("munge") is not None and shutil.which("unmunge") is not None:
        return Munge(place)
    if shared_home.is_there():
        return SharedHome(place)
    return None


def missing(place: JobNode) -> str:
    """Return what `proof_of` has not found, for people."""
    if not place.key.startswith("slurm "):
        return f"{SECRET} is not set"
    return f"{SECRET} is not set, munge is not there, and the home is on no file system that nodes share"


class SharedSecret:
    """All nodes have the same certificate and key."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def door(self, listener: socket.socket) -> Door:
        """Return what lets in who has the secret."""
        tls = mutual_tls.context(self._secret, is_server=True)
        return mutual_tls.Handshakes(listener, tls, self._secret)

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Show the certificate, and look at that of node 0. Raises OSError."""
        return _as_client(plain, self._secret)

    def withdraw(self) -> None:
        """Nothing was left."""


class SharedHome:
    """All nodes see the same home."""

    def __init__(self, place: JobNode) -> None:
        self._place = place
        self._offered = ""  # by node 0
        self._found: Secret | None = None

    def door(self, listener: socket.socket) -> Door:
        """Write a secret, and return what lets in who has read it. Raises `UsageError`."""
        try:
            text = shared_home.offer(self._place.key)
        except OSError as error:
            raise UsageError(
                f"{self._place.words}: the secret for the other nodes can't be written to the home: {error}.",
                f"Make room there, or set {SECRET} to one value on all nodes.",
            ) from None
        self._offered = text
        secret = shared_secret(text, self._place.key)
        tls = mutual_tls.context(secret, is_server=True)
        return mutual_tls.Handshakes(listener, tls, secret)

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Show what follows from the secret in the home, and look at that of node 0. Raises OSError."""
        if self._found is None:
            key = self._place.key
            self._found = shared_secret(shared_home.find(key), key)
        try:
            return _as_client(plain, self._found)
        except WrongSecret:  # that of an earlier node 0: look again
            self._found = None
            raise

    def withdraw(self) -> None:
        """Remove the secret from the home: who has read it keeps it in mind."""
        if self._offered:
            shared_home.withdraw(self._place.key, self._offered)


class Munge:
    """The nodes are of one cluster, and run as one user."""

    def __init__(self, place: JobNode) -> None:
        self._key = place.key
        self._own: Secret | None = None

    def door(self, listener: socket.socket) -> Door:
        """Return what lets in who has a credential of this user for this job."""
        return _MungeDoor(listener, self._key)

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Send a credential, each time a new one: munge takes none twice. Raises OSError."""
        if self._own is None:
            self._own = one_time_secret()
        words = {
            "key": self._key,
            "certificate": self._own.certificate,
            "private": self._own.key,
        }
        argv = ("munge", f"--restrict-uid={os.getuid()}")
        plain.sendall(_output(argv, json.dumps(words).encode()).strip() + b"\n")
        return _as_client(plain, self._own)

    def withdraw(self) -> None:
        """Nothing was left."""


class _MungeDoor:
    """Connections that begin with a credential, each on a thread of its own: few at once, each for a short time.

    Where all rooms are taken, the oldest connection that has shown no credential yet is closed.
    """

    def __init__(self, listener: socket.socket, key: str) -> None:
        self.refused = 0
        self._listener, self._key = listener, key
        self._rooms = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._waiting: dict[socket.socket, None] = {}  # for credentials, oldest first
        self._changing = threading.Lock()
        self._in: queue.SimpleQueue[ssl.SSLSocket] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._acceptor = threads.begin("munge-door", self._accept_all)

    def _accept_all(self) -> None:
        while not self._is_over.is_set():
            if not select.select([self._listener], [], [], _TICK_S)[0]:
                continue
            if not self._rooms.acquire(timeout=_TICK_S):
                self._drop_oldest()
                continue
            try:
                plain, _ = self._listener.accept()
            except OSError:  # gone again
                self._rooms.release()
                continue
            with self._changing:
                self._waiting[plain] = None
            threads.begin("munge", self._prove, plain)

    def _drop_oldest(self) -> None:
        """Hang up on the connection that has kept its credential for longest; its thread closes it."""
        with self._changing:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
                with contextlib.suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)

    def look(self, timeout_s: float) -> ssl.SSLSocket | None:
        """Return a connection that has proved itself."""
        try:
            return self._in.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _prove(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(mutual_tls.HANDSHAKE_S)
            tls = self._let_in(plain)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, WrongSecret):
                self.refused += 1
            plain.close()
        else:
            self._in.put(tls)
            if self._is_over.is_set():
                self._turn_away()
        finally:
            self._rooms.release()

    def _let_in(self, plain: socket.socket) -> ssl.SSLSocket:
        """Return the connection under TLS. Raises OSError or ValueError for what is no credential of this user for this job."""
        try:
            credential = _line(plain)
        finally:
            with self._changing:
                self._waiting.pop(plain, None)
        said = _output(("unmunge", "--keys=UID"), credential)
        uid, payload = parsed(said.decode())
        if uid != os.getuid():
            raise WrongSecret("of another user")
        words = json.loads(payload)
        if words["key"] != self._key:
            raise WrongSecret("of another job")
        secret = Secret(certificate=words["certificate"], key=words["private"])
        tls = mutual_tls.context(secret, is_server=True).wrap_socket(
            plain, server_side=True
        )
        try:
            mutual_tls.check_peer(tls, secret)
        except BaseException:
            tls.close()
            raise
        return tls

    def close(self) -> None:
        """Accept nobody any more, and turn away who was not looked at."""
        self._is_over.set()
        self._acceptor.join()
        self._turn_away()

    def _turn_away(self) -> None:
        while True:
            try:
                self._in.get_nowait().close()
            except queue.Empty:
                return


def parsed(said: str) -> tuple[int, str]:
    """Return (user id, payload) of what `unmunge --keys=UID` prints. Raises ValueError. Pure."""
    head, _, payload = said.partition("\n\n")
    found = re.fullmatch(r"UID:\s+\S+ \((\d+)\)", head.strip())
    if found is None:
        raise ValueError(f"unmunge reported {head[:80]!r}")
    return int(found[1]), payload


def _line(plain: socket.socket) -> bytes:
    """Return the first line, up to its end and no further: TLS begins behind it."""
    end_s = time.monotonic() + mutual_tls.HANDSHAKE_S
    line = bytearray()
    while not line.endswith(b"\n"):
        data = plain.recv(1)
        if not data or len(line) > _LINE_BYTES or time.monotonic() > end_s:
            raise OSError("no line")
        line += data
    return bytes(line)


def _output(argv: tuple[str, ...], data: bytes) -> bytes:
    """Return what a program of munge prints. Raises OSError."""
    try:
        done = subprocess.run(
            argv, input=data, capture_output=True, timeout=_MUNGE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{argv[0]} did not end") from None
    if done.returncode:
        raise OSError(f"{argv[0]}: {done.stderr.decode(errors='replace')[:200]}")
    return done.stdout


def _as_client(plain: socket.socket, secret: Secret) -> ssl.SSLSocket:
    context = mutual_tls.context(secret, is_server=False)
    tls = context.wrap_socket(plain, do_handshake_on_connect=False)
    try:
        tls.do_handshake()
        mutual_tls.check_peer(tls, secret)
    except BaseException as error:
        is_wrong = isinstance(error, OSError) and mutual_tls.is_other_secret(tls, error)
        tls.close()
        if is_wrong:
            raise WrongSecret("another secret") from None
        raise
    return tls

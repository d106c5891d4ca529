"""The interface to paramiko: one SSH session over a byte stream, and private keys.

The only file that imports paramiko.

Every exception of paramiko and of its sockets becomes a `Trouble` (while connecting) or a
`ConnectionLost` (after).
"""

from __future__ import annotations

import copy
import io
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.common import cMSG_GLOBAL_REQUEST

from distmagic.errors import ConnectionLost, PreflightError
from distmagic.remote.frozen import frozen
from distmagic.remote.system import threads
from distmagic.transports import Argv, quoting, troubles
from distmagic.transports.ssh import known_hosts, pins
from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.ssh.process import SshProcess
from distmagic.transports.ssh.public_keys import Certificate, take_strings
from distmagic.transports.ssh.streams import Closable, Stream

KEEPALIVE_S = 2.0
# number of unanswered keep-alives after which the connection is dropped
SILENT_TICKS = 4
CHANNEL_TIMEOUT_S = 30.0
FAREWELL_S = 0.5  # time for the other end to close first
_BROKEN = (paramiko.SSHException, EOFError, OSError)
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_FAST_FIRST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
# paramiko logs tracebacks of refused or ended connections. distmagic reports these errors itself.
# One logger for all connections, because loggers live forever.
_LOG = logging.getLogger("distmagic.ssh")
_LOG.addHandler(logging.NullHandler())
_LOG.propagate = False


# The methods that are left after one attempt: () if the user is logged in, None for a refusal.
MethodsLeft = tuple[str, ...] | None


@frozen
class SshKey:
    """A key to offer. `label` is its name in messages, `blob` is its public half."""

    label: str
    blob: bytes
    inner: paramiko.PKey


class _Packetizer(paramiko.packet.Packetizer):  # type: ignore[misc]
    """Records that data has arrived.

    New session keys are negotiated after 8 GB, instead of paramiko's 512 MB. If a channel ends
    during the negotiation, paramiko's thread waits 30 s for something that only itself can do. Then
    it drops the connection.
    """

    REKEY_BYTES = 1 << 33
    received = 0

    def read_message(self) -> object:
        message = super().read_message()
        self.received += 1
        return message

    def close(self) -> None:
        """Close the stream. A jump host's stream closes over its own connection, which may have
        ended first.
        """
        with suppress(EOFError, OSError, paramiko.SSHException):
            super().close()


class SshSession:
    """One SSH connection, a `Transport` once it is logged in.

    `where` is the machine in errors, `seconds` the time limit for connecting, `name` the host.

    `under` are the objects to close after it, the last one first.
    """

    def __init__(self, stream: Stream, where: str, seconds: float) -> None:
        self.where = where
        self.under: list[Closable] = []
        self.name = self._user = ""
        self.warnings: tuple[str, ...] = ()
        self._transport = paramiko.Transport(stream, packetizer_class=_Packetizer)
        self._transport.set_log_channel(_LOG.name)
        self._transport.banner_timeout = self._transport.handshake_timeout = seconds + 1
        # a user may be typing: the deadline of the connection ends it
        self._transport.auth_timeout = None
        self._transport.channel_timeout = CHANNEL_TIMEOUT_S
        self._over = threading.Event()

    # ---- connecting

    @property
    def has_banner(self) -> bool:
        """Whether the server has sent its SSH version."""
        return bool(self._transport.remote_version)

    def handshake(self, server: Resolved) -> None:
        """Negotiate keys and check the server's. Raises `Trouble`."""
        self._user, self.name, self.warnings = server.user, server.name, server.warnings
        known = known_hosts.read((*server.user_known_hosts, *server.global_known_hosts))
        options = self._transport.get_security_options()
        options.ciphers = sorted(
            options.ciphers, key=lambda name: name not in _FAST_FIRST
        )
        # Types in known_hosts come first, so that the server shows a key of one of these.
        first = known_hosts.types_known(known, known_hosts.names_of(server))
        if "ssh-rsa" in first:
            first = (*_RSA, *first)
        options.key_types = sorted(
            options.key_types, key=lambda name: name not in first
        )
        try:
            self._transport.start_client()
        except _BROKEN as error:
            text = str(error)
            if self._transport.remote_version:
                raise troubles.BROKEN(self.where, text or "it hung up") from error
            said = text.removeprefix("Error reading SSH protocol banner")
            said = said or "it hung up at once"
            raise troubles.NOT_SSH(self.where, said) from error
        key = self._transport.get_remote_server_key()
        shown = key.get_name(), key.asbytes()
        if server.is_pinned:
            pins.check(server, self.where, *shown)
        else:
            known_hosts.check(known, server, self.where, *shown)

    def methods(self) -> MethodsLeft:
        """Ask which methods the server accepts; some servers need none."""

        def attempt(transport: paramiko.Transport, user: str) -> list[str]:
            try:
                listed: list[str] = transport.auth_none(user)
            except paramiko.BadAuthenticationType as error:
                listed = error.allowed_types
            return listed

        return self._attempt(attempt)

    def offer_key(self, key: SshKey) -> MethodsLeft:
        """Offer one key."""
        return self._attempt(lambda t, user: t.auth_publickey(user, key.inner))

    def offer_password(self, password: str) -> MethodsLeft:
        """Offer a password."""
        return self._attempt(
            lambda t, user: t.auth_password(user, password, fallback=False)
        )

    def answer_questions(self, ask: Callable[[str, bool], str]) -> MethodsLeft:
        """Let `ask(question, is_shown)` answer each question. Raises its errors.

        It is called on paramiko's thread, which for an error ends the connection, and passes the
        error on to this one.
        """

        def answers(
            title: str, instructions: str, questions: list[tuple[str, bool]]
        ) -> list[str]:
            lead = " ".join(
                part.strip() for part in (title, instructions) if part.strip()
            )
            return [ask(f"{lead} {text}".strip(), shown) for text, shown in questions]

        return self._attempt(lambda t, user: t.auth_interactive(user, answers))

    def _attempt(
        self, attempt: Callable[[paramiko.Transport, str], list[str]]
    ) -> MethodsLeft:
        """Make one attempt. Raises `Trouble` if the connection ends."""
        try:
            return tuple(attempt(self._transport, self._user))
        except _BROKEN as error:
            if not self._transport.is_active():
                raise troubles.HUNG_UP(self.where) from error
            return None

    # ---- connected

    def watch(self) -> None:
        """Send keep-alives, which the server answers, and end the connection if no answer comes."""
        self._transport.packetizer.set_keepalive(KEEPALIVE_S, self._ask_for_life)
        threads.begin("keepalive", self._end_when_silent)

    def _ask_for_life(self) -> None:
        if not self._transport.clear_to_send.is_set():
            return  # this thread negotiates new keys
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        # Requests a reply, which paramiko's own keep-alive does not.
        message.add_boolean(True)
        self._transport._send_user_message(message)  # noqa: SLF001 - global_request would wait in paramiko's thread

    def _end_when_silent(self) -> None:
        silent = 0
        received = -1
        # Counted in ticks, not by the clock: after a suspend the reader must run first.
        while not self._over.wait(KEEPALIVE_S) and self._transport.is_active():
            now = self._transport.packetizer.received
            silent = silent + 1 if now == received else 0
            received = now
            if silent >= SILENT_TICKS:
                self._cut()

    @property
    def is_active(self) -> bool:
        """Whether the connection is open, as far as known."""
        return bool(self._transport.is_active())

    def open_stream(self, hostname: str, port: int, where: str) -> Stream:
        """Return a byte stream from this host to another one. Raises `Trouble`."""
        try:
            stream: Stream = self._transport.open_channel(
                "direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CHANNEL_TIMEOUT_S
            )  # fmt: skip
        except _BROKEN as error:
            why = (
                error.text
                if isinstance(error, paramiko.ChannelException)
                else str(error)
            )
            raise troubles.NOT_FORWARDED(
                self.where, why or "no reason given", behind=where
            ) from error
        return stream

    def start(self, argv: Argv) -> SshProcess:
        """Start `argv` on the host through the log-in shell.

        Raises `ConnectionLost`, or `PreflightError` if it is refused.
        """
        command, name = quoting.command_line(argv), self.name
        lost = ConnectionLost(f"{name}: the connection to {self.where} is lost.")
        try:
            channel = self._transport.open_session(timeout=CHANNEL_TIMEOUT_S)
        except paramiko.ChannelException as error:
            hint = "Its sshd may limit sessions (MaxSessions); raise the limit, or close other connections."
            raise PreflightError(
                name,
                f"no further process can be started on this host: {error.text[:500]}.",
                hint,
            ) from error
        except _BROKEN as error:
            raise lost from error
        try:
            channel.exec_command(command)
        except _BROKEN as error:
            if not self.is_active:
                raise lost from error
            hint = "The account may be restricted to other uses: ask the machine's administrator."
            raise PreflightError(
                name, "the SSH server refuses to run commands.", hint
            ) from error
        return SshProcess(channel, name, _BROKEN)

    def close(self) -> None:
        """End the connection and everything on it, after sending pending data.

        Safe to call twice.
        """
        if self._transport.is_authenticated():
            # Closing a socket with unread bytes discards data on its way out; an end of file does
            # not. But not on a channel through a closed jump host: its sshd would disconnect all
            # hosts.
            with suppress(*_BROKEN):
                if not getattr(self._transport.sock, "closed", False):
                    self._transport.sock.shutdown(socket.SHUT_WR)
            self._transport.join(FAREWELL_S)
        self._cut()
        while self.under:
            self.under.pop().close()

    def _cut(self) -> None:
        self._over.set()
        with suppress(*_BROKEN):
            self._transport.close()
        # This cancels a timer that would delay Python's exit.
        self._transport.packetizer.complete_handshake()
        with suppress(OSError, EOFError):
            self._transport.sock.close()


# ---- keys


_KINDS = (
    (rsa.RSAPrivateKey, paramiko.RSAKey),
    (ed25519.Ed25519PrivateKey, paramiko.Ed25519Key),
    (ec.EllipticCurvePrivateKey, paramiko.ECDSAKey),
)


_NO_KEY = (paramiko.SSHException, StopIteration, ValueError, UnsupportedAlgorithm)


class UnusableKey(Exception):
    """The file has no key that paramiko supports; the text has the reason."""


def load_key(path: str, passphrase: str | None) -> SshKey | None:
    """Read a private key; None if it is encrypted, and the passphrase is missing or wrong.

    Raises `UnusableKey`.
    """
    password = None if passphrase is None else passphrase.encode()
    try:
        data = Path(path).read_bytes()
        loaded: object
        try:
            loaded = serialization.load_ssh_private_key(data, password)
        except ValueError:
            loaded = serialization.load_pem_private_key(data, password)
        # `PKey.from_path` would also load a certificate, and fail if that is broken.
        kind = next(ours for theirs, ours in _KINDS if isinstance(loaded, theirs))
        inner = kind.from_private_key(io.StringIO(data.decode()), password)
    except TypeError:  # "password-protected, but password was not provided"
        return None
    except _NO_KEY as error:
        if passphrase is not None:
            return None
        raise UnusableKey("no private key that paramiko can use") from error
    except OSError as error:
        raise UnusableKey(error.strerror or str(error)) from error
    return SshKey(label=f"key {path}", blob=inner.asbytes(), inner=inner)


class _AgentKey(paramiko.PKey):  # type: ignore[misc]
    """A key of the user's agent; if the agent refuses to sign, the key is refused, and the
    connection stays open.
    """

    def __init__(self, agent: KeyAgent, blob: bytes) -> None:
        self.public_blob = None
        self._agent = agent
        self._blob = blob

    def get_name(self) -> str:
        return str(paramiko.Message(self._blob).get_binary(), errors="replace")

    def asbytes(self) -> bytes:
        return self._blob

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        flags = paramiko.agent.ALGORITHM_FLAG_MAP.get(algorithm, 0)
        return self._agent.sign(self._blob, data, flags)


def agent_key(agent: KeyAgent, blob: bytes, comment: str) -> SshKey:
    """Return a key of the agent, by its public half."""
    name = comment or known_hosts.fingerprint(blob)
    return SshKey(label=f"agent's key {name}", blob=blob, inner=_AgentKey(agent, blob))


def certified(key: SshKey, certificate: Certificate) -> SshKey:
    """Return `key` with its certificate: the server sees the certificate, and the key signs."""
    kind = take_strings(certificate.blob, 1)[0].decode(errors="replace")
    inner = copy.copy(key.inner)
    inner.public_blob = paramiko.pkey.PublicBlob(kind, certificate.blob)
    label = f"certificate {certificate.file} with {key.label}"
    return SshKey(label=label, blob=certificate.blob, inner=inner)

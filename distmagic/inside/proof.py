"""Authenticates the nodes of a job to each other: by a secret that all of them have, or by a shared
home.

    DISTMAGIC_SECRET  both ends derive the same certificate from it and from the job
                      (connection/certificate)
    a shared home     node 0 makes a secret and writes it to the home, where the others read it
                      (shared_home.py); the rest is as with DISTMAGIC_SECRET. Only under Slurm

Both then use TLS 1.3, and each end continues only if the other shows the certificate.
"""

from __future__ import annotations

import socket
import ssl

from distmagic.connection.certificate import shared_secret
from distmagic.errors import UsageError
from distmagic.inside import shared_home
from distmagic.inside.job_node import Environ, JobNode
from distmagic.payload.sizes import plural
from distmagic.remote.contact import mutual_tls
from distmagic.remote.wire.protocol import Secret

SECRET = "DISTMAGIC_SECRET"  # noqa: S105 - its name
_LEAST_CHARS = 16


class WrongSecret(OSError):
    """The other end is also a distmagic node, but has another secret or job."""


class SharedSecret:
    """All nodes have the same certificate and key."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def door(self, listener: socket.socket) -> mutual_tls.Handshakes:
        """Return an object that accepts connections to `listener` from peers with the secret.

        Raises `UsageError`.
        """
        tls = mutual_tls.context(self._secret, is_server=True)
        return mutual_tls.Handshakes(listener, tls, self._secret)

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Authenticate this node and node 0 to each other; return the encrypted connection.

        Raises OSError; `WrongSecret` if the other end is node 0 of another job.
        """
        context = mutual_tls.context(self._secret, is_server=False)
        tls = context.wrap_socket(plain, do_handshake_on_connect=False)
        try:
            tls.do_handshake()
            mutual_tls.check_peer(tls, self._secret)
        except BaseException as error:
            is_wrong = isinstance(error, OSError) and mutual_tls.is_other_secret(
                tls, error
            )
            tls.close()
            if is_wrong:
                raise WrongSecret("another secret") from None
            raise
        return tls

    def withdraw(self) -> None:
        """Remove the secret from node 0's disk, once all nodes have arrived, or it ends."""


class SharedHome(SharedSecret):
    """All nodes share a home: the secret is the one that node 0 has last written to it."""

    def __init__(self, place: JobNode) -> None:
        self._place = place
        self._offered = ""  # by node 0
        self._is_known = False  # whether node 0's text is known

    def door(self, listener: socket.socket) -> mutual_tls.Handshakes:
        """Write a secret, and return an object that accepts peers that have read it.

        Raises `UsageError`.
        """
        try:
            self._offered = shared_home.offer(self._place.key)
        except OSError as error:
            raise UsageError(
                f"{self._place.words}: the secret for the other nodes can't be written to the home: {error}.",
                f"Make room in the home, or set {SECRET} to one value on all nodes.",
            ) from None
        self._secret = shared_secret(self._offered, self._place.key)
        return super().door(listener)

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Show the certificate from the secret in the home, and check that of node 0.

        Raises OSError.
        """
        if not self._is_known:
            key = self._place.key
            self._secret = shared_secret(shared_home.find(key), key)
            self._is_known = True
        try:
            return super().wrap(plain)
        except WrongSecret:  # the text of an earlier node 0: read it again
            self._is_known = False
            raise

    def withdraw(self) -> None:
        """Remove the secret from the home: nodes that have read it keep it in memory."""
        if self._offered:
            shared_home.withdraw(self._place.key, self._offered)


def proof_of(environ: Environ, place: JobNode) -> SharedSecret | None:
    """Return how this node authenticates, None if it can't.

    Raises `UsageError` for a weak secret.
    """
    text = environ.get(SECRET, "")
    if text and len(text) < _LEAST_CHARS:
        raise UsageError(
            f"{place.words}: {SECRET} has {plural(len(text), 'character')}, and whoever guesses it can run programs on your nodes.",
            f"Use {_LEAST_CHARS} or more, such as those of: openssl rand -hex 16",
        )
    if text:
        return SharedSecret(shared_secret(text, place.key))
    if place.key.startswith("slurm ") and shared_home.is_there():
        return SharedHome(place)
    return None


def missing(place: JobNode) -> str:
    """Return a text about what `proof_of` has not found."""
    if not place.key.startswith("slurm "):
        return f"{SECRET} is not set"
    return f"{SECRET} is not set, and the home is on no file system that nodes share"

"""TLS 1.3 connections between two ends with the same certificate and key: each continues only if
the other shows it.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import tempfile
import time

from distmagic.remote.wire.protocol import Secret

HANDSHAKE_S = 5.0
# Both ends name it in the handshake (ALPN). It proves nothing: it distinguishes a distmagic peer
# with another secret from a stranger.
_PROTOCOL = "distmagic"
# Connections that have not shown a certificate; one more, and the oldest is closed.
_MOST_HANDSHAKES = 32


def context(secret: Secret, *, is_server: bool) -> ssl.SSLContext:
    """Return the TLS context of one end: it shows and accepts the secret's certificate, nothing
    else.
    """
    made = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    )
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.set_alpn_protocols([_PROTOCOL])
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=secret.certificate)
    # Without a name: no other process can open it, and it can't be left behind.
    with tempfile.TemporaryFile() as file:
        file.write((secret.certificate + secret.key).encode())
        file.flush()
        made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    if is_server:
        made.num_tickets = 0
    return made


def check_peer(tls: ssl.SSLSocket, secret: Secret) -> None:
    """Raise SSLError unless the other end has shown exactly the secret's certificate."""
    if tls.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(
        secret.certificate
    ):
        raise ssl.SSLError("another certificate")


def is_other_secret(tls: ssl.SSLSocket, error: OSError) -> bool:
    """Whether a handshake failed because the other end is a distmagic peer with another
    certificate.

    The client checks first: it sees the server's certificate, and the server sees the resulting
    alert. Port scans, browsers and other servers never count.
    """
    is_about_certificates = (
        isinstance(error, ssl.SSLCertVerificationError)
        or getattr(error, "reason", "") == "TLSV1_ALERT_UNKNOWN_CA"
    )
    return is_about_certificates and tls.selected_alpn_protocol() == _PROTOCOL


class Handshakes:
    """Pending TLS handshakes: few, each for a short time, and none delays another."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, secret: Secret
    ) -> None:
        self._listener = listener
        self._context = tls
        self._secret = secret
        # With their deadline, oldest first.
        self._waiting: dict[ssl.SSLSocket, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def look(self, timeout_s: float) -> ssl.SSLSocket | None:
        """Continue all handshakes; return a connection that has shown the certificate."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._waiting and self._is_done(key.fileobj):
                return self._remove(key.fileobj)
        now = time.monotonic()
        for late in [tls for tls, until in self._waiting.items() if until < now]:
            self._refuse(late)
        return None

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except OSError:
            return  # the peer has gone again
        if len(self._waiting) >= _MOST_HANDSHAKES:
            self._refuse(next(iter(self._waiting)))
        try:
            plain.setblocking(False)
            tls = self._context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
        except OSError:
            plain.close()
            return
        self._waiting[tls] = time.monotonic() + HANDSHAKE_S
        self._selector.register(tls, selectors.EVENT_READ)

    def _is_done(self, tls: ssl.SSLSocket) -> bool:
        try:
            tls.do_handshake()
            check_peer(tls, self._secret)
        except ssl.SSLWantReadError:
            self._selector.modify(tls, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(tls, selectors.EVENT_WRITE)
        except (OSError, ValueError):
            self._refuse(tls)
        else:
            return True
        return False

    def _remove(self, tls: ssl.SSLSocket) -> ssl.SSLSocket:
        self._selector.unregister(tls)
        del self._waiting[tls]
        return tls

    def _refuse(self, tls: ssl.SSLSocket) -> None:
        self._remove(tls).close()

    def close(self) -> None:
        """Close all connections with a pending handshake."""
        for tls in list(self._waiting):
            self._refuse(tls)
        self._selector.close()

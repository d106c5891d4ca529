"""Others on the ports of a job: scans, servers of something else, and nodes that have another secret."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distmagic.connection.certificate import one_time_secret
from distmagic.errors import Unreachable
from distmagic.inside import following as following_module
from distmagic.inside.following import Following
from distmagic.inside.meeting import Meeting
from distmagic.inside.proof import SharedSecret, WrongSecret
from distmagic.remote.contact import mutual_tls
from tests.builders.dialling import HERE, places
from tests.lab.waiting import HANG_S, wait_until

SECRET = SharedSecret(one_time_secret())


def scan(port: int) -> None:
    """Do to a port what scans, browsers and slow clients do."""
    socket.create_connection((HERE, port), HANG_S).close()
    with socket.create_connection((HERE, port), HANG_S) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            plain.recv(100)
    with (
        socket.create_connection((HERE, port), HANG_S) as silent,
        contextlib.suppress(ConnectionResetError),
    ):
        silent.recv(100)  # until the time for a handshake is over
    browser = ssl.create_default_context()
    with (
        socket.create_connection((HERE, port), HANG_S) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        browser.wrap_socket(plain, server_hostname="n0")


def test_a_scan_of_the_ports_does_not_shorten_the_wait(monkeypatch, golden):
    monkeypatch.setattr(mutual_tls, "HANDSHAKE_S", 0.5)
    first, _ = places()
    with (
        contextlib.closing(Meeting(first, SECRET)) as meeting,
        ThreadPoolExecutor(1) as thread,
    ):
        scanned = thread.submit(scan, meeting.port)
        began_s = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            meeting.gather(1, "same", 2.0)
        assert time.monotonic() - began_s >= 2.0
        scanned.result()
    golden(caught.value)


@contextlib.contextmanager
def foreign_server(port: int, folder: Path) -> Iterator[None]:
    """Serve TLS of another kind at a port, with a certificate that nobody knows."""
    secret = one_time_secret()
    (folder / "chain.pem").write_text(secret.certificate + secret.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "chain.pem")
    listener = socket.create_server((HERE, port))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return  # closed
            with plain, contextlib.suppress(OSError):
                plain.settimeout(HANG_S)
                tls.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def test_a_server_of_something_else_at_one_of_the_ports_is_no_wrong_secret(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(following_module, "_WRONG_S", 0.1)
    first, second = places()
    with (
        foreign_server(first.ports[0], tmp_path),
        contextlib.closing(Following(second, SECRET, HERE)) as following,
    ):
        with pytest.raises(Unreachable) as caught:
            following.come(1, "same", 1.0)
        assert "DISTMAGIC_SECRET" not in str(caught.value)
        with contextlib.closing(Meeting(first, SECRET)) as meeting:
            following.come(1, "same", HANG_S)
            meeting.gather(1, "same", HANG_S)


@pytest.mark.slow
def test_a_wrong_secret_that_was_mended_counts_no_longer(monkeypatch):
    monkeypatch.setattr(following_module, "_WRONG_S", 2.0)
    first, second = places()
    dialled = threading.Event()

    class Noted(SharedSecret):
        def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
            try:
                return super().wrap(plain)
            except WrongSecret:
                dialled.set()
                raise

    secret = Noted(SECRET._secret)
    with (
        contextlib.closing(Following(second, secret, HERE)) as following,
        ThreadPoolExecutor(1) as thread,
    ):
        began_s = time.monotonic()
        with contextlib.closing(Meeting(first, SharedSecret(one_time_secret()))):
            coming = thread.submit(following.come, 1, "same", HANG_S)
            assert dialled.wait(HANG_S)
        wait_until(
            lambda: time.monotonic() > began_s + 2.5 or coming.done(),
            "the time for a wrong secret to be over",
        )
        with contextlib.closing(Meeting(first, SECRET)) as meeting:
            meeting.gather(1, "same", HANG_S)
            coming.result()

"""One host's server and another's source, on loopback: what goes over, and everybody who should not get through."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distmagic.connection.certificate import one_time_secret
from distmagic.remote.contact import blob_server, mutual_tls
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Secret
from tests.builders.since import Since
from tests.lab import wait_until
from tests.lab.waiting import HANG_S

HERE = "127.0.0.1"
SECRET = one_time_secret()


class Files:
    """Files of random bytes, served with SECRET; what is there of them can grow."""

    def __init__(self, folder: Path, *sizes: int) -> None:
        self.data = [os.urandom(size) for size in sizes]
        self.growing = blob_server.Growing(len(sizes))
        self._files = []
        for number, data in enumerate(self.data):
            file = (folder / f"{number}").open("w+b", buffering=0)
            file.write(data)
            self._files.append(file)
            self.growing.add(number, file.fileno())
        self.server = blob_server.BlobServer(HERE, SECRET, self.growing, sizes)

    def grow(self, number: int, size: int | None = None) -> None:
        self.growing.grow(number, len(self.data[number]) if size is None else size)

    def grow_all(self) -> None:
        for number in range(len(self.data)):
            self.grow(number)

    def close(self) -> None:
        self.server.close()
        for file in self._files:
            file.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Files]]:
    made: list[Files] = []

    def start(*sizes: int) -> Files:
        made.append(Files(tmp_path, *sizes))
        return made[-1]

    since = Since()
    yield start
    for files in made:
        files.close()
        assert not files.server._thread.is_alive()
    wait_until(lambda: not since.files(), "all descriptors to be closed")


@contextlib.contextmanager
def source(port: int, secret: Secret = SECRET) -> Iterator[blob_server.BlobSource]:
    with contextlib.closing(blob_server.BlobSource(HERE, port, secret)) as found:
        yield found


def read(found: blob_server.BlobSource, size: int) -> bytes:
    return b"".join(bytes(piece) for piece in found.pieces(size))


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) != 0


# ---- as it should be


def test_files_go_over_one_after_the_other(serve):
    files = serve(1_000_000, 0, 7)
    files.grow_all()
    with source(files.server.port) as found:
        assert [read(found, len(data)) for data in files.data] == files.data


def test_what_grows_is_sent_as_it_grows(serve):
    files = serve(1000)
    with source(files.server.port) as found:
        pieces = found.pieces(1000)
        files.grow(0, 10)
        assert bytes(next(pieces)) == files.data[0][:10]
        files.grow(0, 300)
        assert bytes(next(pieces)) == files.data[0][10:300]
        files.grow(0)
        assert b"".join(map(bytes, pieces)) == files.data[0][300:]


def test_a_server_that_waits_itself_is_still_there(serve, monkeypatch):
    monkeypatch.setattr(blob_server, "_ALIVE_S", 0.01)
    monkeypatch.setattr(blob_server, "STALL_S", 2.0)
    files = serve(10)
    heads = []
    with source(files.server.port) as found:
        fill = found._fill

        def counted(view):
            heads.append(1)
            if len(heads) == 50:  # signs of life, one after the other
                files.grow(0)
            fill(view)

        monkeypatch.setattr(found, "_fill", counted)
        assert read(found, 10) == files.data[0]


def test_nobody_listens_once_the_one_has_come(serve):
    files = serve(10)
    with source(files.server.port) as found:
        wait_until(lambda: is_closed(files.server.port), "the port to be closed")
        files.grow_all()
        assert read(found, 10) == files.data[0]


def test_nothing_is_left_when_nobody_comes(serve, monkeypatch):
    monkeypatch.setattr(blob_server, "ALONE_S", 0.05)
    files = serve(10)
    wait_until(lambda: is_closed(files.server.port), "the server to give up")
    wait_until(lambda: not files.server._thread.is_alive(), "its thread to end")


def test_it_listens_on_one_address_only(serve):
    files = serve(10)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.2", files.server.port))


def test_the_secret_leaves_no_file(serve, monkeypatch, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    files = serve(10)
    files.grow_all()
    with source(files.server.port) as found:
        assert list(folder.iterdir()) == []
        assert read(found, 10) == files.data[0]
    assert list(folder.iterdir()) == []


# ---- who has no business here


def sneak(context: ssl.SSLContext | None, port: int) -> bytes:
    """Connect in some way, and return all that the server tells: nothing but TLS's own."""
    with socket.create_connection((HERE, port), timeout=HANG_S) as plain:
        if context is None:
            return plain.recv(100)
        try:
            with context.wrap_socket(plain) as tls:
                return tls.recv(100)
        except OSError:
            return b""


def stranger() -> ssl.SSLContext:
    """Return one who believes everybody and shows a certificate of the same name, but of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_no_certificate_a_forged_one_and_an_old_tls(serve):
    files = serve(100_000)
    files.grow_all()
    forger = stranger()
    other = one_time_secret()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(other.certificate + other.key)
        file.flush()
        forger.load_cert_chain(file.name)
    old = stranger()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (stranger(), forger, old):
        assert sneak(context, files.server.port) == b""
    with source(files.server.port) as found:
        assert read(found, 100_000) == files.data[0]


def test_a_certificate_without_its_key(serve):
    """Whoever saw the certificate go by (it is no secret in TLS before 1.3) has nothing to prove it with."""
    files = serve(10)
    files.grow_all()
    mixed = Secret(certificate=SECRET.certificate, key=one_time_secret().key)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        blob_server.BlobSource(HERE, files.server.port, mixed)
    with source(files.server.port) as found:
        assert read(found, 10) == files.data[0]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(5000),
        b"\x16\x03\x01\xff\xff" + b"x" * 5000,
    ],
)
def test_garbage(serve, data):
    files = serve(10)
    files.grow_all()
    with socket.create_connection((HERE, files.server.port)) as plain:
        plain.sendall(data)
        with source(files.server.port) as found:
            assert read(found, 10) == files.data[0]


def test_a_flood_of_connections_that_say_nothing(serve):
    files = serve(10)
    files.grow_all()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((HERE, files.server.port)))
        found = stack.enter_context(source(files.server.port))
        assert read(found, 10) == files.data[0]


def test_a_flood_is_bounded(serve):
    files = serve(10)
    since = Since()
    flood = [socket.create_connection((HERE, files.server.port)) for _ in range(100)]
    with contextlib.ExitStack() as stack:
        for each in flood:
            stack.enter_context(each)
        wait_until(
            lambda: (
                flood[60].recv(1) == b""
                if select.select([flood[60]], [], [], 0)[0]
                else False
            ),
            "the 61st to be turned away",
        )
        assert len(since.files()) <= 100 + mutual_tls._MOST_HANDSHAKES + 5


def test_who_waits_at_the_door_is_turned_away(serve, monkeypatch):
    monkeypatch.setattr(mutual_tls, "HANDSHAKE_S", 0.05)
    files = serve(10)
    with socket.create_connection((HERE, files.server.port), timeout=HANG_S) as slow:
        slow.sendall(b"\x16")
        assert slow.recv(10) == b""


# ---- the other end is not what it should be


@contextlib.contextmanager
def impostor(act: Callable[[socket.socket], object]) -> Iterator[int]:
    """Listen on a port, and act on the first connection."""
    over = threading.Event()

    def run() -> None:
        conn, _ = listener.accept()
        with conn, contextlib.suppress(OSError):
            act(conn)
            over.wait(HANG_S)

    with socket.create_server((HERE, 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join()


def as_server(
    secret: Secret, then: Callable[[ssl.SSLSocket], object]
) -> Callable[[socket.socket], object]:
    def act(conn: socket.socket) -> None:
        with mutual_tls.context(secret, is_server=True).wrap_socket(
            conn, server_side=True
        ) as tls:
            then(tls)

    return act


def test_a_server_with_another_certificate():
    other = as_server(one_time_secret(), lambda tls: tls.sendall(b"x"))
    with (
        impostor(other) as port,
        pytest.raises(ssl.SSLError, match="certificate verify failed"),
    ):
        blob_server.BlobSource(HERE, port, SECRET)


def test_a_server_that_says_nothing(monkeypatch):
    monkeypatch.setattr(blob_server, "HANDSHAKE_S", 0.05)
    with impostor(lambda conn: None) as port, pytest.raises(TimeoutError):
        blob_server.BlobSource(HERE, port, SECRET)


def test_a_closed_port():
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        blob_server.BlobSource(HERE, port, SECRET)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\0\0\0\5hello\0\0\1\0", "more came than was expected"),
        (b"\xff\xff\xff\xff", "more came than was expected"),
        (b"\0\0\0\5hel", "timed out"),
        (b"", "timed out"),
    ],
)
def test_a_server_that_does_not_keep_to_it(monkeypatch, sent, error):
    if error == "timed out":
        monkeypatch.setattr(blob_server, "STALL_S", 0.1)
    over = threading.Event()

    def say(tls: ssl.SSLSocket) -> None:
        tls.sendall(sent)
        over.wait(HANG_S)

    with impostor(as_server(SECRET, say)) as port, source(port) as found:
        with pytest.raises(OSError, match=error):
            read(found, 10)
        over.set()


def test_a_server_that_hangs_up():
    with (
        impostor(as_server(SECRET, lambda tls: tls.sendall(b"\0\0\0\5hello"))) as port,
        source(port) as found,
    ):
        pieces = found.pieces(10)
        assert bytes(next(pieces)) == b"hello"
        with pytest.raises((EOFError, OSError)):
            next(pieces)


def test_a_taker_that_dies_ends_the_server(serve):
    files = serve(50_000_000)
    with source(files.server.port) as found:
        files.grow_all()
        next(found.pieces(50_000_000))
    wait_until(lambda: not files.server._thread.is_alive(), "the server's end")


def test_closing_ends_a_server_whose_taker_stalls(serve, monkeypatch):
    monkeypatch.setattr(blob_server, "_SLOW_S", 3600.0)
    files = serve(50_000_000)
    with source(files.server.port) as found:
        files.grow_all()
        # And nothing more: the server's buffers are full.
        next(found.pieces(50_000_000))
        files.close()  # else it would wait that long


def test_what_can_not_be_served_any_more_ends_the_connection(serve):
    files = serve(100)
    with source(files.server.port) as found:
        files.grow(0, 10)
        pieces = found.pieces(100)
        next(pieces)
        files.growing.close()
        with pytest.raises((EOFError, OSError)):
            next(pieces)


def test_a_file_that_somebody_has_cut_ends_the_connection(serve):
    files = serve(100)
    files._files[0].truncate(10)
    files.grow_all()
    with source(files.server.port) as found, pytest.raises((EOFError, OSError)):
        read(found, 100)


def test_the_certificate_says_nothing_and_holds_for_any_clock():
    from cryptography import x509

    found = x509.load_pem_x509_certificate(SECRET.certificate.encode())
    assert found.not_valid_before_utc.year == 1970
    assert found.not_valid_after_utc.year == 2199
    assert protocol.Secret(certificate="c", key="k") != SECRET
    assert SECRET.key not in repr(SECRET)

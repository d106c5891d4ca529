"""What servers, and the system's own client, say becomes an error in our words."""

import pytest

from distmagic.request.hosts import Host
from distmagic.transports import ssh_words, troubles
from distmagic.transports.piped import Tail


@pytest.mark.parametrize(
    "said",
    [
        "ssh: connect to host a port 22: Operation timed out",
        "ssh: connect to host a port 22: No route to host",
        "connect to host bastion port 22: Connection timed out\r\nkex_exchange_identification: Connection closed by remote host",
        "me@gpu-a: Permission denied (publickey,password).",
        "/home/me/.ssh/config: line 3: Bad configuration option: prot\r\n/x: terminating, 1 bad options",
        "kex_exchange_identification: Connection closed by remote host",
        "banner\nsomething new\n",
        "",
    ],
)
def test_the_client_s_words(said, golden):
    golden(ssh_words.trouble(said, Host(name="gpu-a"), 7))


@pytest.mark.parametrize("said", ["a" * 100_000, "\x1b[2J" * 10_000])
def test_an_error_has_not_all_that_a_server_said(said):
    error = troubles.NOT_SSH("10.0.0.5 port 22", said).for_host("gpu-a")
    assert len(error.message) < 2100
    assert error.message.isprintable()


def test_the_tail_of_a_stream():
    tail = Tail()
    tail.append(b"abc" + b"." * 8190)
    tail.append(b"def")
    assert tail.text() == "." * 8189 + "def"

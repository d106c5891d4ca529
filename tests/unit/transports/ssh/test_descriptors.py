"""A process that may open no more files: connecting reports that, and leaves nothing open."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.auth import LogIn
from distmagic.transports.ssh.streams import run_proxy
from distmagic.transports.troubles import Trouble

WHERE = "10.0.0.5 port 22"


def no_more(*_: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("pairs", [0, 1])
def test_a_proxy_command_has_no_sockets_left(monkeypatch, golden, pairs):
    make, made = socket.socketpair, []

    def limited() -> tuple[socket.socket, socket.socket]:
        if len(made) == 2 * pairs:
            no_more()
        pair = make()
        made.extend(pair)
        return pair

    monkeypatch.setattr(socket, "socketpair", limited)
    with pytest.raises(Trouble) as caught:
        run_proxy("cat", WHERE)
    golden(caught.value.for_host("gpu-a"))
    assert [one.fileno() for one in made] == [-1] * 2 * pairs


def test_a_proxy_command_whose_shell_is_no_program(monkeypatch, tmp_path, golden):
    (tmp_path / "shell").write_bytes(b"\x7fELF")
    (tmp_path / "shell").chmod(0o700)
    monkeypatch.setenv("SHELL", str(tmp_path / "shell"))
    with pytest.raises(Trouble) as caught:
        run_proxy("cat", WHERE)
    golden(caught.value.for_host("gpu-a"))


def test_the_agent_has_no_socket_left(monkeypatch, golden):
    session = SimpleNamespace(
        where=WHERE,
        methods=lambda: ("publickey",),
    )
    log_in: Any = LogIn
    log_in = log_in(
        session=session,
        resolved=SimpleNamespace(refused=()),
        asker=None,
        agent=KeyAgent("/run/agent"),
        deadline=SimpleNamespace(remaining=lambda: 10.0),
    )
    monkeypatch.setattr(socket, "socket", no_more)
    with pytest.raises(Trouble) as caught:
        log_in.run()
    golden(caught.value.for_host("gpu-a"))

"""The contract of `contract.py` over every transport, on this machine and over a real OpenSSH server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from distmagic.transports import Transport, local
from tests.transports.conftest import Answers, Home
from tests.transports.contract import CONTRACT
from tests.transports.sshd import Sshd

SSH = pytest.mark.needs("sshd")


@pytest.fixture(params=["local", pytest.param("ssh", marks=SSH), pytest.param("ssh_command", marks=SSH)])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == "local":
        made: Transport = local.connect()
    else:
        home: Home = request.getfixturevalue("home")
        server: Sshd = request.getfixturevalue("server")
        made = _connect(request.param, home, server)
    with contextlib.closing(made):
        yield made


def _connect(kind: str, home: Home, server: Sshd) -> Transport:
    from distmagic.transports import ssh_command
    from distmagic.transports.ssh import ssh

    if kind == "ssh":
        return ssh.connect(home.host(server), home.access, Answers())
    return ssh_command.connect(home.host(server), replace(home.access, ssh_command="ssh"), Answers())


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Transport], None], transport: Transport) -> None:
    check(transport)

"""The contract of `contract.py` over every transport, on this machine and over a real OpenSSH server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from distmagic.systems.slurm.srun import Node, SrunTransport
from distmagic.transports import Process, Transport, local, ssh_command
from tests.builders.dialling import dialled
from tests.builders.keepers import LocalKeeper, request_of
from tests.transports.conftest import Answers, Home
from tests.transports.contract import CONTRACT
from tests.transports.sshd import Sshd

SSH = pytest.mark.needs("sshd")


@pytest.fixture(
    params=[
        "local",
        "usher",
        "dialled",
        pytest.param("ssh", marks=SSH),
        pytest.param("ssh_command", marks=SSH),
    ]
)
def transport(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Transport]:
    if request.param == "local":
        made: Transport = local.LocalTransport()
    elif request.param == "usher":
        node = request.getfixturevalue("keeper")
        made = SrunTransport(
            StepsHere(node), Node(name="here", job=node.job, python=sys.executable)
        )
    elif request.param == "dialled":
        made = request.getfixturevalue("second_node")
    else:
        home: Home = request.getfixturevalue("home")
        server: Sshd = request.getfixturevalue("server")
        # Else a master on a busy machine is ended before it has sent all.
        monkeypatch.setattr(ssh_command, "_MASTER_END_S", 5.0)
        made = _connect(request.param, home, server)
    with contextlib.closing(made):
        yield made


class StepsHere:
    """A log-in node whose srun starts its steps on this machine: the usher is run in its place."""

    warnings: tuple[str, ...] = ()

    def __init__(self, node: LocalKeeper) -> None:
        self._node = node

    def start(self, argv: tuple[str, ...]) -> Process:
        """Run the usher of an srun."""
        return self._node.usher(request_of(argv))

    def close(self) -> None:
        """Let go."""
        self._node.close()


@pytest.fixture
def second_node() -> Iterator[Transport]:
    with dialled() as node:
        yield node


@pytest.fixture(scope="module")
def keeper() -> Iterator[LocalKeeper]:
    with LocalKeeper(leads=False) as node:
        yield node


def _connect(kind: str, home: Home, server: Sshd) -> Transport:
    from distmagic.transports.ssh import ssh

    if kind == "ssh":
        return ssh.connect(home.host(server), home.access, Answers())
    return ssh_command.connect(
        home.host(server), replace(home.access, ssh_command="ssh"), Answers()
    )


@pytest.mark.quick
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, transport):
    check(transport)

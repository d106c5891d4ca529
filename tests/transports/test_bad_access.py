"""Every way not to reach a host: the error, its words, and the cure in them. Both SSH transports."""

from __future__ import annotations

import errno
import getpass
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.errors import (
    AuthenticationError,
    HostError,
    HostKeyError,
    PreflightError,
    Unreachable,
    UsageError,
)
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import ssh_command
from distmagic.transports.asking import NoAsker
from distmagic.transports.ssh import streams
from tests.builders.shell import completed
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until
from tests.transports.conftest import Home
from tests.transports.sshd import Sshd, free_port, make_key, sshd

ssh = pytest.importorskip("distmagic.transports.ssh.ssh")
Connect = Callable[[Host, Home], HostError]


@pytest.fixture(
    params=["ssh", pytest.param("ssh_command", marks=pytest.mark.needs("ssh"))]
)
def failure(request: pytest.FixtureRequest) -> Connect:
    """Connect in vain with one of the two transports and return the error."""

    def connect(host: Host, home: Home) -> HostError:
        module, access = (
            (ssh, home.access)
            if request.param == "ssh"
            else (ssh_command, with_command(home.access))
        )
        with pytest.raises(HostError) as caught:
            module.connect(host, access, NoAsker()).close()
        assert caught.value.host == host.name
        return caught.value

    connect.kind = request.param
    return connect


def with_command(access: Access) -> Access:
    return replace(access, ssh_command="ssh")


@pytest.mark.quick
def test_unknown_name(home, failure, golden):
    error = failure(Host(name="no-such-host.invalid", port=22), home)
    assert type(error) is Unreachable
    golden(error)


@pytest.mark.quick
def test_refused_port(home, failure, golden):
    port = free_port()
    error = failure(Host(name="127.0.0.1", port=port), home)
    assert type(error) is Unreachable
    golden(str(error).replace(f" {port} ", " PORT "))


def test_a_process_that_may_open_no_more_files(home, monkeypatch, golden):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(streams.socket, "socket", refuse)
    with golden.raises(Unreachable):
        ssh.connect(Host(name="127.0.0.1", port=22), home.access, NoAsker())


def test_a_port_that_says_nothing(home, failure):
    home.configure("ConnectTimeout 1\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = failure(Host(name="127.0.0.1", port=port), replace_timeout(home, 1))
    assert type(error) is Unreachable
    assert (
        error.message == f"127.0.0.1: no answer from 127.0.0.1 port {port} within 1 s."
    )


def replace_timeout(home: Home, seconds: float) -> Home:
    class Quick(Home):
        @property
        def access(self) -> Access:
            return Access(ssh_config=str(self.config), connect_timeout_s=seconds)

    return Quick(
        folder=home.folder,
        key=home.key,
        known_hosts=home.known_hosts,
        config=home.config,
    )


@pytest.mark.needs("ssh")
def test_a_client_that_hangs_while_it_logs_in(home):
    client = home.folder / "client"
    client.write_text('#!/bin/sh\n[ "$1" = -G ] && exec ssh "$@"\nexec sleep 60\n')
    client.chmod(0o755)
    access = replace(home.access, ssh_command=str(client), connect_timeout_s=1)
    with pytest.raises(Unreachable) as caught:
        ssh_command.connect(Host(name="127.0.0.1"), access, NoAsker())
    assert caught.value.message == "127.0.0.1: no answer from 127.0.0.1 within 1 s."


@pytest.mark.needs("ssh")
def test_the_systems_client_lends_a_host_neither_agent_nor_display(home):
    """Its master lives for hours; `ssh -G` prints what the client would do."""
    told = home.folder / "told"
    client = home.folder / "client"
    client.write_text(f'#!/bin/sh\nexec ssh -G "$@" > {told}\n')
    client.chmod(0o755)
    access = replace(
        home.configure("ForwardAgent yes\nForwardX11 yes\n"), ssh_command=str(client)
    )
    with pytest.raises(HostError):
        ssh_command.connect(Host(name="127.0.0.1"), access, NoAsker())
    assert {"forwardagent no", "forwardx11 no"} <= set(told.read_text().splitlines())


def test_a_port_that_is_no_ssh_server(home, failure):
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            stream, _ = web.accept()
            with stream:
                stream.recv(1)
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        error = failure(Host(name="127.0.0.1", port=web.getsockname()[1]), home)
        thread.join(HANG_S)
    assert type(error) is Unreachable
    assert error.host == "127.0.0.1"


def test_no_route(home, failure, golden):
    route = subprocess.run(
        ["ip", "route", "get", "192.0.2.1"], capture_output=True, check=False
    )
    if route.returncode == 0:
        pytest.skip("this machine has a route to everywhere")
    error = failure(Host(name="192.0.2.1", port=22), home)
    golden(error.message)


@pytest.mark.quick
@pytest.mark.needs("sshd")
def test_unknown_host_key(home, session_server, failure, tmp_path, golden):
    error = failure(home.host(session_server), home)
    port = session_server.port
    assert type(error) is HostKeyError
    fingerprint = fingerprint_of(session_server, tmp_path)
    said = error.message.replace(str(port), "PORT")
    golden(said.replace(fingerprint, "FINGERPRINT"))
    if failure.kind == "ssh_command":
        assert error.hint.splitlines()[0].endswith(f"-p {port} 127.0.0.1")
        return
    assert f"\n  ssh-keyscan -p {port} 127.0.0.1 >> {home.known_hosts}\n" in error.hint
    command = error.hint.splitlines()[1]
    subprocess.run(command, shell=True, check=True, stderr=subprocess.DEVNULL)
    # The cure cures.
    ssh.connect(home.host(session_server), home.access, NoAsker()).close()


@pytest.mark.needs("sshd")
def test_an_unknown_key_behind_a_jump_host_is_not_looked_for_from_here(home, server):
    home.configure(
        f"Host inner\n  HostName localhost\n  ProxyJump 127.0.0.1:{server.port}\n"
    )
    with pytest.raises(HostKeyError) as caught:
        ssh.connect(Host(name="inner", port=server.port), home.access, NoAsker())
    assert "keyscan" not in caught.value.hint
    assert (
        f"ssh -F {home.config} -p {server.port} root@inner".replace(
            "root", getpass.getuser()
        )
        in caught.value.hint
    )


@pytest.mark.needs("sshd")
def test_a_log_in_shell_that_ends_before_its_command(home, tmp_path, user_key):
    """As start-up files that exit make it; the system's client only says how it ended."""
    options = ("ForceCommand exit 3",)
    with sshd(tmp_path / "server", Path(f"{user_key}.pub"), options=options) as server:
        home.trust(server)
        host = replace(home.host(server), user=getpass.getuser())
        with pytest.raises(PreflightError) as caught:
            ssh_command.connect(host, with_command(home.access), NoAsker())
    assert "its log-in shell ended (exit code 3)" in caught.value.message
    command = f"ssh -F {home.config} -p {server.port} {host.user}@127.0.0.1 echo ok"
    assert command in caught.value.hint


def fingerprint_of(server: Sshd, tmp_path: Path) -> str:
    (tmp_path / "host.pub").write_text(server.host_keys[0])
    shown = completed(["ssh-keygen", "-l", "-f", tmp_path / "host.pub"])
    return shown.stdout.split()[1]


@pytest.mark.quick
@pytest.mark.needs("sshd")
def test_changed_host_key(home, session_server, failure, tmp_path):
    other = Path(f"{make_key(tmp_path / 'other')}.pub").read_text()
    name = f"[127.0.0.1]:{session_server.port}"
    home.known_hosts.write_text(f"# a comment\n{name} {other}")
    error = failure(home.host(session_server), home)
    assert type(error) is HostKeyError
    assert error.message == (
        f"127.0.0.1: the host key of 127.0.0.1 port {session_server.port} has CHANGED: "
        f"ed25519 {fingerprint_of(session_server, tmp_path)} is not that of {home.known_hosts}, line 2."
    )
    command = next(
        line for line in error.hint.splitlines() if line.startswith("  ssh-keygen")
    )
    assert command == f"  ssh-keygen -R '{name}' -f {home.known_hosts}"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert name not in home.known_hosts.read_text()


@pytest.mark.needs("sshd")
def test_revoked_host_key(home, session_server, failure):
    home.known_hosts.write_text(
        f"@revoked * {session_server.host_keys[0]}\n{session_server.known_hosts_line()}"
    )
    error = failure(home.host(session_server), home)
    assert type(error) is HostKeyError
    assert "REVOKED" in error.message


@pytest.mark.quick
@pytest.mark.needs("sshd")
def test_wrong_key(home, server, failure, tmp_path):
    other = make_key(tmp_path / "other")
    home.config.write_text(
        home.config.read_text().replace(str(home.key), str(other)) + "User me\n"
    )
    error = failure(home.host(server), home)
    assert type(error) is AuthenticationError
    assert f"127.0.0.1 port {server.port} " in error.message
    assert " me. " in error.message
    assert error.message.endswith(" publickey.")
    host = replace(home.host(server), user="typed")
    command = f"ssh-copy-id -F {home.config} -p {server.port} typed@127.0.0.1"
    assert command in failure(host, home).hint


@pytest.mark.quick
@pytest.mark.needs("sshd")
def test_strict_checking_can_not_be_turned_off(home, session_server, failure):
    home.configure("StrictHostKeyChecking no\n")
    assert type(failure(home.host(session_server), home)) is HostKeyError
    assert not home.known_hosts.exists()


def test_a_missing_ssh_config_that_was_named(tmp_path, golden):
    missing = str(tmp_path / "missing")
    with golden.raises(UsageError):
        ssh.connect(Host(name="a"), Access(ssh_config=missing), NoAsker())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-client", "--ssh-command: there is no program 'no-such-client'."),
        ("ssh 'a", '--ssh-command "ssh \'a": No closing quotation.'),
        (" ", "--ssh-command is empty."),
    ],
)
def test_a_client_that_is_not_there(command, message):
    with pytest.raises(UsageError) as caught:
        ssh_command.connect(Host(name="a"), Access(ssh_command=command), NoAsker())
    assert caught.value.message == message


@pytest.mark.needs("sshd")
def test_the_type_of_key_that_is_known_is_asked_for(home, tmp_path):
    with sshd(
        tmp_path / "two", Path(f"{home.key}.pub"), kinds=("rsa", "ecdsa", "ed25519")
    ) as server:
        for key in server.host_keys:
            home.known_hosts.write_text(f"[127.0.0.1]:{server.port} {key}\n")
            ssh.connect(home.host(server), home.access, NoAsker()).close()


@pytest.mark.needs("sshd")
def test_hashed_and_aliased_known_hosts(home, session_server):
    home.trust(session_server)
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", home.known_hosts],
        check=True,
        capture_output=True,
    )
    assert "127.0.0.1" not in home.known_hosts.read_text()
    ssh.connect(home.host(session_server), home.access, NoAsker()).close()
    home.known_hosts.write_text(session_server.known_hosts_line("the-cluster"))
    home.configure("HostKeyAlias the-cluster\n")
    ssh.connect(home.host(session_server), home.access, NoAsker()).close()


@pytest.mark.needs("sshd")
def test_nothing_stays_behind_a_failure(home, session_server, failure, monkeypatch):
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        since = Since()
        failure(home.host(session_server), home)
        wait_until(lambda: not since.files(), "all descriptors to be closed")
        assert os.listdir(folder) == []

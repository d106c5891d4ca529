"""Ways that are not one direct connection: jump hosts, ProxyCommand, Include, and connections that are cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distmagic.errors import (
    AuthenticationError,
    ConnectionLost,
    HostError,
    HostKeyError,
    Unreachable,
    UsageError,
)
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.transports import ssh_command
from distmagic.transports.asking import NoAsker
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until
from tests.system.components import reason_without
from tests.transports.conftest import Answers, Home
from tests.transports.contract import read_all
from tests.transports.sshd import Sshd, free_port, sshd

ssh = pytest.importorskip("distmagic.transports.ssh.ssh")
pytestmark = pytest.mark.needs("sshd")


@pytest.fixture
def three(home: Home, tmp_path: Path) -> Iterator[tuple[Sshd, Sshd, Sshd]]:
    """Two jump hosts, outer and inner, and a target; all known and named in the configuration."""
    public = Path(f"{home.key}.pub")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(sshd(tmp_path / name, public))
            for name in ("outer", "inner", "target")
        ]
        for name, server in zip(("outer", "inner", "target"), servers, strict=True):
            home.trust(server)
            home.configure(
                f"Host {name}*\n  HostName 127.0.0.1\n  Port {server.port}\n"
            )
        yield servers[0], servers[1], servers[2]


def says_hello(transport: ssh.SshSession) -> bool:
    return read_all(transport.start(("echo", "hello"))) == b"hello\n"


def log_ins(servers: tuple[Sshd, ...]) -> list[int]:
    return [server.connections() for server in servers]


def test_a_jump_host_with_a_jump_host_of_its_own(home, three):
    access = home.configure(
        "Host target\n  ProxyJump inner\nHost inner\n  ProxyJump outer\n"
    )
    with contextlib.closing(
        ssh.connect(Host(name="target"), access, NoAsker())
    ) as transport:
        assert says_hello(transport)
        wait_until(lambda: log_ins(three) == [1, 1, 1], "each log-in in its log")


def test_the_system_client_takes_the_same_jumps(home, three):
    home.configure("Host target\n  ProxyJump outer\n")
    # The client that ssh starts for a jump takes the configuration from -F too.
    with contextlib.closing(
        ssh_command.connect(Host(name="target"), home.access, NoAsker())
    ) as transport:
        assert says_hello(transport)


def test_hosts_behind_one_jump_host_share_its_connection(home, three):
    access = home.configure("Host target*\n  ProxyJump outer\n")
    with ThreadPoolExecutor(6) as pool:
        transports = list(
            pool.map(
                lambda n: ssh.connect(Host(name=f"target{n}"), access, NoAsker()),
                range(6),
            )
        )
    wait_until(lambda: three[2].connections() == 6, "the sixth log-in in the log")
    assert three[0].connections() == 1
    for transport in transports[:5]:
        transport.close()
    assert says_hello(transports[5])
    transports[5].close()
    wait_until(lambda: has_ended(three[0]), "the end of the jump host's connection")
    ssh.connect(Host(name="target"), access, NoAsker()).close()
    wait_until(lambda: three[0].connections() == 2, "the second log-in in the log")


def has_ended(server: Sshd) -> bool:
    ends = (
        "Closing connection",
        "reset by peer",
        "Disconnecting user",
        "Connection closed by",
    )
    return any(end in line for line in server.log for end in ends)


def test_each_jump_host_is_checked(home, three):
    access = home.configure("Host target\n  ProxyJump inner\n")
    home.known_hosts.write_text(three[2].known_hosts_line())
    with pytest.raises(HostError) as caught:
        ssh.connect(Host(name="target"), access, NoAsker())
    assert type(caught.value) is HostKeyError
    assert caught.value.host == "target"
    assert f" inner (127.0.0.1 port {three[1].port})" in caught.value.message


def test_a_jump_host_that_is_down_fails_all_hosts_behind_it_at_once(home, golden):
    port = free_port()
    access = home.configure(
        f"Host gpu*\n  ProxyJump bastion\nHost bastion\n  HostName 127.0.0.1\n  Port {port}\n"
    )

    def fail(number: int) -> str:
        with pytest.raises(Unreachable) as caught:
            ssh.connect(Host(name=f"gpu{number}"), access, NoAsker())
        return caught.value.message

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(fail, range(4)))
    golden(*(message.replace(str(port), "PORT") for message in messages))


def test_a_target_that_the_jump_host_can_not_reach(home, three):
    port = free_port()
    access = home.configure("Host lost\n  HostName 127.0.0.1\n  ProxyJump outer\n")
    with pytest.raises(Unreachable) as caught:
        ssh.connect(Host(name="lost", port=port), access, NoAsker())
    assert caught.value.message == (
        f"lost: jump host outer (127.0.0.1 port {three[0].port}) can't reach 127.0.0.1 port {port}: Connect failed."
    )


def test_a_jump_host_that_asks_names_itself_and_the_host(home, tmp_path, golden):
    from tests.transports.asking_server import Rules, asking_server

    with asking_server(
        tmp_path / "asking", Rules(steps=["keyboard-interactive"])
    ) as server:
        home.trust(server)
        access = home.configure(
            f"Host gpu\n  ProxyJump bastion\nHost bastion\n  HostName 127.0.0.1\n  Port {server.port}\n"
        )
        with pytest.raises(AuthenticationError) as caught:
            ssh.connect(Host(name="gpu"), access, NoAsker())
    assert caught.value.host == "gpu"
    golden(caught.value.message)


def test_jump_hosts_in_a_circle(home, golden):
    access = home.configure("Host *\n  ProxyJump bastion\n")
    with golden.raises(UsageError):
        ssh.connect(Host(name="gpu"), access, NoAsker())


_RELAY = textwrap.dedent("""
    import os, socket, sys, threading
    stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    def up():
        while data := os.read(0, 65536): stream.sendall(data)
    threading.Thread(target=up, daemon=True).start()
    while data := stream.recv(65536): os.write(1, data)
""")


# As SkyPilot's does it.
_ASYNCIO_RELAY = textwrap.dedent("""
    import asyncio, sys

    async def carry(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def relay(host, port):
        loop = asyncio.get_running_loop()
        stdin = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stdin)
        await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        transport, _ = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
        stdout = asyncio.StreamWriter(transport, protocol, None, loop)
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.wait(
            [asyncio.ensure_future(carry(stdin, writer)), asyncio.ensure_future(carry(reader, stdout))],
            return_when=asyncio.FIRST_COMPLETED,
        )

    asyncio.run(relay(*sys.argv[1:]))
""")


@pytest.fixture
def relay(tmp_path: Path) -> str:
    return relay_of(tmp_path, _RELAY)


def relay_of(folder: Path, program: str) -> str:
    file = folder / "relay.py"
    file.write_text(program)
    return f"'{sys.executable}' '{file}' %h %p"


@pytest.mark.quick
@pytest.mark.parametrize(
    "program", [_RELAY, _ASYNCIO_RELAY], ids=["threads", "asyncio"]
)
def test_proxy_command(home, server, tmp_path, program):
    relay = relay_of(tmp_path, program)
    access = home.configure(
        f"Host via\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyCommand {relay}\n"
    )
    since = Since()
    with contextlib.closing(
        ssh.connect(Host(name="via"), access, NoAsker())
    ) as transport:
        assert says_hello(transport)
        assert len(since.children()) == 1
    wait_until(lambda: not since.children(), "the end of the ProxyCommand")


def test_a_proxy_command_runs_in_the_shell_of_the_user(
    home, server, relay, tmp_path, monkeypatch
):
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho "$1 $2" > {tmp_path}/ran\nexec /bin/sh "$@"\n')
    shell.chmod(0o700)
    monkeypatch.setenv("SHELL", str(shell))
    access = home.configure(
        f"Host via\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyCommand {relay}\n"
    )
    ssh.connect(Host(name="via"), access, NoAsker()).close()
    assert (tmp_path / "ran").read_text().startswith("-c exec '")


def test_a_proxy_command_that_fails_is_quoted(home, golden):
    access = home.configure(
        "Host via\n  ProxyCommand sh -c 'echo no ticket >&2; exit 1'\n"
    )
    with pytest.raises(Unreachable) as caught:
        ssh.connect(Host(name="via"), access, NoAsker())
    golden(caught.value.message)


@pytest.mark.quick
def test_a_proxy_command_that_hangs_is_ended(home, golden):
    home.configure("Host via\n  ProxyCommand sleep 60\n")
    since = Since()
    with pytest.raises(Unreachable) as caught:
        ssh.connect(
            Host(name="via"),
            Access(ssh_config=str(home.config), connect_timeout_s=0.5),
            NoAsker(),
        )
    golden(caught.value.message)
    wait_until(lambda: not since.children(), "the end of the ProxyCommand")


@pytest.mark.quick
def test_an_included_file_decides(home, server):
    (home.folder / "conf.d").mkdir()
    (home.folder / "conf.d" / "gpus").write_text(
        f"Host gpu-a\n  HostName 127.0.0.1\n  Port {server.port}\n"
    )
    access = home.configure("Include conf.d/*\n")
    with contextlib.closing(
        ssh.connect(Host(name="gpu-a"), access, NoAsker())
    ) as transport:
        assert says_hello(transport)


def test_a_match_line_that_is_not_understood_is_a_warning(home, server):
    access = home.configure("Match sessiontype shell host 127.0.0.1\n  User nobody\n")
    line = (
        home.config.read_text()
        .splitlines()
        .index("Match sessiontype shell host 127.0.0.1")
        + 1
    )
    with contextlib.closing(
        ssh.connect(home.host(server), access, NoAsker())
    ) as transport:
        (warning,) = transport.warnings
        assert warning.startswith(f"{home.config}, line {line}: ")
        assert "'sessiontype shell host 127.0.0.1'" in warning


@pytest.mark.parametrize("kind", ["ssh", "ssh_command"])
@pytest.mark.parametrize("shell", ["fish", "csh"])
def test_a_log_in_shell_that_is_no_posix_shell_and_greets(kind, shell, home, tmp_path):
    if reason := reason_without(shell):
        pytest.skip(reason)
    module = ssh if kind == "ssh" else ssh_command
    greets = f'ForceCommand echo "Welcome to the cluster"; exec {shell} -c "$SSH_ORIGINAL_COMMAND"'
    with sshd(
        tmp_path / "greets", Path(f"{home.key}.pub"), options=(greets,)
    ) as server:
        home.trust(server)
        with contextlib.closing(
            module.connect(home.host(server), home.access, NoAsker())
        ) as transport:
            process = transport.start(("printf", "%s|", "it's", "a\\b!", "$HOME"))
            assert read_all(process) == b"Welcome to the cluster\nit's|a\\b!|$HOME|"


def test_nothing_of_a_connection_stays(home, server):
    since = Since()
    for module in (ssh, ssh_command):
        transport = module.connect(home.host(server), home.access, NoAsker())
        process = transport.start(("cat",))
        process.write(b"x")
        process.read()
        transport.close()
        process.close()
    wait_until(lambda: not since.threads(""), "the end of the threads")
    wait_until(lambda: not since.files(), "the end of the descriptors")
    wait_until(lambda: not since.children(), "the end of the clients")


# ---- connections that end


@pytest.fixture(params=["ssh", "ssh_command"])
def connected(
    request: pytest.FixtureRequest, home: Home, tmp_path: Path
) -> Iterator[tuple[object, Sshd]]:
    module = ssh if request.param == "ssh" else ssh_command
    with sshd(tmp_path / "mortal", Path(f"{home.key}.pub")) as server:
        home.trust(server)
        with contextlib.closing(
            module.connect(home.host(server), home.access, NoAsker())
        ) as transport:
            yield transport, server


def test_a_connection_that_is_closed_ends_a_read_and_refuses_more(connected):
    transport, server = connected
    process = transport.start(("cat",))
    process.write(b"x")
    assert process.read() == b"x"
    for pid in grandchildren(server.pid):
        os.kill(pid, signal.SIGKILL)
    assert process.read() == b""
    assert process.wait(60) is None
    with pytest.raises(ConnectionLost):
        process.write(bytes(10_000_000))
    wait_until(lambda: refuses(transport), "a refusal to start more")


def grandchildren(pid: int) -> list[int]:
    found = [
        int(word)
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
    return [deeper for child in found for deeper in (child, *grandchildren(child))]


def refuses(transport: object) -> bool:
    try:
        transport.start(("true",)).close()
    except ConnectionLost as error:
        return ": the connection" in str(error)
    return False


def test_a_connection_that_falls_silent_is_given_up(home, server, relay, monkeypatch):
    """A frozen ProxyCommand stands for a cable that is cut behind a jump host: no packet, no error."""
    monkeypatch.setattr("distmagic.transports.ssh.client.KEEPALIVE_S", 0.5)
    access = home.configure(
        f"Host via\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyCommand {relay}\n"
    )
    since = Since()
    with contextlib.closing(
        ssh.connect(Host(name="via"), access, NoAsker())
    ) as transport:
        process = transport.start(("cat",))
        process.write(b"x")
        assert process.read() == b"x"
        (frozen,) = since.children()
        stay = threading.Event()
        assert not stay.wait(3.0)  # a healthy connection outlives many keep-alives
        process.write(b"y")
        assert process.read() == b"y"
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert process.read() == b""
            assert refuses(transport)
        finally:
            os.kill(frozen, signal.SIGCONT)


def test_a_connection_outlives_new_keys_that_are_agreed_on_while_processes_end(
    home, tmp_path, monkeypatch
):
    """It happens where sshd's RekeyLimit says so: here after some ten kilobytes."""
    options = ("MaxSessions 40", "RekeyLimit 50000")
    size = 20_000
    public = Path(f"{home.key}.pub")
    with sshd(tmp_path / "sshd", public, options=options) as server:
        home.trust(server)
        with contextlib.closing(
            ssh.connect(home.host(server), home.access, NoAsker())
        ) as transport:
            own = transport._transport
            exchanges: list[None] = []
            send = own._send_kex_init
            monkeypatch.setattr(own, "_send_kex_init", lambda: exchanges.append(send()))

            def run_some(_: int) -> None:
                for _ in range(8):
                    process = transport.start(("head", "-c", str(size), "/dev/zero"))
                    assert len(read_all(process)) == size
                    process.close()

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(run_some, range(4)))
            assert says_hello(transport)
            assert len(exchanges) > 3


_KERNEL = """
import sys
from distmagic.request.hosts import Host
from distmagic.request.access import Access
from distmagic.transports import ssh_command
from distmagic.transports.asking import NoAsker
transport = ssh_command.connect(Host(name="127.0.0.1", port=int(sys.argv[1])), Access(ssh_config=sys.argv[2]), NoAsker())
transport.start(("cat",))
print(transport._master.pid, transport._directory, flush=True)
sys.stdin.read()
"""


def test_no_ssh_client_outlives_a_killed_kernel(home, server):
    argv = [sys.executable, "-c", _KERNEL, str(server.port), str(home.config)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdout is not None
        pid, folder = kernel.stdout.readline().split()
        kernel.kill()
        kernel.wait(HANG_S)
    wait_until(lambda: not is_running(int(pid)), "the end of the ssh client")
    # The one thing that a killed kernel leaves.
    subprocess.run(["rm", "-r", folder], check=True)


def is_running(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@pytest.mark.quick
def test_ipv6(home, tmp_path):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        probe.close()
    with sshd(
        tmp_path / "six",
        Path(f"{home.key}.pub"),
        options=("AddressFamily any", "ListenAddress ::1"),
    ) as server:
        wait_until(
            lambda: any("listening on ::1" in line for line in server.log),
            "the second listener",
        )
        home.trust(server, f"[::1]:{server.port}")
        with contextlib.closing(
            ssh.connect(Host(name="::1", port=server.port), home.access, NoAsker())
        ) as transport:
            assert says_hello(transport)


def test_a_typed_user_goes_before_the_configuration(home, server):
    access = home.configure("User me\n")
    with pytest.raises(AuthenticationError) as caught:
        ssh.connect(
            Host(name="127.0.0.1", port=server.port, user="you"), access, Answers()
        )
    assert " user you" in caught.value.message

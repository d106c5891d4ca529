"""The playground's hosts, with the two clients that people use: paramiko and the system's ssh."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import paramiko
import pytest

from distmagic.errors import DistmagicError, UsageError
from distmagic.playground import playground
from distmagic.remote.system import processes
from tests import REPOSITORY
from tests.builders.later import Later
from tests.lab.waiting import HANG_S, wait_until

Later("asyncssh")  # without it this module is skipped
ROOT = REPOSITORY
needs_ssh = pytest.mark.needs("ssh")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with closing(
        playground.start(2, directory=tmp_path_factory.mktemp("play"))
    ) as started:
        yield started


def connect(hosts, name="node1", **other):
    told = paramiko.SSHConfig.from_path(hosts.ssh_config).lookup(name)
    client = paramiko.SSHClient()
    client.load_host_keys(told["userknownhostsfile"].strip('"'))
    login = {"username": told["user"], "key_filename": told["identityfile"]}
    client.connect(
        told["hostname"],
        port=int(told["port"]),
        allow_agent=False,
        look_for_keys=False,
        **{**login, **other},
    )
    return client


@pytest.fixture
def client(hosts):
    with connect(hosts) as client:
        yield client


def run(client, command):
    _, out, err = client.exec_command(command)
    return out.read().decode(), err.read().decode(), out.channel.recv_exit_status()


def ssh(hosts, *words, **more):
    command = ["ssh", "-F", hosts.ssh_config, *words]
    return subprocess.run(
        command, check=False, capture_output=True, timeout=HANG_S, **more
    )


def test_output_errors_and_exit_code(client):
    assert run(client, "echo out; echo err >&2; exit 3") == ("out\n", "err\n", 3)
    assert run(client, "no-such-program")[2] == 127


def test_many_commands_on_one_connection(client):
    channels = [client.exec_command(f"echo {number}; cat") for number in range(8)]
    for number, (stdin, out, _) in reversed(list(enumerate(channels))):
        stdin.channel.shutdown_write()
        assert out.read().decode() == f"{number}\n"


def test_input_that_waited_for_a_slow_command_comes_whole(client, tmp_path):
    """Its end is told in the moment in which the command's pipe has room for a part of what is left."""
    sent, read = (1 << 20) + (160 << 10), 100 << 10  # the pipe holds 1 MiB
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        os.mkfifo(gate)
    stdin, out, _ = client.exec_command(
        f"cat {gates[0]}; head -c {read} | wc -c; cat {gates[1]}; wc -c"
    )
    stdin.write(bytes(sent))
    stdin.channel.shutdown_write()
    for gate in gates:
        assert run(client, "true")[2] == 0  # the server has done what it can
        gate.write_text("")
    assert out.read().split() == [b"%d" % read, b"%d" % (sent - read)]


@needs_ssh
def test_the_systems_ssh(hosts):
    data = os.urandom(1 << 20) * 20
    done = ssh(hosts, "node2", "cat; echo err >&2; exit 5", input=data)
    assert (done.stdout == data, done.stderr, done.returncode) == (True, b"err\n", 5)


@needs_ssh
def test_a_host_can_be_the_way_to_another(hosts):
    assert (
        ssh(
            hosts,
            "-o",
            f"ProxyCommand=ssh -F {hosts.ssh_config} -W %h:%p node1",
            "node2",
            "pwd",
        ).returncode
        == 0
    )


@pytest.mark.parametrize("ends", [False, True])
def test_a_forwarded_port_may_speak_before_its_channel_is_open(
    tmp_path, monkeypatch, ends
):
    """An SSH server sends its first line at once, and a busy playground opens the channel after it."""
    import asyncssh
    from asyncssh.forward import SSHForwarder

    from distmagic.playground import server

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        if not ends:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async def late(connection, host: str, port: int) -> SSHForwarder:
        _, end = await asyncio.get_running_loop().create_connection(
            SSHForwarder, host, port
        )
        while not end._inpbuf or end.was_eof_received() != ends:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return SSHForwarder(end)

    monkeypatch.setattr(asyncssh.SSHServerConnection, "forward_connection", late)

    async def heard() -> bytes:
        key = asyncssh.generate_private_key("ssh-ed25519")
        shared = server.SharedByHosts(
            directory=tmp_path, user="me", client_key=key.convert_to_public()
        )
        host = server.PlayedHost(shared, tmp_path)
        await host.listen()
        line = host.known_hosts_line().encode()
        login = {"username": "me", "client_keys": [key], "known_hosts": line}
        async with (
            host._acceptor,
            await asyncio.start_server(greet, "127.0.0.1", 0) as greeter,
            asyncssh.connect("127.0.0.1", host.port, config=(), **login) as to,
        ):
            port = greeter.sockets[0].getsockname()[1]
            reader, writer = await to.open_connection("127.0.0.1", port)
            found = await (reader.read() if ends else reader.readline())
            writer.close()
            await writer.wait_closed()
            return found

    assert asyncio.run(asyncio.wait_for(heard(), HANG_S)) == b"hello\n"


def test_hosts_have_homes_of_their_own_and_the_kernels_python(hosts):
    seen = []
    for host in hosts.hosts:
        with connect(hosts, host.name) as client:
            text = "pwd; echo $HOME; python3 -c 'import sys; print(sys.executable)'; echo $SSH_CONNECTION; id -un"
            out, err, code = run(client, text)
            assert (err, code) == ("", 0)
            seen.append(out.splitlines())
    (first, home1, python, connection, user), (_, home2, *_) = seen
    assert [host.name for host in hosts.hosts] == ["node1", "node2"]
    assert first == home1 != home2
    assert python == sys.executable
    assert [connection.split()[i] for i in (0, 2)] == ["127.0.0.1", "127.0.0.1"]
    assert (
        paramiko.SSHConfig.from_path(hosts.ssh_config).lookup("node1")["user"] == user
    )


def test_the_kernels_environment_does_not_leak(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_KERNEL", "1")
    with (
        closing(playground.start(1, directory=tmp_path)) as hosts,
        connect(hosts) as client,
    ):
        assert run(client, "echo [$SECRET_OF_THE_KERNEL$PYTHONPATH]")[0] == "[]\n"


def test_only_the_playgrounds_own_key_and_user_get_in(hosts, tmp_path):
    stranger = tmp_path / "stranger"
    key = paramiko.Ed25519Key.from_private_key_file(_fresh_key(stranger))
    with pytest.raises(paramiko.AuthenticationException):
        connect(hosts, key_filename=None, pkey=key)
    with pytest.raises(paramiko.AuthenticationException):
        connect(hosts, username="somebody-else")
    with pytest.raises(paramiko.SSHException):
        connect(hosts, key_filename=None, password="")


def test_a_client_may_try_again_and_again(hosts, tmp_path):
    """A wrong key, as an agent may offer, is no reason to hang up; each attempt of paramiko is a service request."""
    told = paramiko.SSHConfig.from_path(hosts.ssh_config).lookup("node1")
    with paramiko.Transport(("127.0.0.1", int(told["port"]))) as transport:
        transport.start_client(timeout=HANG_S)
        with pytest.raises(paramiko.BadAuthenticationType) as refused:
            transport.auth_none(told["user"])
        assert refused.value.allowed_types == ["publickey"]
        for number in range(3):
            wrong = paramiko.Ed25519Key.from_private_key_file(
                _fresh_key(tmp_path / f"key{number}")
            )
            with pytest.raises(paramiko.AuthenticationException):
                transport.auth_publickey(told["user"], wrong)
        transport.auth_publickey(
            told["user"],
            paramiko.Ed25519Key.from_private_key_file(told["identityfile"][0]),
        )
        assert transport.is_authenticated()


def _fresh_key(path):
    import asyncssh

    path.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    return str(path)


def test_files_are_private(hosts):
    directory = Path(hosts.ssh_config).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "id_ed25519").stat().st_mode & 0o777 == 0o600


def test_a_signal_is_passed_on_and_told(client):
    channel = client.get_transport().open_session()
    channel.exec_command("kill -TERM $$")
    assert channel.recv_exit_status() == -1  # paramiko's word for a signal


def test_a_signal_without_a_name_is_told_too(client):
    channel = client.get_transport().open_session()
    channel.exec_command(f"kill -{signal.SIGRTMIN + 1} $$")
    assert channel.recv_exit_status() == -1
    assert run(client, "true")[2] == 0, "the connection stays"


def test_a_closed_channel_gives_end_of_file_and_no_signal(client, tmp_path):
    note = tmp_path / "note"
    stdin, out, _ = client.exec_command(
        f"echo up; cat; echo 'read to the end' > {note}"
    )
    assert out.readline() == "up\n"
    stdin.channel.close()
    assert (
        wait_until(lambda: note.exists() and note.read_text(), "the command's note")
        == "read to the end\n"
    )


def test_a_channel_that_is_closed_leaves_the_others_of_its_connection(client, tmp_path):
    """Also where nobody reads what the command writes."""
    note = tmp_path / "note"
    _, out, _ = client.exec_command(f"head -c 60000000 /dev/zero; echo ended > {note}")
    other, answer, _ = client.exec_command("cat")
    assert out.read(1) == b"\0"
    out.channel.close()
    wait_until(note.exists, "the end of the first command")
    assert run(client, "echo third") == ("third\n", "", 0)
    other.write("still here\n")
    other.channel.shutdown_write()
    assert answer.read().decode() == "still here\n"


@needs_ssh
def test_a_command_that_takes_no_input_ends_all_the_same(hosts):
    done = ssh(
        hosts,
        "node1",
        "exec 0<&-; echo closed; sleep 0.2; echo end >&2",
        input=b"x" * (8 << 20),
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"closed\n", b"end\n", 0)


def test_output_of_a_child_is_waited_for(client):
    assert run(client, "(sleep 0.3; echo late; echo later >&2) & exit 4") == (
        "late\n",
        "later\n",
        4,
    )


def test_a_reader_that_is_slow_holds_the_writer_up(client, tmp_path):
    note = tmp_path / "note"
    _, out, _ = client.exec_command(f"head -c 60000000 /dev/zero; echo done > {note}")
    assert out.read(1) == b"\0"
    assert not note.exists()
    assert len(out.read()) == 60_000_000 - 1
    assert note.exists()


def test_a_missing_home_is_told(tmp_path):
    with (
        closing(playground.start(1, directory=tmp_path)) as hosts,
        connect(hosts) as client,
    ):
        shutil.rmtree(Path(hosts.ssh_config).parent / "node1")
        out, err, code = run(client, "true")
        assert (out, code) == ("", 255)
        assert "No such file or directory" in err


STUBBORN = "trap '' TERM HUP; echo $$; while :; do sleep 1; done"
DAEMON = "(setsid sh -c 'echo $$; exec sleep 1000' &) ; sleep 1000"


def _alive(pid, directory):
    """Whether a process of this number works in the playground's directory."""
    try:
        return (
            os.readlink(f"/proc/{pid}/cwd").startswith(str(directory))
            and processes.read(pid).state not in "ZX"
        )
    except (OSError, AttributeError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [STUBBORN, DAEMON], ids=["ignores signals", "a daemon"]
)
def test_stop_leaves_no_process_and_no_directory(tmp_path, monkeypatch, command):
    hosts = playground.start(1, directory=tmp_path)
    client = connect(hosts)
    _, out, _ = client.exec_command(command)
    pid = int(out.readline())
    assert _alive(pid, tmp_path)
    hosts.stop()
    hosts.stop()
    assert not _alive(pid, tmp_path)
    assert list(tmp_path.iterdir()) == []
    client.close()


@pytest.fixture
def played(tmp_path):
    with closing(playground.start(2, directory=tmp_path)) as started:
        yield started


def started_on(client, command):
    """Start a command that prints its pid first; return the pid and its output."""
    _, out, _ = client.exec_command(f"echo $$; exec {command}")
    return int(out.readline()), out


def test_a_frozen_host_stands_still_until_it_is_thawed(played):
    with connect(played) as client, connect(played, "node2") as other:
        pid, _ = started_on(client, "sleep 1000")
        untouched, _ = started_on(other, "sleep 1000")
        rows = played.order("freeze", "node1")
        assert rows == [("node1", "frozen", 1), ("node2", "up", 1)]
        assert processes.read(pid).state == "T"
        assert processes.read(untouched).state == "S"
        _, late, _ = client.exec_command("echo late")
        assert not late.channel.recv_ready()
        assert played.order("thaw", "node1")[0][1] == "up"
        assert late.read() == b"late\n"
        wait_until(lambda: processes.read(pid).state == "S", "the sleeper to go on")


def test_a_cut_host_is_unreachable_and_its_programs_go_on(played):
    client = connect(played)
    pid, _ = started_on(client, "sleep 1000")
    assert played.order("cut", "node1")[0] == ("node1", "cut", 1)
    wait_until(lambda: not client.get_transport().is_active(), "the connection's end")
    with pytest.raises(OSError):
        connect(played)
    assert processes.read(pid).state == "S"
    played.order("heal", "node1")
    with connect(played) as again:
        assert run(again, "echo back")[0] == "back\n"
    client.close()


def test_a_host_without_power_has_no_process_and_comes_back_the_same(played):
    client = connect(played)
    pid, _ = started_on(client, "sleep 1000")
    started_on(client, "sh -c 'setsid -f sleep 1000; sleep 1000'")
    played.order("freeze", "node1")
    assert played.order("off", "node1") == [("node1", "off", 0), ("node2", "up", 0)]
    assert processes.read(pid) is None
    with pytest.raises(OSError):
        connect(played)
    assert played.order("on", "node1")[0] == ("node1", "up", 0)
    with connect(played) as again:  # with the same key, at the same port
        assert run(again, "echo back")[0] == "back\n"
    client.close()


def test_a_frozen_host_does_not_outlive_its_playground(tmp_path):
    hosts = playground.start(1, directory=tmp_path)
    with connect(hosts) as client:
        pid, _ = started_on(client, "sleep 1000")
        hosts.order("freeze", "node1")
        hosts.stop()
    assert not _alive(pid, tmp_path)


def test_a_playground_that_does_not_answer_is_told(played, monkeypatch, golden):
    monkeypatch.setattr(playground, "_ORDER_S", 0.1)
    os.kill(played._server.pid, signal.SIGSTOP)
    try:
        with golden.raises(DistmagicError):
            played.order()
    finally:
        os.kill(played._server.pid, signal.SIGCONT)
    played.stop()
    assert played._server.returncode == 0, "nobody reads its answer, and it ends"


def test_a_playground_that_has_ended_takes_no_order(tmp_path, golden):
    hosts = playground.start(1, directory=tmp_path)
    hosts._server.kill()
    hosts._server.wait()
    with golden.raises(DistmagicError):
        hosts.order("freeze", "node1")
    hosts.stop()


KERNEL = """
import os, subprocess, sys, threading
from distmagic.playground import playground
hosts = playground.start(1, directory=sys.argv[1])
keeps_the_pipe_open = os.fork()
if keeps_the_pipe_open == 0:
    os.execvp("sleep", ["sleep", "1000"]) if sys.argv[2] == "exec" else threading.Event().wait()
print(hosts._server.pid, keeps_the_pipe_open, hosts.ssh_config, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("child", ["exec", "fork"])
def test_a_killed_kernel_takes_its_playground_along(tmp_path, child):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    kernel = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KERNEL, str(tmp_path), child],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    with kernel:
        server, other, config = kernel.stdout.readline().split()
        with connect(type("Hosts", (), {"ssh_config": config})) as client:
            _, out, _ = client.exec_command("echo $$; exec sleep 1000")
            started = int(out.readline())
            assert _alive(started, tmp_path)
            kernel.send_signal(signal.SIGKILL)
            wait_until(
                lambda: not list(tmp_path.iterdir()), "the playground's directory to go"
            )
            wait_until(lambda: processes.read(int(server)) is None, "the server to go")
            assert processes.read(started) is None
        os.kill(int(other), signal.SIGKILL)


KEEPING = """
import sys, threading
from distmagic.playground import playground
hosts = playground.start(2, directory=sys.argv[1], keep=True)
hosts.order("cut", "node2")
print(hosts._server.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_kept_playground_is_found_by_the_next_kernel(tmp_path, monkeypatch):
    place = tmp_path / ("long" * 30)  # a socket's path is shorter
    place.mkdir()
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    assert playground.found() is None
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    kernel = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KEEPING, str(place)],
        stdout=subprocess.PIPE,
        env=env,
    )
    with kernel:
        server = int(kernel.stdout.readline())
        kernel.kill()
    hosts = playground.found()
    hosts.close()  # as `%unload_ext` does
    assert [row[:2] for row in hosts.order()] == [("node1", "up"), ("node2", "cut")]
    with connect(hosts) as client:
        assert run(client, "echo up")[0] == "up\n"
    hosts.stop()
    wait_until(lambda: processes.read(server) is None, "the server to go")
    assert (playground.found(), list(place.iterdir())) == (None, [])


def test_the_end_of_a_kept_playground_leaves_the_record_of_a_later_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    record = playground._kept()
    record.parent.mkdir(exist_ok=True)
    record.write_text(str(tmp_path / "later"))
    playground.Playground(None, tmp_path / "ended", 1, is_kept=True).stop()
    assert record.exists()
    playground.Playground(None, tmp_path / "later", 1, is_kept=True).stop()
    assert not record.exists()


def test_a_directory_of_another_user_is_no_playground(tmp_path, monkeypatch):
    """Its name is free once the playground has ended."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(playground, "_ORDER_S", 0.2)
    record = playground._kept()
    record.parent.mkdir()
    record.write_text(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hosts = playground.Playground(None, tmp_path, 1, is_kept=True)
    user = os.getuid()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind("orders")
        theirs.listen()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert playground.found() is None
        with pytest.raises(DistmagicError, match="has ended"):
            hosts.ssh_config  # noqa: B018


def test_each_machine_of_a_shared_home_has_its_own_kept_playground(monkeypatch):
    record = playground._kept()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert playground._kept() != record


def test_a_kept_playground_of_this_kernel_that_does_not_answer_is_killed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(playground, "_STOP_S", 0.2)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = subprocess.Popen(["sleep", "1000"])  # it ignores the signal, too
    signal.signal(signal.SIGTERM, before)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("orders")
        silent.listen()
        monkeypatch.chdir(tmp_path)
        playground.Playground(server, place, 1, is_kept=True).stop()
    assert (server.poll(), place.exists()) == (-signal.SIGKILL, False)


def test_a_kept_playground_ends_two_hours_after_its_last_use(monkeypatch):
    from distmagic.playground import server

    now_s = [0.0]
    last_use_s = 9000.0

    class Host:
        connections = ()

        def processes(self):
            return [1] if now_s[0] <= last_use_s else []

    async def sleep(seconds):
        now_s[0] += seconds

    monkeypatch.setattr(processes, "up_s", lambda: now_s[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(server._idle({"node1": Host()}))
    assert 0 <= now_s[0] - last_use_s - 7200 < 120


def test_a_forked_child_does_not_stop_its_parents_playground(hosts):
    pid = os.fork()
    if pid == 0:
        hosts.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    with connect(hosts) as client:
        assert run(client, "true")[2] == 0


@pytest.mark.parametrize("count", [0, -1])
def test_no_hosts_are_no_playground(count, golden):
    with golden.raises(UsageError):
        playground.start(count)


def test_asyncssh_is_asked_for_when_missing(monkeypatch, tmp_path, golden):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with golden.raises(DistmagicError):
        playground.start(1, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "asyncssh.py").write_text(
        "raise ImportError('this asyncssh is broken')"
    )
    (tmp_path / "place").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(DistmagicError, match="this asyncssh is broken"):
        playground.start(1, directory=tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_another_word_than_the_servers_is_no_start(monkeypatch, tmp_path):
    def launch(place, *_):
        (place / "server.log").touch()
        return subprocess.Popen(["echo", "a word of sitecustomize"], stdout=subprocess.PIPE)  # fmt: skip

    monkeypatch.setattr(playground, "_launch", launch)
    with pytest.raises(DistmagicError, match="a word of sitecustomize"):
        playground.start(1, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_playground_without_room_or_without_a_process_says_so(monkeypatch, tmp_path):
    with pytest.raises(DistmagicError, match="No such file"):
        playground.start(1, directory=tmp_path / "missing")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    (tmp_path / "place").mkdir()
    with pytest.raises(DistmagicError, match="no-python"):
        playground.start(1, directory=tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_asyncssh_is_not_imported_here():
    code = "import sys, distmagic.playground; assert 'asyncssh' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

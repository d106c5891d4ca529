"""The parts without a network: quoting, known_hosts, questions, the deadline, the client's words."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distmagic.errors import AuthenticationError
from distmagic.request.hosts import Host
from distmagic.request.spec import Access
from distmagic.transports import asking, ssh_command, ssh_words, troubles
from distmagic.transports.local import connecting_program
from distmagic.transports.piped import Tail
from distmagic.transports.quoting import command_line, quote
from distmagic.transports.ssh import client as ssh_client
from distmagic.transports.ssh import known_hosts
from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.ssh.process import SshProcess
from distmagic.transports.troubles import Trouble
from tests.lab.waiting import wait_until

HOSTILE = (
    "plain", "a b", "", "it's", "a\\b", "a\\\\b", "\\", "!x", "a!b", "!!", "\\!", "$HOME", "`id`", "$(id)", "~", "~/x",
    "*", "?", "[a]", "{a,b}", "#c", "=ls", "%self", "%1", "^", "a^b", ";", "&&", "|", "<", ">", '"', "\t", "é ü", "-n",
    "--flag=x y", "a\\'b", "\\n", "(", "a'!\\'b", "x" * 3000,
)  # fmt: skip
SHELLS = (
    "sh",
    "bash",
    pytest.param("fish", marks=pytest.mark.needs("fish")),
    pytest.param("csh", marks=pytest.mark.needs("csh")),
)


# ---- quoting


@pytest.mark.parametrize("shell", SHELLS)
def test_every_log_in_shell_reads_the_same_words(shell: str) -> None:
    line = command_line(
        (
            sys.executable,
            "-c",
            "import json,sys; print(json.dumps(sys.argv[1:]))",
            *HOSTILE,
        )
    )
    shown = subprocess.run(
        [shell, "-c", line], capture_output=True, text=True, check=True
    )
    assert tuple(json.loads(shown.stdout)) == HOSTILE


@pytest.mark.parametrize("shell", SHELLS)
def test_home_is_expanded_in_the_program_only(
    shell: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "my bin" / "show"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho $1\n")
    program.chmod(0o755)
    line = command_line(("~/my bin/show", "~/x"))
    assert (
        subprocess.run(
            [shell, "-c", line], capture_output=True, text=True, check=True
        ).stdout
        == "~/x\n"
    )


def test_a_plain_line_stays_readable() -> None:
    assert (
        command_line(("python3", "-u", "/a/b.py", "x=1"))
        == "exec python3 -u /a/b.py 'x=1'"
    )


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_a_line_break_can_not_be_quoted(word: str) -> None:
    with pytest.raises(ValueError, match="it can't be on a command line"):
        quote(word)


def test_no_program_is_an_error() -> None:
    for argv in ((), ("",)):
        with pytest.raises(ValueError, match="a command needs a program"):
            command_line(argv)


# ---- known_hosts

KEY, OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIJy3", "AAAAC3NzaC1lZDI1NTE5AAAAIJy4"


def known(text: str) -> tuple[known_hosts.KnownKey, ...]:
    return tuple(known_hosts.parse(text.splitlines(), "kh"))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("gpu-a", "gpu-a", True),
        ("GPU-A", "gpu-a", True),
        ("gpu-?,10.0.0.*", "10.0.0.7", True),
        ("*,!gpu-b", "gpu-b", False),
        ("!gpu-b,*", "gpu-a", True),
        ("[10.0.0.1]:22", "10.0.0.1", False),
        ("[10.0.0.1]:2222", "[10.0.0.1]:2222", True),
        (
            "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=",
            "192.168.1.61",
            True,
        ),
        (
            "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=",
            "192.168.1.62",
            False,
        ),
        ("|1|broken", "gpu-a", False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    (line,) = known(f"{pattern} ssh-ed25519 {KEY}")
    assert line.is_for(name) is fits


def test_lines_that_say_nothing_are_left_out() -> None:
    text = f"\n# x\ngpu-a\ngpu-a ssh-rsa ???\n@odd gpu-a ssh-rsa {KEY}\n@revoked gpu-a ssh-ed25519 {KEY} comment\n"
    assert [(line.line, line.marker) for line in known(text)] == [(6, "@revoked")]


def server(port: int = 22, alias: str | None = None) -> known_hosts.Dialled:
    names = known_hosts.names_of("Gpu-A", port, alias)
    return known_hosts.Dialled(
        where=f"gpu-a port {port}",
        hostname="gpu-a",
        port=port,
        names=names,
        file="~/kh",
    )


def check(
    text: str, dialled: known_hosts.Dialled, key_type: str = "ssh-ed25519"
) -> str:
    """Return the trouble's message and hint, "" if there is none."""
    blob = next(iter(known(f"x {key_type} {KEY}"))).blob
    try:
        known_hosts.check(known(text), dialled, key_type, blob)
    except Trouble as trouble:
        return str(trouble.for_host("gpu-a"))
    return ""


def test_a_known_key() -> None:
    assert check(f"gpu-a ssh-ed25519 {KEY}", server()) == ""
    assert check(f"gpu-a ssh-ed25519 {OTHER}\ngpu-a ssh-ed25519 {KEY}", server()) == ""
    # As OpenSSH: also without the port.
    assert check(f"gpu-a ssh-ed25519 {KEY}", server(2222)) == ""
    assert check(f"the-alias ssh-ed25519 {KEY}", server(2222, "the-alias")) == ""


def test_keys_that_are_not_trusted() -> None:
    assert "is not known" in check("", server())
    assert "is not known" in check(
        f"gpu-a ssh-ed25519 {KEY}", server(alias="the-alias")
    )
    assert "is not known" in check(f"gpu-a ssh-rsa {OTHER}", server())
    assert "has CHANGED" in check(f"gpu-a ssh-ed25519 {OTHER}", server())
    assert "kh, line 2" in check(f"\ngpu-a ssh-ed25519 {OTHER}", server())
    assert "is REVOKED" in check(
        f"gpu-a ssh-ed25519 {KEY}\n@revoked * ssh-ed25519 {KEY}", server()
    )
    assert "--ssh-command ssh" in check(
        f"@cert-authority * ssh-ed25519 {OTHER}", server()
    )


def test_an_unknown_key_under_another_name_is_not_cured_by_keyscan() -> None:
    assert "ssh-keyscan gpu-a >> ~/kh" in check("", server())
    assert "ssh-keyscan" not in check("", server(alias="the-alias"))


def test_the_types_to_ask_for() -> None:
    lines = known(
        f"gpu-a ssh-rsa {KEY}\ngpu-a ssh-ed25519 {KEY}\n@revoked gpu-a ssh-dss {KEY}\nb x {KEY}"
    )
    assert known_hosts.types_known(lines, ("gpu-a",)) == ("ssh-rsa", "ssh-ed25519")
    assert known_hosts.types_known(lines, ("nobody",)) == ()


# ---- questions


class Typist:
    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.inside = 0

    def ask(self, prompt: str, *, secret: bool) -> str:
        self.inside += 1
        assert self.inside == 1
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        self.inside -= 1
        return answer


@pytest.fixture(autouse=True)
def no_kept_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_passphrases", {})


def test_a_passphrase_is_kept_once_it_was_right() -> None:
    typist = Typist("wrong", "right")
    for _ in range(3):
        assert (
            asking.unlock(typist, "gpu-a", "/k", lambda p: p if p == "right" else None)
            == "right"
        )
    assert typist.prompts == [
        "gpu-a: Passphrase of /k: ",
        "gpu-a: That was not it. Passphrase of /k: ",
    ]
    assert (
        asking.unlock(Typist("1", "2", "3"), "gpu-a", "/other", lambda p: None) is None
    )


def test_a_password_is_never_kept() -> None:
    typist = Typist("1", "2")
    assert [asking.ask(typist, "gpu-a", "Password:") for _ in range(2)] == ["1", "2"]
    assert typist.prompts == ["gpu-a: Password: "] * 2


def test_a_host_cannot_ask_in_the_name_of_another_one() -> None:
    typist = Typist("1")
    asking.ask(
        typist, "gpu-a", "Pick one:\n 1. push\r\n\ngpu-b: Password:\x1b[2J\u202e "
    )
    assert typist.prompts == [
        "gpu-a: Pick one:\ngpu-a:  1. push\ngpu-a: \ngpu-a: gpu-b: Password: "
    ]


@pytest.mark.parametrize("said", ["a" * 100_000, "\x1b[2J" * 10_000])
def test_an_error_has_not_all_that_a_server_said(said) -> None:
    error = troubles.not_ssh("10.0.0.5 port 22", said).for_host("gpu-a")
    assert len(error.message) < 2100
    assert error.message.isprintable()


def test_many_threads_ask_one_after_the_other_and_once() -> None:
    typist = Typist("right")
    unlock = lambda: asking.unlock(typist, "gpu-a", "/k", lambda p: p)  # noqa: E731
    threads = [threading.Thread(target=unlock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(typist.prompts) == 1


def test_nobody_to_ask() -> None:
    with pytest.raises(AuthenticationError) as caught:
        asking.ask(asking.NoAsker(), "gpu-a", "Verification code: ")
    assert caught.value.host == "gpu-a"
    assert str(caught.value) == (
        "gpu-a: asks 'Verification code:', and nobody is here to answer.\n"
        "Load the key in your ssh agent (ssh-add), or run this in a notebook, in a cell without --background, where you can answer."
    )


# ---- the deadline


def test_a_deadline_expires_once() -> None:
    expired = threading.Event()
    with Deadline(0.05, expired.set) as deadline:
        assert expired.wait(10)
        assert deadline.expired
        assert deadline.remaining() == 0


def test_a_deadline_that_is_kept_never_fires() -> None:
    expired = threading.Event()
    with Deadline(0.2, expired.set) as deadline:
        pass
    assert not expired.wait(0.4)
    assert not deadline.expired


def test_a_pause_is_not_counted() -> None:
    expired = threading.Event()
    with Deadline(0.3, expired.set) as deadline:
        with deadline.paused(), deadline.paused():
            assert not expired.wait(0.5)
        assert not deadline.expired
        assert 0 < deadline.remaining() <= 0.3
        assert expired.wait(10)


# ---- what the system's client says


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "ssh: connect to host a port 22: Operation timed out",
            "no answer from gpu-a within 7 s.",
        ),
        (
            "ssh: connect to host a port 22: No route to host",
            "the network does not lead to gpu-a (No route to host).",
        ),
        (
            "me@gpu-a: Permission denied (publickey,password).",
            "gpu-a did not let in user me. Tried: what ssh offers. It accepts: publickey, password.",
        ),
        (
            "/home/me/.ssh/config: line 3: Bad configuration option: prot\r\n/x: terminating, 1 bad options",
            "the ssh configuration is wrong: /home/me/.ssh/config: line 3: Bad configuration option: prot",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host",
            "gpu-a answered, but not as an SSH server (Connection closed by remote host).",
        ),
        ("banner\nsomething new\n", "the connection to gpu-a failed: something new."),
        ("", "the connection to gpu-a failed: the client said nothing."),
    ],
)
def test_the_client_s_words(said: str, message: str) -> None:
    assert ssh_words.trouble(said, Host(name="gpu-a"), 7).message == message


def test_the_tail_of_a_stream() -> None:
    tail = Tail(4)
    tail.append(b"abc")
    tail.append(b"def")
    assert tail.text() == "cdef"


# ---- a process behind a channel


class _EndsWhileReading:
    """A channel whose connection ends in the middle of a read of stderr, as paramiko reports it."""

    exit_status = -1

    def __init__(self) -> None:
        self.pieces = [b"half a sen", EOFError()]
        self.status_event = threading.Event()
        self.transport = self

    def recv_stderr(self, _: int) -> bytes:
        piece = self.pieces.pop(0)
        if isinstance(piece, Exception):
            self.status_event.set()
            raise piece
        return piece


def test_a_connection_that_ends_while_stderr_is_read_makes_no_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise: list[object] = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    process = SshProcess(_EndsWhileReading(), "gpu-a", (EOFError,))  # type: ignore[arg-type]
    assert process.wait(10.0) is None
    process._drainer.join(10.0)
    assert process.stderr() == "half a sen"
    assert noise == []


# ---- many connections


def test_a_connection_leaves_nothing_with_the_log() -> None:
    from distmagic.transports.ssh.client import SshSession

    for _ in range(3):
        ours, theirs = socket.socketpair()
        with theirs:
            SshSession(ours, "gpu-a", 1.0).close()
    handlers = logging.getLogger("paramiko").handlers
    assert len([one for one in handlers if isinstance(one, logging.NullHandler)]) == 1


def test_a_known_hosts_file_is_read_once_and_again_after_an_edit(
    tmp_path: Path,
) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("gpu-a ssh-ed25519 AAAA\n")
    first = known_hosts.read([str(file)])
    assert known_hosts.read([str(file)])[0] is first[0]
    file.write_text("gpu-a,gpu-b ssh-ed25519 AAAA\n")
    assert [key.patterns for key in known_hosts.read([str(file)])] == ["gpu-a,gpu-b"]
    file.unlink()
    assert known_hosts.read([str(file)]) == ()


def test_sixteen_programs_connect_at_a_time_and_a_turn_is_waited_for_without_a_limit(
    tmp_path: Path,
) -> None:
    """They may share a bastion, which turns away clients when too many are on their way."""
    client = tmp_path / "ssh"
    client.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/connecting.$$\n"
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done\necho distmagic-ready\nexec cat\n"
    )
    client.chmod(0o700)
    access = Access(ssh_command=str(client), connect_timeout_s=60)

    def connect(number: int) -> None:
        ssh_command.connect(
            Host(name=f"gpu-{number}"), access, asking.NoAsker()
        ).close()

    with ThreadPoolExecutor(20) as pool:
        connected = [pool.submit(connect, number) for number in range(20)]
        try:
            wait_until(
                lambda: len(list(tmp_path.glob("connecting.*"))) == 16,
                "sixteen programs that connect",
            )
            assert not connecting_program.acquire(blocking=False)
        finally:
            (tmp_path / "go").touch()
        for one in connected:
            one.result()
    assert len(list(tmp_path.glob("connecting.*"))) == 20


@pytest.mark.parametrize(
    "error", [EOFError(), OSError("reset"), ssh_client.paramiko.SSHException("gone")]
)
def test_the_end_of_a_session_over_a_jump_host_that_is_gone_raises_nothing(error):
    """In paramiko's thread it would be printed as a traceback, in whatever cell runs just then."""

    class Gone:
        def close(self) -> None:
            raise error

    ssh_client._Packetizer(Gone()).close()

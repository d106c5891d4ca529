"""Logging in: keys, the agent, passphrases, one-time passwords, several factors, and each refusal in words."""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distmagic.errors import AuthenticationError
from distmagic.request.hosts import Host
from distmagic.transports import asking
from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.ssh.public_keys import join_strings
from tests.builders.agents import scripted_agent
from tests.builders.since import Since
from tests.lab.waiting import HANG_S, wait_until
from tests.transports.asking_server import Rules, asking_server
from tests.transports.conftest import Answers, Home
from tests.transports.contract import read_all
from tests.transports.sshd import Sshd, make_key, sshd

ssh = pytest.importorskip("distmagic.transports.ssh.ssh")

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def no_kept_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_passphrases", {})


@contextlib.contextmanager
def asking_host(
    home: Home, tmp_path: Path, *steps: str, **rules: object
) -> Iterator[Host]:
    with asking_server(
        tmp_path / "server", Rules(steps=list(steps), **rules)
    ) as server:
        home.trust(server)
        yield home.host(server)


def refused(host: Host, home: Home, asker: asking.Asker) -> AuthenticationError:
    with pytest.raises(AuthenticationError) as caught:
        ssh.connect(host, home.access, asker)
    return caught.value


def words(error: AuthenticationError, server: Sshd) -> str:
    """Return what an error says, without the server's port and the name of who runs the tests."""
    said = error.message.replace(str(server.port), "PORT")
    return said.replace(f"user {getpass.getuser()}", "user USER")


# ---- questions


def test_a_one_time_password_is_asked_for(home, tmp_path):
    asker = Answers(["123456"])
    with (
        asking_host(home, tmp_path, "keyboard-interactive") as host,
        contextlib.closing(ssh.connect(host, home.access, asker)) as transport,
    ):
        assert asker.prompts == [("127.0.0.1: Verification code: ", True)]
        assert read_all(transport.start(("true",))) == b"ran exec true"


def test_a_key_and_then_a_one_time_password(home, tmp_path, user_key):
    public = Path(f"{user_key}.pub").read_text().split()[1]
    asker = Answers(["123456"])
    with asking_host(
        home, tmp_path, "publickey", "keyboard-interactive", key=public
    ) as host:
        ssh.connect(host, home.access, asker).close()
    assert len(asker.prompts) == 1


def test_several_questions_with_instructions_and_echo(home, tmp_path):
    rules = {
        "questions": [("User: ", True), ("Code: ", False)],
        "answers": ["me", "1"],
        "instructions": "Cluster log-in.",
    }
    asker = Answers(["me", "1"])
    with asking_host(home, tmp_path, "keyboard-interactive", **rules) as host:
        ssh.connect(host, home.access, asker).close()
    assert asker.prompts == [
        ("127.0.0.1: Cluster log-in. User: ", False),
        ("127.0.0.1: Cluster log-in. Code: ", True),
    ]


def test_a_wrong_answer_may_be_corrected(home, tmp_path):
    asker = Answers(["no", "123456"])
    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        ssh.connect(host, home.access, asker).close()
    assert len(asker.prompts) == 2


def test_three_wrong_answers_are_a_refusal(home, tmp_path):
    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        error = refused(host, home, Answers(["1", "2", "3"]))
        user = re.search(r"let in user (\S+)\.", error.message)
        assert user is not None
        assert error.message == (
            f"127.0.0.1: 127.0.0.1 port {host.port} did not let in user {user[1]}. "
            "Tried: keyboard-interactive. It accepts: keyboard-interactive."
        )


def test_a_password_is_asked_for(home, tmp_path):
    asker = Answers(["open sesame"])
    home.configure("User me\n")
    with asking_host(home, tmp_path, "password") as host:
        ssh.connect(host, home.access, asker).close()
    assert asker.prompts == [("127.0.0.1: Password of me: ", True)]


def test_without_anybody_to_ask_the_error_says_so(home, tmp_path, golden):
    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        error = refused(host, home, asking.NoAsker())
    golden(error)


def test_the_time_for_an_answer_does_not_count(home, tmp_path, monkeypatch):
    begun: list[Deadline] = []

    class Noted(Deadline):
        def __enter__(self) -> Deadline:
            begun.append(self)
            return super().__enter__()

    monkeypatch.setattr("distmagic.transports.ssh.ssh.Deadline", Noted)

    class Slow:
        def ask(self, prompt: str, *, secret: bool) -> str:
            left_s = begun[-1].remaining()
            threading.Event().wait(0.05)
            assert begun[-1].remaining() == left_s
            return "123456"

    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        ssh.connect(host, home.access, Slow()).close()


def test_batch_mode_never_asks(home, tmp_path):
    home.configure("BatchMode yes\n")
    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        assert (
            "keyboard-interactive (BatchMode forbids to ask)"
            in refused(host, home, Answers()).message
        )


@pytest.mark.parametrize(
    "line",
    ["KbdInteractiveAuthentication no", "PreferredAuthentications publickey,password"],
)
def test_a_method_that_is_switched_off_is_not_tried(home, tmp_path, line):
    home.configure(f"{line}\n")
    with asking_host(home, tmp_path, "keyboard-interactive") as host:
        message = refused(host, home, asking.NoAsker()).message
    assert "keyboard-interactive (" not in message


# ---- keys, against a real OpenSSH server


@pytest.fixture
def locked(home: Home, tmp_path: Path) -> Iterator[tuple[Sshd, Path]]:
    """A server that only takes a key with the passphrase "secret", and that key."""
    key = make_key(tmp_path / "locked", passphrase="secret")
    home.config.write_text(home.config.read_text().replace(str(home.key), str(key)))
    with sshd(tmp_path / "locked_server", Path(f"{key}.pub")) as server:
        home.trust(server)
        yield server, key


@pytest.mark.needs("sshd")
def test_a_passphrase_is_asked_for_once_in_a_kernel(home, locked):
    server, key = locked
    asker = Answers(["secret"])
    for _ in range(2):
        ssh.connect(home.host(server), home.access, asker).close()
    assert asker.prompts == [(f"127.0.0.1: Passphrase of {key}: ", True)]


@pytest.mark.needs("sshd")
def test_a_wrong_passphrase_is_asked_for_again(home, locked, golden):
    server, key = locked
    asker = Answers(["wrong", "secret"])
    ssh.connect(home.host(server), home.access, asker).close()
    golden(asker.prompts[1][0])
    assert f"key {key} (wrong passphrase)" not in str(asker)


@pytest.mark.needs("sshd")
def test_an_encrypted_key_without_anybody_to_ask(home, locked):
    server, key = locked
    error = refused(home.host(server), home, asking.NoAsker())
    assert type(error) is AuthenticationError
    assert str(key) in error.message


@pytest.mark.needs("sshd")
def test_the_agent_is_asked_first(home, locked, tmp_path, monkeypatch):
    server, key = locked
    open_key = tmp_path / "open"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", open_key],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with agent(tmp_path / "agent", open_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()
        monkeypatch.delenv("SSH_AUTH_SOCK")
        home.configure(f"IdentityAgent {path}\n")
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@contextlib.contextmanager
def agent(path: Path, *keys: Path) -> Iterator[str]:
    child = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
    try:
        subprocess.run(["ssh-add", "-q", *keys], env=environment, check=True)
        yield str(path)
    finally:
        child.terminate()
        child.wait(HANG_S)
        child.stdout.close()


@pytest.mark.needs("sshd")
def test_a_dead_agent_is_no_obstacle(home, server, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home.folder / "nobody"))
    ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@pytest.mark.needs("sshd")
def test_a_silent_agent_is_no_obstacle_for_a_key_in_a_file(home, server, tmp_path):
    with scripted_agent(tmp_path / "agent") as path:
        home.configure(f"IdentityAgent {path}\nConnectTimeout 4\n")
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("is_there", [True, False], ids=["silent", "gone"])
def test_an_agent_that_is_out_of_order_is_named(is_there, home, server, tmp_path):
    silence = (
        scripted_agent(tmp_path / "agent") if is_there else contextlib.nullcontext()
    )
    with silence:
        path = tmp_path / "agent"
        home.config.write_text(
            f"UserKnownHostsFile {home.known_hosts}\nIdentityAgent {path}\nConnectTimeout 4\n"
        )
        error = refused(home.host(server), home, asking.NoAsker())
    why = "no answer within" if is_there else "No such file or directory"
    assert f"Tried: ssh agent {path} ({why}" in error.message
    assert f"SSH_AUTH_SOCK={path} ssh-add -l" in error.hint
    assert "ssh-copy-id" not in error.hint


@pytest.mark.needs("sshd")
def test_an_agent_that_never_signs_ends_with_the_time_to_connect(
    home, server, tmp_path, user_key, golden
):
    blob = base64.b64decode(Path(f"{user_key}.pub").read_text().split()[1])
    listed = join_strings(b"\x0c\0\0\0\1" + join_strings(blob, b"work"))
    since = Since()
    with scripted_agent(tmp_path / "agent", listed) as path:
        home.configure(f"IdentityAgent {path}\nConnectTimeout 6\n")
        error = refused(home.host(server), home, asking.NoAsker())
    golden(words(error, server))
    wait_until(lambda: not since.threads(""), "no thread waits for the agent")


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_other_kinds_of_keys(kind, home, tmp_path):
    key = make_key(home.folder / f"id_{kind}", kind)
    home.config.write_text("")  # the default files
    with sshd(tmp_path / "server", Path(f"{key}.pub")) as server:
        home.trust(server)
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@pytest.mark.needs("sshd")
def test_a_wrong_key_is_named(home, server, tmp_path, golden):
    other = make_key(tmp_path / "other")
    home.config.write_text(
        home.config.read_text().replace(str(home.key), str(other)) + "User me\n"
    )
    error = refused(home.host(server), home, asking.NoAsker())
    golden(words(error, server), error.hint.replace(str(server.port), "PORT"))


@pytest.mark.needs("sshd")
def test_keys_that_can_not_be_used_are_named_with_the_reason(
    home, server, tmp_path, golden
):
    readable, broken = make_key(tmp_path / "readable"), tmp_path / "broken"
    readable.chmod(0o644)
    broken.write_text("no key\n")
    broken.chmod(0o600)
    files = (readable, broken, tmp_path / "missing")
    home.config.write_text(
        "".join(f"IdentityFile {file}\n" for file in files)
        + f"UserKnownHostsFile {home.known_hosts}\n"
    )
    error = refused(home.host(server), home, asking.NoAsker())
    golden(words(error, server))


@pytest.mark.needs("sshd")
def test_no_key_at_all(home, server, golden):
    home.config.write_text(f"UserKnownHostsFile {home.known_hosts}\n")
    error = refused(home.host(server), home, Answers())
    golden(words(error, server))


# ---- public keys and certificates, against a real OpenSSH server


def configured(home: Home, *lines: str) -> None:
    """Name these keys in place of the usual one."""
    home.config.write_text(
        "\n".join(
            (*lines, "IdentitiesOnly yes", f"UserKnownHostsFile {home.known_hosts}\n")
        )
    )


@pytest.mark.needs("sshd")
def test_a_security_key_in_the_agent_is_no_obstacle(home, server, tmp_path, user_key):
    token = join_strings(b"sk-ssh-ed25519@openssh.com", b"k" * 32, b"ssh:")
    listed = b"\x0c\0\0\0\1" + join_strings(token, b"a token")
    answers = join_strings(listed), join_strings(b"\x05")  # it is not plugged in
    with scripted_agent(tmp_path / "agent", *answers) as path:
        configured(
            home,
            "IdentitiesOnly no",
            f"IdentityFile {user_key}",
            f"IdentityAgent {path}",
        )
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_public_key_stands_for_its_private_one_in_the_agent(
    mode, home, server, tmp_path, user_key, golden
):
    public = tmp_path / "work.pub"
    public.write_text(f"# of work\n\n{Path(f'{user_key}.pub').read_text()}")
    public.chmod(mode)
    others = [make_key(tmp_path / f"other{number}") for number in range(6)]
    with agent(tmp_path / "agent", *others, user_key) as path:
        configured(home, f"IdentityFile {public}", f"IdentityAgent {path}")
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()
    configured(home, f"IdentityFile {public}")
    error = refused(home.host(server), home, asking.NoAsker())
    golden(words(error, server))


@pytest.mark.needs("sshd")
@pytest.mark.parametrize(
    ("named", "only"), [("half.pub", "no"), ("half", "yes"), ("half", "no")]
)
def test_the_key_in_the_agent_whose_public_half_is_named_comes_first(
    named, only, home, server, tmp_path, user_key
):
    """The server hangs up after six keys. `half` has no file: there is only half.pub."""
    (tmp_path / "half.pub").write_bytes(Path(f"{user_key}.pub").read_bytes())
    others = [make_key(tmp_path / f"other{number}") for number in range(6)]
    with agent(tmp_path / "agent", *others, user_key) as path:
        home.config.write_text(
            f"IdentityFile {tmp_path / named}\nIdentitiesOnly {only}\nIdentityAgent {path}\n"
            f"UserKnownHostsFile {home.known_hosts}\n"
        )
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@pytest.mark.needs("sshd")
def test_an_encrypted_key_without_its_public_half_is_found_in_the_agent(
    home, locked, tmp_path
):
    server, key = locked
    plain = tmp_path / "plain"
    plain.write_bytes(key.read_bytes())
    plain.chmod(0o600)
    words = ["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", plain]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    Path(f"{key}.pub").unlink()
    with agent(tmp_path / "agent", plain) as path:
        configured(home, f"IdentityFile {key}", f"IdentityAgent {path}")
        ssh.connect(home.host(server), home.access, asking.NoAsker()).close()


@dataclass(frozen=True, kw_only=True)
class Signed:
    """A key that only its certificate, in a folder of its own, opens the server for."""

    server: Sshd
    key: Path
    certificate: Path


@pytest.fixture(params=["ed25519", "ecdsa", "rsa"])
def signed(
    request: pytest.FixtureRequest, home: Home, tmp_path: Path
) -> Iterator[Signed]:
    authority = make_key(tmp_path / "authority")
    key = make_key(tmp_path / "key", request.param)
    words = ("ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", getpass.getuser())
    subprocess.run([*words, "-V", "+1d", f"{key}.pub"], check=True)
    certificate = tmp_path / "today.crt"
    Path(f"{key}-cert.pub").rename(certificate)
    options = (f"TrustedUserCAKeys {authority}.pub",)
    with sshd(tmp_path / "server", options=options) as server:
        home.trust(server)
        yield Signed(server=server, key=key, certificate=certificate)


@pytest.mark.needs("sshd")
def test_certificates_are_offered_wherever_key_and_certificate_are(
    home, signed, tmp_path
):
    key, certificate = signed.key, signed.certificate

    def log_in(*lines: str) -> None:
        configured(home, *lines)
        ssh.connect(home.host(signed.server), home.access, asking.NoAsker()).close()

    log_in(f"IdentityFile {key}", f"CertificateFile {certificate}")
    with agent(tmp_path / "agent", key) as path:
        of_agent = f"IdentityAgent {path}"
        log_in(f"IdentityFile {key}.pub", of_agent, f"CertificateFile {certificate}")
        log_in("IdentitiesOnly no", of_agent, f"CertificateFile {certificate}")
        beside = Path(f"{key}-cert.pub")
        certificate.rename(beside)
        hidden = key.rename(tmp_path / "hidden")
        log_in(f"IdentityFile {key}", of_agent)
    hidden.rename(key)
    log_in(f"IdentityFile {key}")
    with agent(tmp_path / "agent", key) as path:  # which takes the certificate along
        log_in("IdentitiesOnly no", f"IdentityAgent {path}")


@pytest.mark.needs("sshd")
def test_a_certificate_that_is_of_no_use_is_named_and_no_obstacle(
    home, server, tmp_path, user_key, signed
):
    other = make_key(tmp_path / "other")
    broken = Path(f"{other}-cert.pub")
    broken.write_text("ssh-rsa-cert-v01@openssh.com AAAA\n")
    configured(home, f"IdentityFile {other}", f"IdentityFile {user_key}")
    ssh.connect(home.host(server), home.access, asking.NoAsker()).close()
    configured(
        home,
        f"IdentityFile {other}",
        f"CertificateFile {broken}",
        f"CertificateFile {signed.certificate}",
    )
    message = refused(home.host(server), home, asking.NoAsker()).message
    assert f"certificate {broken} (the file has none)" in message
    assert f"certificate {signed.certificate} (there is no private key" in message


def test_a_key_of_a_token_is_named(home, tmp_path):
    """As ssh-keygen writes it: what is in the file is no private key, but where the token has it."""
    half = join_strings(b"sk-ssh-ed25519@openssh.com", b"k" * 32, b"ssh:")
    inside = b"openssh-key-v1\0" + join_strings(b"none", b"none", b"") + b"\0\0\0\1"
    body = base64.b64encode(inside + join_strings(half, b"handle" * 20)).decode()
    token = tmp_path / "id_ed25519_sk"
    armour = "OPENSSH PRIVATE KEY-----"
    token.write_text(f"-----BEGIN {armour}\n{body}\n-----END {armour}\n")
    token.chmod(0o600)
    configured(home, f"IdentityFile {token}", "BatchMode yes")
    with asking_host(home, tmp_path, "publickey") as host:
        error = refused(host, home, asking.NoAsker())
    assert f"key {token} (a security key: run ssh-add {token})" in error.message

"""A home with a key, and servers that let its owner in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distmagic.request.access import Access
from distmagic.request.hosts import Host
from tests.transports.sshd import Sshd, make_key, sshd


@dataclass(slots=True)
class Answers:
    """An asker with prepared answers; `prompts` is what it was asked."""

    answers: list[str] = field(default_factory=list)
    prompts: list[tuple[str, bool]] = field(default_factory=list)

    def ask(self, prompt: str, *, secret: bool) -> str:
        self.prompts.append((prompt, secret))
        return self.answers.pop(0)


@dataclass(slots=True, kw_only=True)
class Home:
    """The user's ~/.ssh: a key, known_hosts, and a configuration to which tests add blocks."""

    folder: Path
    key: Path
    known_hosts: Path
    config: Path

    def trust(self, server: Sshd, name: str = "") -> None:
        with self.known_hosts.open("a") as file:
            file.write(server.known_hosts_line(name))

    def configure(self, text: str) -> Access:
        with self.config.open("a") as file:
            file.write(text)
        return self.access

    @property
    def access(self) -> Access:
        return Access(ssh_config=str(self.config), connect_timeout_s=60)

    def host(self, server: Sshd) -> Host:
        return Host(name="127.0.0.1", port=server.port)


@pytest.fixture(scope="session")
def user_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "id_ed25519")


@pytest.fixture
def home(tmp_path: Path, user_key: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Home(
        folder=folder,
        key=user_key,
        known_hosts=folder / "known_hosts",
        config=folder / "config",
    )
    made.config.write_text(
        f"IdentityFile {user_key}\nUserKnownHostsFile {made.known_hosts}\nGlobalKnownHostsFile none\n"
    )
    return made


@pytest.fixture(scope="session")
def session_server(
    tmp_path_factory: pytest.TempPathFactory, user_key: Path
) -> Iterator[Sshd]:
    options = ("MaxSessions 40",)
    with sshd(
        tmp_path_factory.mktemp("sshd"), Path(f"{user_key}.pub"), options=options
    ) as server:
        yield server


@pytest.fixture
def server(session_server: Sshd, home: Home) -> Sshd:
    """A server whose key is known and which lets the user in."""
    home.trust(session_server)
    return session_server


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    """What is entered or called back here is closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield stack

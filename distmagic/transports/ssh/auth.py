"""Logs in: offers keys and answers, in which order. Knows nothing of paramiko.

Order: none (to learn what is accepted), then of the accepted methods publickey, keyboard-interactive, password. Keys:
the agent's that the configuration names, the agent's others, key files, encrypted key files (asked for once).
After a partial success the server's next list of methods is worked through in the same way.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distmagic.errors import AuthenticationError
from distmagic.transports import asking, troubles
from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.client import (
    AuthAnswer,
    SshKey,
    SshSession,
    UnusableKey,
    WrongPassphrase,
    agent_key,
    load_key,
)
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.ssh.known_hosts import read_public_key

_METHODS = ("publickey", "keyboard-interactive", "password")
_MAX_STEPS = 4  # factors that one log-in may take


@dataclass(slots=True, kw_only=True)
class LogIn:
    """One log-in. `name` is the host that asks, in prompts. `run` raises `Trouble` or the asker's error."""

    session: SshSession
    resolved: Resolved
    name: str
    asker: asking.Asker
    agent: KeyAgent
    deadline: Deadline
    tried: list[str] = field(default_factory=list)
    offered: set[bytes] = field(default_factory=set)

    def run(self) -> None:
        """Return once the server has let us in."""
        self.session.log_in_as(self.resolved.user)
        answer = self.session.methods()
        accepts: tuple[str, ...] = answer.methods or ()
        for _ in range(_MAX_STEPS):
            if answer.accepted:
                return
            accepts = answer.methods or accepts
            answer = self._step(accepts)
            if not answer.partial:
                break
        if not answer.accepted:
            raise self._refusal(accepts)

    def _refusal(self, accepts: tuple[str, ...]) -> troubles.Trouble:
        resolved = self.resolved
        port = f"-p {resolved.port} " if resolved.port != 22 else ""
        login = f"{port}{resolved.user}@{resolved.name}"
        return troubles.not_accepted(
            self.session.where,
            resolved.user,
            login,
            tuple(self.tried),
            accepts,
            str(self.agent.path) if self.agent.trouble else "",
        )

    def _step(self, accepts: tuple[str, ...]) -> AuthAnswer:
        """Try the accepted methods until one gets further."""
        answer = AuthAnswer(accepted=False)
        for method in _METHODS:
            if method in accepts:
                answer = _TRY[method](self)
                if answer.accepted or answer.partial:
                    break
        return answer

    # ---- keys

    def try_keys(self) -> AuthAnswer:
        """Offer keys until one is taken."""
        agent = self.agent
        try:
            # Where it is silent, the other half is left for keys in files.
            listed = agent.keys(self.deadline.remaining() / 2)
            if agent.trouble:
                self.tried.append(f"ssh agent {agent.path} ({agent.trouble})")
            for key in self._keys(
                tuple(agent_key(agent, blob, comment) for blob, comment in listed)
            ):
                self.offered.add(key.blob)
                answer = self.session.offer_key(key)
                if answer.accepted or answer.partial:
                    return answer
                self.tried.append(key.label)
        finally:
            agent.close()
        return AuthAnswer(accepted=False)

    def _keys(self, in_agent: tuple[SshKey, ...]) -> Iterator[SshKey]:
        """Yield the keys that were not offered yet: the agent's, then those in files; encrypted files last."""
        # Before any key is offered: what is wrong with a file comes first in the list of what was tried.
        files = [file for file in self.resolved.identity_files if self._is_usable(file)]
        configured = {
            read_public_key(f"{file}.pub") for file in self.resolved.identity_files
        }
        of_agent = [key for key in in_agent if key.blob in configured]
        if not self.resolved.identities_only:
            of_agent += [key for key in in_agent if key.blob not in configured]
        for key in of_agent:
            if key.blob not in self.offered:
                yield key
        yield from self._keys_in(files)

    def _keys_in(self, files: list[str]) -> Iterator[SshKey]:
        encrypted = []  # asked for after all others, so that the user types a passphrase only where it is needed
        for file in files:
            if read_public_key(f"{file}.pub") in self.offered:
                continue
            try:
                key = load_key(file, None)
            except WrongPassphrase:
                encrypted.append(file)
            except UnusableKey as error:
                self.tried.append(f"key {file} ({error})")
            else:
                if key.blob not in self.offered:
                    yield key
        for file in encrypted:
            if (unlocked := self._unlock(file)) is not None:
                yield unlocked

    def _is_usable(self, file: str) -> bool:
        """Whether a key file is there and private; if not, note why."""
        try:
            mode = Path(file).stat()
        except OSError as error:
            if not self.resolved.default_keys:
                self.tried.append(f"key {file} ({error.strerror})")
            return False
        if mode.st_uid == os.getuid() and stat.S_IMODE(mode.st_mode) & 0o077:
            self.tried.append(
                f"key {file} (not used, others can read it: run chmod 600 {file})"
            )
            return False
        return True

    def _unlock(self, file: str) -> SshKey | None:
        def load(passphrase: str) -> SshKey | None:
            try:
                return load_key(file, passphrase)
            except WrongPassphrase:
                return None

        if self.resolved.batch_mode:
            self.tried.append(f"key {file} (encrypted, and BatchMode forbids to ask)")
            return None
        with self._asking():
            key = asking.unlock(self.asker, self.name, file, load)
        if key is None:
            self.tried.append(f"key {file} (wrong passphrase)")
        return key

    # ---- answers

    def answer_questions(self) -> AuthAnswer:
        """Let the user answer what the server asks: passwords, one-time passwords."""
        asked = 0

        def handler(
            title: str, instructions: str, questions: list[tuple[str, bool]]
        ) -> list[str]:
            nonlocal asked
            asked += len(questions)
            lead = " ".join(
                part.strip() for part in (title, instructions) if part.strip()
            )
            return [
                self._ask(f"{lead} {text}".strip(), secret=not shown)
                for text, shown in questions
            ]

        return self._repeat(
            "keyboard-interactive",
            lambda: self.session.answer_questions(handler),
            lambda: asked,
        )

    def offer_password(self) -> AuthAnswer:
        """Ask the user for a password."""
        asked = 0

        def offer() -> AuthAnswer:
            nonlocal asked
            asked += 1
            return self.session.offer_password(
                self._ask(f"Password of {self.resolved.user}:", secret=True)
            )

        return self._repeat("password", offer, lambda: asked)

    def _repeat(
        self, method: str, attempt: Callable[[], AuthAnswer], asked: Callable[[], int]
    ) -> AuthAnswer:
        """Let the user try again after a wrong answer, unless nothing was asked."""
        if self.resolved.batch_mode:
            self.tried.append(f"{method} (BatchMode forbids to ask)")
            return AuthAnswer(accepted=False)
        answer = AuthAnswer(accepted=False)
        for _ in range(asking.ATTEMPTS):
            before = asked()
            answer = attempt()
            if answer.accepted or answer.partial or asked() == before:
                break
        if not (answer.accepted or answer.partial):
            self.tried.append(method)
        return answer

    def _ask(self, question: str, *, secret: bool) -> str:
        with self._asking():
            return asking.ask(self.asker, self.name, question, secret=secret)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Stop the clock while the user types. If no answer can be had, the error also says what was tried before."""
        try:
            with self.deadline.paused():
                yield
        except AuthenticationError as error:
            if not self.tried:
                raise
            text = error.message.removeprefix(f"{error.host}: ")
            raise AuthenticationError(
                error.host, f"{text} Tried before: {'; '.join(self.tried)}.", error.hint
            ) from None


_TRY: dict[str, Callable[[LogIn], AuthAnswer]] = {
    "publickey": LogIn.try_keys,
    "keyboard-interactive": LogIn.answer_questions,
    "password": LogIn.offer_password,
}

"""Logs in: offers keys and answers, in the right order. Does not use paramiko.

Order: none (to learn what is accepted), then of the accepted methods publickey,
keyboard-interactive, password. Keys: the agent's that the configuration names, the agent's others,
key files, encrypted key files (asked for once). After a partial success the server's next list of
methods is worked through in the same way.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distmagic.errors import AuthenticationError
from distmagic.transports import asking, troubles
from distmagic.transports.ssh.agent import KeyAgent
from distmagic.transports.ssh.client import (
    MethodsLeft,
    SshKey,
    SshSession,
    UnusableKey,
    agent_key,
    certified,
    load_key,
)
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.ssh.public_keys import (
    is_security_key,
    read_certificate,
    read_public_half,
    read_public_key,
)

_MAX_STEPS = 4  # limit of factors in one log-in


@dataclass(kw_only=True)
class LogIn:
    """One log-in; prompts name the host. `run` raises `Trouble` or the asker's error."""

    session: SshSession
    resolved: Resolved
    asker: asking.Asker
    agent: KeyAgent
    deadline: Deadline
    tried: list[str] = field(default_factory=list)
    offered: set[bytes] = field(default_factory=set)
    asked: int = 0

    def run(self) -> None:
        """Return once the server has accepted the log-in."""
        left = self.session.methods()
        accepts: tuple[str, ...] = ()
        for _ in range(_MAX_STEPS):
            if not left:
                break
            # Try the accepted methods, until one makes progress.
            accepts, left = left, None
            for method, attempt in _METHODS.items():
                is_accepted = method in accepts and method not in self.resolved.refused
                if left is None and is_accepted:
                    left = attempt(self)
        if left != ():
            raise troubles.not_accepted(
                self.session.where,
                self.resolved.user,
                tuple(self.tried),
                accepts,
                str(self.agent.path) if self.agent.trouble else "",
            )

    # ---- keys

    def try_keys(self) -> MethodsLeft:
        """Offer keys until one is accepted."""
        try:
            for key in self._keys():
                if key.blob in self.offered:
                    continue
                self.offered.add(key.blob)
                left = self.session.offer_key(key)
                if left is not None:
                    return left
                self.tried.append(key.label)
        finally:
            self.agent.close()
        return None

    def _keys(self) -> Iterator[SshKey]:
        """Yield each key and its certificates: those of CertificateFile before it, those next to
        its file after it.
        """
        agent, resolved = self.agent, self.resolved
        # If the agent is silent, half of the time is left for key files.
        remaining_s = self.deadline.remaining()
        try:
            listed = agent.keys(remaining_s / 2)
        except OSError as error:
            where = self.session.where
            raise troubles.of_socket(where, error, remaining_s) from None
        if agent.trouble:
            self.tried.append(f"ssh agent {agent.path} ({agent.trouble})")
        of_agent = [agent_key(agent, blob, comment) for blob, comment in listed]
        beside = [f"{file}-cert" for file in resolved.identity_files]
        certificates = []
        for file in resolved.certificate_files or beside:
            if (certificate := read_certificate(file)) is not None:
                certificates.append(certificate)
            elif resolved.certificate_files:
                self.tried.append(f"certificate {file} (the file has none)")
        wanted = set()
        if resolved.certificate_files:
            wanted = {certificate.plain for certificate in certificates}
        signed = set()
        for key in self._private_keys(of_agent, wanted):
            signed.add(key.blob)
            its_own = [certified(key, c) for c in certificates if c.plain == key.blob]
            yield from (*its_own, key) if wanted else (key, *its_own)
        for certificate in certificates:
            if certificate.plain in wanted - signed:
                self.tried.append(
                    f"certificate {certificate.file} (there is no private key for it)"
                )

    def _private_keys(
        self, of_agent: list[SshKey], wanted: set[bytes]
    ) -> Iterator[SshKey]:
        """Yield keys: those in `wanted` first, the agent's before those in files; encrypted files
        last.
        """
        resolved = self.resolved
        halves = {file: read_public_half(file) for file in resolved.identity_files}
        configured = set(halves.values())
        if resolved.identities_only:
            of_agent = [key for key in of_agent if key.blob in configured]
        in_agent = {key.blob for key in of_agent}
        # Before any key is offered: errors of files come first in the list of attempts.
        files = [
            file
            for file, half in halves.items()
            if half not in in_agent and self._is_usable(file, half)
        ]
        of_agent.sort(key=lambda key: key.blob not in configured)
        encrypted: list[str] = []  # the user enters a passphrase only if it is needed
        for are_wanted in (True, False):
            for key in of_agent:
                if (key.blob in wanted) is are_wanted:
                    yield key
            for file in files:
                if (halves[file] in wanted) is are_wanted:
                    yield from self._key_in(file, encrypted)
        for file in encrypted:
            if halves[file] not in self.offered:
                yield from self._unlock(file)

    def _key_in(self, file: str, encrypted: list[str]) -> Iterator[SshKey]:
        try:
            key = load_key(file, None)
        except UnusableKey as error:
            self.tried.append(f"key {file} ({error})")
        else:
            if key is None:
                encrypted.append(file)
            else:
                yield key

    def _is_usable(self, file: str, half: bytes | None) -> bool:
        """Whether a file has a private key with safe permissions; if not, record why.

        `half` is its public half.
        """
        try:
            status = Path(file).stat()
        except OSError as error:
            if not self.resolved.default_keys:
                self.tried.append(f"key {file} ({error.strerror})")
            return False
        why = ""
        if read_public_key(file) is not None:
            why = "a public key, whose private key is not in the ssh agent"
        elif half is not None and is_security_key(half):
            why = f"a security key: run ssh-add {file}"
        elif status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
            why = f"not used, others can read it: run chmod 600 {file}"
        if why:
            self.tried.append(f"key {file} ({why})")
        return not why

    def _unlock(self, file: str) -> Iterator[SshKey]:
        if self.resolved.batch_mode:
            self.tried.append(f"key {file} (encrypted, and BatchMode forbids to ask)")
            return
        with self._asking():
            load = partial(load_key, file)
            key = asking.unlock(self.asker, self.resolved.name, file, load)
        if key is None:
            self.tried.append(f"key {file} (wrong passphrase)")
        else:
            yield key

    # ---- answers

    def answer_questions(self) -> MethodsLeft:
        """Let the user answer the server's questions: passwords, one-time passwords."""
        return self._repeat(
            "keyboard-interactive",
            lambda: self.session.answer_questions(
                lambda question, shown: self._ask(question, secret=not shown)
            ),
        )

    def offer_password(self) -> MethodsLeft:
        """Ask the user for a password."""
        question = f"Password of {self.resolved.user}:"
        return self._repeat(
            "password",
            lambda: self.session.offer_password(self._ask(question, secret=True)),
        )

    def _repeat(self, method: str, attempt: Callable[[], MethodsLeft]) -> MethodsLeft:
        """Let the user try again after a wrong answer, unless nothing was asked."""
        if self.resolved.batch_mode:
            self.tried.append(f"{method} (BatchMode forbids to ask)")
            return None
        for _ in range(asking.ATTEMPTS):
            before = self.asked
            left = attempt()
            if left is not None:
                return left
            if self.asked == before:
                break
        self.tried.append(method)
        return None

    def _ask(self, question: str, *, secret: bool) -> str:
        self.asked += 1
        with self._asking():
            return asking.ask(self.asker, self.resolved.name, question, secret=secret)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Pause the deadline while the user types.

        If no answer is possible, the error also lists what was tried before.
        """
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


_METHODS: dict[str, Callable[[LogIn], MethodsLeft]] = {
    "publickey": LogIn.try_keys,
    "keyboard-interactive": LogIn.answer_questions,
    "password": LogIn.offer_password,
}

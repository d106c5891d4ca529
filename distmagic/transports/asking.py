"""Questions to the user: passphrases of keys, passwords, one-time passwords.

One question at a time.

Every line of a prompt starts with the host: "gpu-a: Verification code: ". The user enters a
passphrase once per key file and kernel; it is only kept in this process's memory. Passwords and
one-time passwords are never kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from distmagic import sanitize
from distmagic.errors import AuthenticationError

ATTEMPTS = 3
_QUESTION_CHARS = 500
Key = TypeVar("Key")

_one_at_a_time = threading.RLock()
_passphrases: dict[str, str] = {}


class Asker(Protocol):
    """A way to ask the user. Called from any thread, never from two at once."""

    def ask(self, prompt: str, *, secret: bool) -> str:
        """Return the answer, and block until it is typed; `secret`: don't echo the input.

        Raises `AuthenticationError` if no user can answer.
        """


class NoAsker:
    """An asker for headless runs, which have no user."""

    def ask(self, prompt: str, *, secret: bool) -> str:  # noqa: ARG002 - the signature of all askers
        """Raise `AuthenticationError` with the question and the host."""
        host, _, question = prompt.partition(": ")
        raise AuthenticationError(
            host,
            f"asks {question.strip()!r}, and nobody can answer.",
            "Load the key in your ssh agent (ssh-add), or run this in a notebook, in a cell without --background, where you can answer.",
        )


def ask(asker: Asker, host: str, question: str, *, secret: bool = True) -> str:
    """Ask the user a question that `host` has sent, and return the answer; `secret`: don't echo the
    input.

    Waits until no other thread asks a question. Raises the errors of `asker`.
    """
    with _one_at_a_time:
        # The server chose the text. Each line starts with the server's host, so it can't look like
        # another host's question.
        words = sanitize.lines(question)[:_QUESTION_CHARS].strip() or "Answer:"
        named = "\n".join(f"{host}: {line}" for line in words.split("\n"))
        return asker.ask(f"{named} ", secret=secret)


def unlock(
    asker: Asker, host: str, key_file: str, load: Callable[[str], Key | None]
) -> Key | None:
    """Ask the user for the passphrase of a key file, and return the key; None after `ATTEMPTS`
    wrong answers.

    `load` returns the key for a passphrase, None for a wrong one. A passphrase that was correct
    before is tried first, without a question. Raises the errors of `asker`.
    """
    with _one_at_a_time:
        kept = _passphrases.get(key_file)
        key = load(kept) if kept is not None else None
        for attempt in range(ATTEMPTS):
            if key is not None:
                break
            again = "That was not it. " if attempt else ""
            answer = asker.ask(
                f"{host}: {again}Passphrase of {key_file}: ", secret=True
            )
            key = load(answer)
            if key is not None:
                _passphrases[key_file] = answer
        return key

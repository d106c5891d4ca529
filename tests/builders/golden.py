"""Golden messages: what a test has users read, word for word, in tests/golden/messages, a file a package.

An entry is the test with its parameters, which is what was provoked, and below it each text that the test compared.
`--renew-golden` writes the entries of all tests that run; the diff is what is read then.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests import REPOSITORY

MESSAGES = REPOSITORY / "tests" / "golden" / "messages"
E = TypeVar("E", bound=BaseException)
# {each test that was collected: whether it asks for the fixture `golden`}
COLLECTED = pytest.StashKey[dict[str, bool]]()
_BETWEEN = "\n---\n"
# What is another one in each run.
_VARYING = (
    (r"\b\d{4}-\d{6}-[0-9a-f]{8}\b", "JOB"),
    (r"\b[0-9a-f]{64}\b", "SHA256"),
    (r"\(pid \d+\)", "(pid N)"),
    (r"\b(ports?) 2(?!9500)\d{4}\b", r"\1 PORT"),  # at which nodes of a job meet
)


def page_of(entry: str) -> Path:
    """Return the file of an entry: of `unit/request/test_flags.py::test_x`, request.txt."""
    folders = Path(entry.partition("::")[0]).parent.parts
    return MESSAGES / f"{folders[:2][-1]}.txt"


def read(page: Path) -> dict[str, str]:
    """Return {entry: its texts} of a file, which need not be there."""
    entries = {}
    text = page.read_text().removesuffix("\n") if page.exists() else ""
    for block in re.split(r"\n(?=\S)", text):
        entry, _, texts = block.partition("\n")
        entries[entry] = re.sub(r"^    ", "", texts, flags=re.MULTILINE)
    entries.pop("", None)
    return entries


def renew(page: Path, entry: str, texts: str) -> None:
    """Write one entry, or remove it if it has no text; other workers of pytest-xdist write to the same file."""
    MESSAGES.mkdir(exist_ok=True)
    with page.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        entries = {**read(page), entry: texts}
        shown = [
            f"{name}\n{textwrap.indent(body, '    ')}"
            for name, body in sorted(entries.items())
            if body
        ]
        page.write_text("\n".join([*shown, ""]))


class Golden:
    """Compare errors and texts of one test with its entry, in the order of the calls."""

    def __init__(
        self, entry: str, known: str, temporary: Path, *, is_renewed: bool
    ) -> None:
        self._entry = entry
        self._known = known.split(_BETWEEN) if known else []
        self._temporary = temporary
        self._is_renewed = is_renewed
        self._said: list[str] = []
        self._has_passed = False

    def __call__(self, *said: object) -> None:
        """Compare the next text; an error is its class, its message and its hint, and several objects are as many lines."""
        text = "\n".join(self._normal(one) for one in said) or "(nothing)"
        known = self._known[len(self._said) : len(self._said) + 1]
        self._said.append(text)
        assert self._is_renewed or [text] == known, "make golden takes the new text"

    @contextlib.contextmanager
    def raises(self, kind: type[E]) -> Iterator[pytest.ExceptionInfo[E]]:
        """Expect an error of this class, and compare it."""
        with pytest.raises(kind) as caught:
            yield caught
        self(caught.value)

    def finish(self) -> None:
        """Look at the end of a test that passed whether the entry has more than was compared."""
        self._has_passed = True
        assert self._is_renewed or len(self._said) == len(self._known), "a stale text"

    def close(self) -> None:
        """Renew the entry, if that is asked for; what the test has done to files and processes is undone by now."""
        if self._is_renewed and self._has_passed:
            renew(page_of(self._entry), self._entry, _BETWEEN.join(self._said))

    def _normal(self, said: object) -> str:
        """Return it as a text without what is another one on each machine or in each run."""
        text = (
            f"{type(said).__name__}: {said}"
            if isinstance(said, BaseException)
            else str(said)
        )
        text = re.sub(rf"{re.escape(str(self._temporary))}/[\w.-]+", "TMP", text)
        text = text.replace(str(REPOSITORY), "REPOSITORY")
        for pattern, name in _VARYING:
            text = re.sub(pattern, name, text)
        return "".join(
            one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text
        )

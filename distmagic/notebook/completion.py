"""Tab completion of `%%distributed` and `%distributed`: flags, subcommands, names of hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from distmagic.request.flags import flag_names
from distmagic.request.hosts import SLOT_WORDS
from distmagic.request.spec import BACKENDS

SUBCOMMANDS = ("hosts", "playground", "jobs", "attach", "add", "stop", "logs", "stacks", "clean", "status", "down")
_VALUES = {"--nproc-per-node": SLOT_WORDS, "--rdzv-backend": BACKENDS, "--ssh-command": ("ssh",)}

HostNames = Callable[[], Iterable[str]]


class Event(Protocol):
    """What IPython's `complete_command` hook is called with: the line up to the cursor, and its last token."""

    text_until_cursor: str
    symbol: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completer:
    """Completes one line. `host_names` is called only where a host is being typed (it reads ~/.ssh/config)."""

    host_names: HostNames

    def cell(self, event: Event) -> list[str]:
        """Return candidates for the line of `%%distributed`."""
        flag = _open_flag(_words(event))
        if flag == "--hosts":
            return list(self.host_names())
        return list(_VALUES.get(flag, ())) or [*flag_names(), "-o"]

    def line(self, event: Event) -> list[str]:
        """Return candidates for `%distributed SUBCOMMAND ...`."""
        words = _words(event)
        if not words[1:]:
            return list(SUBCOMMANDS)
        if words[0] == "hosts" or (words[0] == "add" and len(words) > 2):
            return ["--hostfile"] if event.symbol.startswith("-") else list(self.host_names())
        return ["stop"] if words[0] == "playground" else []


def _words(event: Event) -> list[str]:
    """Return the words after the magic, the last being the one under the cursor ("" after a blank)."""
    text = event.text_until_cursor
    words = text.split()[1:]
    return [*words, ""] if text[-1:].isspace() else words


def _open_flag(words: list[str]) -> str:
    """Return the flag whose value is being typed: `--hosts gpu|`, `--hosts=gpu|`, or "" for none."""
    before, current = (words[:-1], words[-1]) if words else ([], "")
    flag, equals, _ = current.partition("=")
    if not equals:
        flag = before[-1] if before else ""
    return flag.replace("_", "-") if flag.startswith("--") else ""

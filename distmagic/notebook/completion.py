"""Tab completion of `%%distributed` and `%distributed`: flags, subcommands, names of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distmagic.notebook.commands import NAMES, SUBCOMMANDS, HostNames
from distmagic.request.flags import flag_names
from distmagic.request.hosts import SLOT_WORDS
from distmagic.request.spec import BACKENDS

_VALUES = {
    "--nproc-per-node": SLOT_WORDS,
    "--rdzv-backend": BACKENDS,
    "--ssh-command": ("ssh",),
}


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
        if flag in _VALUES:
            return list(_VALUES[flag])
        return [*flag_names(), "-o"]

    def line(self, event: Event) -> list[str]:
        """Return candidates for `%distributed SUBCOMMAND ...`."""
        words = _words(event)
        if len(words) < 2:
            return list(NAMES)
        for command in SUBCOMMANDS:
            if command.name == words[0]:
                return command.complete(words[1:], self.host_names)
        return []


def _words(event: Event) -> Sequence[str]:
    """Return the words after the magic, the last being the one under the cursor ("" after a blank)."""
    text = event.text_until_cursor
    words = text.split()[1:]
    return [*words, ""] if text[-1:].isspace() else words


def _open_flag(words: Sequence[str]) -> str:
    """Return the flag whose value is being typed: `--hosts gpu|`, `--hosts=gpu|`, or "" for none."""
    if not words:
        return ""
    flag, equals, _ = words[-1].partition("=")
    if not equals:
        flag = words[-2] if len(words) > 1 else ""
    if not flag.startswith("--"):
        return ""
    return flag.replace("_", "-")

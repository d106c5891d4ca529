"""Tab completion of `%%distributed` and `%distributed`: flags, subcommands, names of hosts and
jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from distmagic.notebook import help_pages, host_commands
from distmagic.notebook.commands import NAMES, SUBCOMMANDS, Subcommand
from distmagic.notebook.settings import MAGICS, RANKS
from distmagic.remote.frozen import frozen
from distmagic.request.flag_parser import flag_names
from distmagic.request.flag_table import NO_SYSTEM
from distmagic.request.hosts import SLOT_WORDS
from distmagic.request.spec import BACKENDS, ON_DISCONNECT
from distmagic.request.systems import systems, that_can


def _files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def _flags_of(command: Subcommand) -> list[str]:
    flags = [form.partition(" ")[0] for form in command.flags]
    return ["--hosts", *flags] if command.takes_way else flags


# Completions for the value of a flag, and for a position after a subcommand. Any other word of a
# subcommand is offered unchanged.
_OFFERED: Mapping[str, Callable[[Completer], Iterable[str]]] = {
    "--hosts": lambda names: names.hosts(),
    "--on": lambda _: (*(one.on for one in systems() if one.on), NO_SYSTEM),
    "--export": lambda _: [system.name for system in that_can("export")],
    "--requirements": lambda _: _files("*.txt"),
    "--lock": lambda _: _files("*.lock", "*.toml", "*.txt"),
    "--name": lambda _: (),
    "--nproc-per-node": lambda _: SLOT_WORDS,
    "--rdzv-backend": lambda _: BACKENDS,
    "--on-disconnect": lambda _: ON_DISCONNECT,
    "--ssh-command": lambda _: ("ssh",),
    "hosts": lambda names: names.hosts(),
    "host": lambda names: names.hosts(),
    "job": lambda names: names.jobs(),
    "ended": lambda names: ("all", *names.jobs()),
    "path": lambda _: _files("*"),
    "playground": lambda _: (*host_commands.VERBS, "stop", "--keep"),
    "program": lambda _: _files("*.py"),
    "down": lambda _: [f"--{one.takes_down}" for one in systems() if one.takes_down],
    "topic": lambda _: help_pages.topics(),
}


@frozen
class Completer:
    """Completes one line of the magics.

    `hosts` and `jobs` return the notebook's names. They are only called if needed, because host
    names are read from ~/.ssh/config. `jobs` are those that this kernel has started or listed,
    newest first.
    """

    hosts: Callable[[], Iterable[str]]
    jobs: Callable[[], Iterable[str]]

    def candidates(self, text: str) -> list[str] | None:
        """Return completions for the last word of `text`, the line up to the cursor; None for lines
        of other magics.
        """
        if not text.strip():
            return None
        magic, *words = text.split()
        if text[-1:].isspace():
            words.append("")
        is_magic = magic.startswith("%") and magic != f"%{RANKS}"
        if not words or not is_magic or magic.lstrip("%") not in (*MAGICS, RANKS):
            return None
        flag = _open_flag(words)
        if flag in _OFFERED:
            return list(_OFFERED[flag](self))
        if magic.startswith("%%"):
            return [*flag_names(), "-o"]
        return self._line(words)

    def _line(self, words: Sequence[str]) -> list[str]:
        if len(words) < 2:
            return list(NAMES)
        for command in SUBCOMMANDS:
            if command.name == words[0]:
                places = command.words.split()
                if len(words) <= len(places) + 1:
                    place = places[len(words) - 2]
                else:  # after the last one
                    place = places[-1] if command.words.endswith("...") else ""
                if command.flags and (not place or words[-1].startswith("-")):
                    return _flags_of(command)
                offer = _OFFERED.get(place.removesuffix("..."))
                if offer is not None:
                    return list(offer(self))
                return [place] if place else []
        return []


def _open_flag(words: Sequence[str]) -> str:
    """Return the flag whose value is being typed: `--hosts gpu|`, `--hosts=gpu|`, or "" for
    none.
    """
    flag, equals, _ = words[-1].partition("=")
    if not equals:
        flag = words[-2] if len(words) > 1 else ""
    return flag.replace("_", "-") if flag.startswith("--") else ""

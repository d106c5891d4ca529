"""Tab completion of `%%distributed` and `%distributed`: flags, subcommands, names of hosts and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmagic.notebook.commands import NAMES, SUBCOMMANDS, OfferedNames
from distmagic.request.flag_parser import flag_names
from distmagic.request.flag_table import NO_SYSTEM
from distmagic.request.hosts import SLOT_WORDS
from distmagic.request.spec import BACKENDS
from distmagic.request.systems import systems, that_can

# The second for notebooks in which another extension owns the first.
MAGICS = ("distributed", "distmagic")
_VALUES = {
    "--nproc-per-node": SLOT_WORDS,
    "--rdzv-backend": BACKENDS,
    "--ssh-command": ("ssh",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completer:
    """Completes one line of the magics."""

    names: OfferedNames

    def candidates(self, text: str) -> list[str] | None:
        """Return what may stand in place of the last word of `text`, the line up to the cursor; None: it is no line of ours."""
        if not text.strip():
            return None
        magic, *words = text.split()
        if text[-1:].isspace():
            words.append("")
        if not words or magic.lstrip("%") not in MAGICS:
            return None
        if magic.startswith("%%"):
            return self._cell(words)
        return self._line(words) if magic.startswith("%") else None

    def _cell(self, words: Sequence[str]) -> list[str]:
        flag = _open_flag(words)
        if flag == "--hosts":
            return list(self.names.hosts())
        if flag == "--on":
            return [*(one.on for one in systems() if one.on), NO_SYSTEM]
        if flag == "--export":
            return [system.name for system in that_can("export")]
        if flag in _VALUES:
            return list(_VALUES[flag])
        return [*flag_names(), "-o"]

    def _line(self, words: Sequence[str]) -> list[str]:
        if len(words) < 2:
            return list(NAMES)
        for command in SUBCOMMANDS:
            if command.name == words[0]:
                return command.complete(words[1:], self.names)
        return []


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

"""Which files of a folder stay here: what `.gitignore` and `.distmagicignore` name, and what is never of use on a host.

Both files have git's syntax and count for their own folder and below. Those of deeper folders count more, the last line
that fits decides, and `.distmagicignore` comes after `.gitignore`: `!data/` in it brings back what git ignores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

_NAMES = (".gitignore", ".distmagicignore")
_NEVER = {
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that count in one folder: those of all ignore files from the top down, each with its own folder."""

    specs: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    def below(self, folder: Path) -> Rules:
        """Return the rules that count in `folder`: these, and those of its own ignore files."""
        found = []
        for name in _NAMES:
            try:
                text = (folder / name).read_text(
                    encoding="utf-8", errors="surrogateescape"
                )
            except (FileNotFoundError, IsADirectoryError):
                continue
            found.append((f"{folder}/", GitIgnoreSpec.from_lines(text.splitlines())))
        return Rules((*self.specs, *found)) if found else self

    def ignore(self, path: str, *, is_folder: bool) -> bool:
        """Whether a file or folder stays here; `path` is absolute."""
        if path.rpartition("/")[2] in _NEVER:
            return True
        for folder, spec in reversed(self.specs):
            decision = spec.check_file(
                path[len(folder) :] + ("/" if is_folder else "")
            ).include
            if decision is not None:
                return decision
        return False


def rules_above(folder: Path) -> Rules:
    """Return the rules that count for a folder because it lies in a git repository; not those that ignore the folder itself."""
    above = []
    for parent in folder.parents:
        if (folder / ".git").exists():
            break
        above.append(parent)
        if (parent / ".git").exists():
            break
    else:
        return Rules()  # no repository
    rules = Rules()
    for parent in reversed(above):
        rules = rules.below(parent)
    return Rules() if rules.ignore(str(folder), is_folder=True) else rules

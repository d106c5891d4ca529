"""Decides which files of a folder are not sent: those in `.gitignore` and `.distmagicignore`, and
files useless on hosts.

Both files have git's syntax and apply to their own folder and below. Files in deeper folders take
precedence, the last matching line decides, and `.distmagicignore` comes after `.gitignore`:
`!data/` in it sends a folder that git ignores.
"""

from __future__ import annotations

import re
from contextlib import suppress
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


@dataclass(frozen=True)
class Rules:
    """The rules for one folder: those of all ignore files from the top down, each with its path."""

    specs: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    def below(self, folder: Path) -> Rules:
        """Return the rules for the subfolder `folder`: these, and those of its own ignore files."""
        found = []
        for name in _NAMES:
            try:
                text = (folder / name).read_text(
                    encoding="utf-8", errors="surrogateescape"
                )
            except (FileNotFoundError, IsADirectoryError):
                continue
            found.append((f"{folder}/{name}", _spec(text)))
        return Rules((*self.specs, *found)) if found else self

    def ignored_by(self, path: str, *, is_folder: bool) -> str:
        """Return the path of the ignore file that excludes a file or folder, "" if it is sent.

        `path` is absolute. A file that is useless on hosts is excluded by its own path.
        """
        if path.rpartition("/")[2] in _NEVER:
            return path
        for file, spec in reversed(self.specs):
            inner = path[file.rindex("/") + 1 :]
            decision = spec.check_file(inner + ("/" if is_folder else "")).include
            if decision is not None:
                return file if decision else ""
        return ""


def _spec(text: str) -> GitIgnoreSpec:
    """Return the rules of an ignore file. An invalid line, such as `[z-a]`, is dropped."""
    valid = []
    for line in text.splitlines():
        with suppress(ValueError, re.error):
            GitIgnoreSpec.from_lines([line])
            valid.append(line)
    return GitIgnoreSpec.from_lines(valid)


def rules_above(folder: Path) -> Rules:
    """Return the rules for a folder from the git repository around it, except rules that ignore the
    folder itself.
    """
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
    return Rules() if rules.ignored_by(str(folder), is_folder=True) else rules


def line_that_sends(path: Path, folder: Path) -> tuple[str, Path] | None:
    """Return a line, and the .distmagicignore to add it to, which sends a file or folder that
    .gitignore excludes.

    It also sends the file's parent folder, if that is below the .distmagicignore; other files in it
    stay excluded by the same rule. None for a file that .gitignore doesn't exclude.
    """
    if not path.is_relative_to(folder):
        return None
    rules = rules_above(folder)
    here = folder
    for part in path.relative_to(folder).parts:
        rules = rules.below(here)
        here /= part
        kept_by = Path(rules.ignored_by(str(here), is_folder=here != path))
        if kept_by.name == ".gitignore":
            place = kept_by.parent if kept_by.is_relative_to(folder) else folder
            sent = path.parent if here == path != place / path.name else here
            end = "" if sent == path else "/"
            return f"!/{sent.relative_to(place)}{end}", place / ".distmagicignore"
        if kept_by != Path():
            return None
    return None

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


@dataclass(frozen=True)
class Rules:
    """The rules that count in one folder: those of all ignore files from the top down, each with its path."""

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
            spec = GitIgnoreSpec.from_lines(text.splitlines())
            found.append((f"{folder}/{name}", spec))
        return Rules((*self.specs, *found)) if found else self

    def ignored_by(self, path: str, *, is_folder: bool) -> str:
        """Return the path of the ignore file that keeps a file or folder here, "" for what travels.

        `path` is absolute. What is never of use on a host is kept here by itself.
        """
        if path.rpartition("/")[2] in _NEVER:
            return path
        for file, spec in reversed(self.specs):
            inner = path[file.rindex("/") + 1 :]
            decision = spec.check_file(inner + ("/" if is_folder else "")).include
            if decision is not None:
                return file if decision else ""
        return ""


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
    return Rules() if rules.ignored_by(str(folder), is_folder=True) else rules


def line_that_sends(path: Path, folder: Path) -> tuple[str, Path] | None:
    """Return a line, and the .distmagicignore that it belongs in, which sends what .gitignore keeps here of a folder.

    It sends the folder of the file, too, where that is below the .distmagicignore: its other files are kept here by the
    same rule. None for a file that .gitignore doesn't keep here.
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

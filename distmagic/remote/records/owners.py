"""For whom a folder is kept that several may use: a file in it has a line for each owner. What an owner is: names.py."""

from __future__ import annotations

from pathlib import Path

_FILE = "owners"
# Scripts are an owner a process. With so many it is nobody's own, and who else comes changes nothing.
_AT_MOST = 20


def note(folder: Path, owner: str) -> None:
    """Note that an owner, too, uses a folder, which is there. Raises OSError."""
    known = of(folder)
    if owner and owner not in known and len(known) < _AT_MOST:
        with open(folder / _FILE, "a", encoding="utf-8") as file:
            file.write(f"{owner}\n")


def of(folder: Path) -> tuple[str, ...]:
    """Return all that use a folder, in the order in which they came; none where that can't be read."""
    try:
        text = (folder / _FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ()
    # One line a process: two that came at once may both be the first.
    return tuple(dict.fromkeys(text.splitlines()))

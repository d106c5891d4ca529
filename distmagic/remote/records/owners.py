"""The owners of a shared folder: a file in it has one line for each owner. names.py defines
owners.
"""

from __future__ import annotations

from pathlib import Path

_FILE = "owners"
# Scripts are one owner for each process. With this many owners a folder belongs to none, and
# further ones change nothing.
_AT_MOST = 20


def note(folder: Path, owner: str) -> None:
    """Record that an owner also uses an existing folder. Raises OSError."""
    known = of(folder)
    if owner and owner not in known and len(known) < _AT_MOST:
        with open(folder / _FILE, "a", encoding="utf-8") as file:
            file.write(f"{owner}\n")


def of(folder: Path) -> tuple[str, ...]:
    """Return the owners of a folder, in the order in which they came; none if unreadable."""
    try:
        text = (folder / _FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ()
    # One line for each process: two that came at once may both be the first.
    return tuple(dict.fromkeys(text.splitlines()))

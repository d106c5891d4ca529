"""Checks how the manual is written, as far as a program can: `python -m tests.prose`, part of `make lint`.

The rules are in CONTRIBUTING.md, under "How we write to users". Measurements (benchmarks.md) are no prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from tests import REPOSITORY

README = REPOSITORY / "README.md"
_HELP = sorted((REPOSITORY / "distmagic" / "help").glob("*.md"))
PAGES = [README, *(page for page in _HELP if page.stem != "benchmarks")]
MOST_WORDS = 25  # of a sentence
MOST_OF_CELL = 15  # of a table's cell; the promises in README are longer, and separated by semicolons
_CODE = re.compile(r"^```.*?^```|^    .*?$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])\*{0,2} +")
_WORD = re.compile(r"[A-Za-z0-9]\S*")
_START = re.compile(r"(?:Of|Where|What|Neither|Nor|Who)\b.*[^?]$")
_ODD = {
    "anew": "again, or new",
    "in place of": "instead of",
    "but for": "except",
    "beside": "next to",
    "for ever": "forever",
    "begun": "started",
    "told": "reported, shown",
    "tells?": "reports, shows",
    "says?": "prints, reports, shows",
    "here": "the place: on this machine, in the notebook",
    r"there(?!'s| is| are| was| were| must)": "the place: on the host",
}


def _blocks(text: str) -> Iterator[str]:
    """Return paragraphs, items of lists and cells, each on one line, with code and links as plain words."""
    text = _CODE.sub("\n", text)
    text = _LINK.sub(r"\1", _INLINE.sub("CODE", text))
    text = re.sub(r"\n(?=[-*] |\d+\. |\||#)", "\n\n", text)
    for block in text.split("\n\n"):
        yield " ".join(block.split())


def faults(text: str, *, with_cells: bool = True) -> Iterator[str]:
    """Return what breaks a rule, each with the sentence or cell."""
    for number, block in enumerate(_blocks(text)):
        is_row = block.startswith("|")
        if block.startswith(("<", "#")):
            continue
        parts = block.strip("|").split("|") if is_row else _END.split(block)
        most = MOST_OF_CELL if is_row else MOST_WORDS
        for part in map(str.strip, parts):
            count = len(_WORD.findall(part))
            if count > most and (with_cells or not is_row):
                yield f"{count} words, and {most} are the most: {part}"
            is_summary = number == 1  # of the page: a question
            if not is_row and not is_summary and _START.match(part):
                yield f"begin with the subject: {part}"
            for word, better in _ODD.items():
                if re.search(rf"\b(?:{word})\b", part, re.IGNORECASE):
                    yield f"{word.partition('(')[0].rstrip('?')} ({better}): {part}"


def main() -> int:
    """Print the faults of all pages; return how many there are."""
    found = [
        f"{page.relative_to(REPOSITORY)}: {fault}"
        for page in PAGES
        for fault in faults(page.read_text(), with_cells=page != README)
    ]
    print("\n".join(found), file=sys.stderr)
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))

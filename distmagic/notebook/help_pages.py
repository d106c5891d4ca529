"""`%distributed help`: the pages of the manual, which lie as Markdown in distmagic/help/ and are installed with it."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from distmagic.errors import SpecError
from distmagic.notebook.host_commands import CommandLine

if TYPE_CHECKING:
    from importlib.abc import Traversable  # where Python 3.10 has it

_LINK_TO_PAGE = re.compile(r"\[([^\]]+)\]\(([a-z_-]+)\.md(?:#[^)]*)?\)")


def _folder() -> Traversable:
    from importlib import resources  # a tenth of the time that `%load_ext` takes

    return resources.files("distmagic") / "help"


def topics() -> tuple[str, ...]:
    """Return the names of all pages, in alphabetical order."""
    names = [file.name for file in _folder().iterdir()]
    return tuple(
        sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))
    )


def page(topic: str) -> str:
    """Return the text of a page. A link to another page becomes the command that shows that page.

    Raises `SpecError` that names all topics for an unknown one.
    """
    known = topics()
    if topic not in known:
        close = difflib.get_close_matches(topic, known, n=1)
        hint = f"Topics are: {', '.join(known)}."
        if close:
            hint = f"Did you mean {close[0]}? {hint}"
        raise SpecError(f"There is no help about {topic!r}.", hint)
    text = (_folder() / f"{topic}.md").read_text(encoding="utf-8")
    return _LINK_TO_PAGE.sub(r"\1 (`%distributed help \2`)", text)


def contents() -> str:
    """Return the list of all pages, each with the sentence that says what it answers."""
    known = topics()
    width = max(len(topic) for topic in known)
    lines = []
    for topic in known:
        _title, _blank, *rest = page(topic).split("\n")
        paragraph, _, _ = "\n".join(rest).partition("\n\n")
        sentence = " ".join(paragraph.split())
        lines.append(f"%distributed help {topic:<{width}}  {sentence}")
    return "\n".join(lines)


def show(line: CommandLine) -> None:
    """Print the list of all pages, or show one: formatted in a notebook, as it is in a terminal."""
    if not line.words:
        line.notebook.say(contents())
        return
    if len(line.words) > 1:
        raise SpecError(
            "%distributed help takes one topic.", f"Topics are: {', '.join(topics())}."
        )
    text = page(line.words[0])
    line.notebook.show({"text/markdown": text, "text/plain": text})

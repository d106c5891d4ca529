"""`%distributed help`: the pages of the manual, which lie as Markdown in distmagic/help/ and are installed with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distmagic.errors import SpecError
from distmagic.notebook import help_search
from distmagic.notebook.host_commands import CommandLine
from distmagic.request.systems import systems

if TYPE_CHECKING:
    from importlib.abc import Traversable  # where Python 3.10 has it

_NOT_SEARCHED = ("benchmarks",)  # a table of measurements
_LINK_TO_PAGE = re.compile(r"\[([^\]]+)\]\(([a-z_-]+)\.md(?:#[^)]*)?\)")


def _files() -> dict[str, Traversable]:
    """Return the files of all pages: those of help/, and those that systems of other packages bring."""
    from importlib import resources  # a tenth of the time that `%load_ext` takes

    found = {}
    for file in (resources.files("distmagic") / "help").iterdir():
        if file.name.endswith(".md"):
            found[file.name.removesuffix(".md")] = file
    for system in systems():
        if system.page and system.page not in found:
            name = f"{system.page}.md"
            found[system.page] = resources.files(system.folder) / name
    return found


def topics() -> tuple[str, ...]:
    """Return the names of all pages, in alphabetical order; last those that are not searched."""
    return tuple(sorted(_files(), key=lambda name: (name in _NOT_SEARCHED, name)))


def page(topic: str) -> str:
    """Return the text of a page. A link to another page becomes the command that shows that page."""
    text = _files()[topic].read_text(encoding="utf-8")
    return _LINK_TO_PAGE.sub(r"\1 (`%distributed help \2`)", text)


def found(question: Sequence[str]) -> str:
    """Return the three passages of the manual that answer a question best, each with the command that shows its page.

    Raises `SpecError` that names all topics where no word of the question is in the manual.
    """
    asked = " ".join(question)
    pages = {topic: page(topic) for topic in topics() if topic not in _NOT_SEARCHED}
    passages = help_search.search(question, pages)
    if not passages:
        raise SpecError(
            f"The manual has nothing about {asked!r}.",
            f"Topics are: {', '.join(topics())}.",
        )
    parts = [
        f"### {passage.heading}\n\n{passage.text}\n\nMore: `%distributed help {passage.topic}`"
        for passage in passages
    ]
    return "\n\n".join(parts)


def contents() -> str:
    """Return the list of all pages, each with the sentence that says what it answers."""
    known = topics()
    width = max(len(topic) for topic in known)
    lines = [
        f"%distributed help {'WORDS':<{width}}  The passages that answer them best."
    ]
    for topic in known:
        _title, _blank, *rest = page(topic).split("\n")
        paragraph, _, _ = "\n".join(rest).partition("\n\n")
        sentence = " ".join(paragraph.split())
        lines.append(f"%distributed help {topic:<{width}}  {sentence}")
    return "\n".join(lines)


def show(line: CommandLine) -> None:
    """Print the list of all pages, show one, or show what answers a question of other words.

    It is formatted in a notebook, and plain in a terminal, with the commands of a terminal that show more.
    """
    if not line.words:
        line.notebook.say(contents())
        return
    topic, *more = line.words
    for system in systems():
        if topic == system.name and topic not in topics():
            topic = system.page
    text = found(line.words) if more or topic not in topics() else page(topic)
    command = "%distributed help"
    text = text.replace(command, line.notebook.worded(command))
    line.notebook.show({"text/markdown": text, "text/plain": text})

"""`%distributed help`: shows the pages of the manual, which are Markdown files in
distmagic/help/.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from distmagic.errors import UsageError
from distmagic.notebook.settings import CommandLine
from distmagic.remote.frozen import frozen
from distmagic.request.systems import by_name, systems

if TYPE_CHECKING:
    from importlib.abc import Traversable  # its place in Python 3.10

_NOT_SEARCHED = ("benchmarks",)  # a table of measurements
_LINK_TO_PAGE = re.compile(r"\[([^\]]+)\]\(([a-z_-]+)\.md(?:#[^)]*)?\)")
# A comment in code has code below it, and a heading an empty line.
_HEADING = re.compile(r"^##? (.*)\n(?=\n)", re.MULTILINE)
_TABLE_HEAD = re.compile(r"(\|.*\n\|[-| ]+\|\n)")
_PIECE = re.compile(r".+\n(?:(?!- ).+\n)*(?:\n*(?:```(?:.|\n)*?```\n|(?: {4}.*\n)+))*")
_WORD = re.compile(r"[^\W_]+")
_SHORT_SECTION = 1_400  # characters of a section that is shown as a whole
_DOUBLED = re.compile(r"(?<=([bdgmnprt]))\1$")  # stopp(ed), debugg(ing)
_SYNONYMS = (  # a line a thing: the manual has some of its words, and readers ask by others
    "bastion gateway hop intermediate jump proxyjump tunnel",
    "accelerator card cuda device gpu graphics",
    "abort cancel halt kill quit stop terminate",
    "log output print stderr stdout",
    "checkpoint resume restore snapshot",
    "eviction evicted preempted preemption reclaimed spot",
    "apptainer container containerized docker image oci podman singularity",
    "deadlock freeze frozen hang stalled stuck",
    "bandwidth interconnect latency slow throughput",
    "bottleneck flame flamegraph profile profiler slow",
    "box computer host machine node server worker",
    "colleague coworker people somebody teammate",
    "big corpus dataset gigabyte huge large",
    "copy deliver send ship transfer upload",
    "fetch download retrieve bring",
    "firewall iptables packet port traffic",
    "card interface nic subnet",
    "conda env environment mamba venv virtualenv",
    "editable edited fork hacked modified patched",
    "audit compliance infosec questionnaire review security",
    "certificate signed",
    "encrypted encryption plaintext tls",
    "crash crashed die died restarted",
    "dashboard tensorboard tracker visualize wandb",
    "hub jupyterhub multi university",
    "oom memory ram",
    "diverge inf nan",
    "credential password secret token",
    "heterogeneous lack mixed unequal",
    "amd hip instinct mi250 mi300 radeon rccl rocm",
    "apple m1 m2 m3 m4 mac macbook macos osx",
    "cursor editor ide pycharm vscode",
    "deinstall delete erase remove trace uninstall wipe",
)
_COMMON = re.compile(
    "an?|all|and|are|at|back|be|between|by|can|does|do|for|from|has|have|how|i|if|in|into|is|it|me|more|my|not?|nothing|of|"
    "on|one|or|same|see|shows?|than|the|this|to|up|use|what|when|where|which|who|why|with|you|your"
)


def _files() -> dict[str, Traversable]:
    """Return the files of all pages: those in help/, and those of systems from other packages."""
    # Importing it takes a tenth of the time of `%load_ext`.
    from importlib import resources

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
    """Return the names of all pages, in alphabetical order, except that pages excluded from the
    search come last.
    """
    return tuple(sorted(_files(), key=lambda name: (name in _NOT_SEARCHED, name)))


def page(topic: str) -> str:
    """Return the text of a page.

    A link to another page becomes the command that shows that page.
    """
    text = _files()[topic].read_text(encoding="utf-8")
    return _LINK_TO_PAGE.sub(r"\1 (`%distributed help \2`)", text)


def found(question: Sequence[str]) -> str:
    """Return the three passages of the manual that best answer a question, each with the command
    that shows its page.

    Raises `UsageError` with all topics if the manual has no word of the question.
    """
    asked = " ".join(question)
    pages = {topic: page(topic) for topic in topics() if topic not in _NOT_SEARCHED}
    passages = search(question, pages)
    if not passages:
        raise UsageError(
            f"The manual has nothing about {asked!r}.",
            f"Topics are: {', '.join(topics())}.",
        )
    parts = [
        f"### {passage.heading}\n\n{passage.text}\n\nMore: `%distributed help {passage.topic}`"
        for passage in passages
    ]
    return "\n\n".join(parts)


def contents() -> str:
    """Return the list of all pages, each with the sentence about its content."""
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
    """Print the list of all pages, show one, or show the answers to a question.

    A notebook shows it formatted. A terminal shows it plain, with the terminal's commands.
    """
    if not line.words:
        line.notebook.say(contents())
        return
    topic, *more = line.words
    if topic not in topics() and topic in by_name():
        topic = by_name()[topic].page
    text = found(line.words) if more or topic not in topics() else page(topic)
    command = "%distributed help"
    text = text.replace(command, line.notebook.worded(command))
    line.notebook.show({"text/markdown": text, "text/plain": text})


# ---- a question, and the passages that answer it


@frozen
class Passage:
    """A unit of search results: a short section, or a paragraph, list item or table row of a long
    one.
    """

    topic: str
    heading: str
    text: str


def passages(topic: str, page: str) -> Iterator[Passage]:
    """Split a page into its passages."""
    _before, *parts = _HEADING.split(page)
    for heading, section in zip(parts[::2], parts[1::2], strict=True):
        is_short = len(section) <= _SHORT_SECTION
        for text in [section] if is_short else _pieces(section):
            if text.strip():
                yield Passage(topic=topic, heading=heading, text=text.strip())


def _pieces(section: str) -> Iterator[str]:
    """Return paragraphs and list items, each with the code below it, and table rows, each with its
    table's head.
    """
    for piece in _PIECE.findall(f"{section}\n"):
        before, head, rows = (*_TABLE_HEAD.split(piece), "", "")[:3]
        yield before
        for row in rows.splitlines():
            yield head + row


@functools.cache
def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 2:
            return _DOUBLED.sub("", word.removesuffix(ending)).removesuffix("e")
    return word.removesuffix("e")


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in _WORD.findall(text.lower())}


@functools.cache
def _synonyms(stem: str) -> frozenset[str]:
    """Return the stems of all words that mean the same, empty if there are none."""
    groups = [_stems(group) for group in _SYNONYMS]
    return frozenset(chain.from_iterable(group for group in groups if stem in group))


def _share(stem: str, stems: set[str]) -> float:
    """Return how much a text with these stems counts for a word: a synonym counts half."""
    if stem in stems:
        return 1
    return 0 if stems.isdisjoint(_synonyms(stem)) else 0.5


def search(
    question: Sequence[str], pages: Mapping[str, str], most: int = 3
) -> list[Passage]:
    """Return the best passages: those with most of the question's words, rare words first; of equal
    ones, the shortest.

    Empty if no word is found. A misspelled word counts as the most similar word. A word in a
    heading counts twice. A synonym counts half. A row about a message comes first.
    """
    found = [
        (passage, _stems(passage.text), _stems(passage.heading))
        for topic, page in pages.items()
        for passage in passages(topic, page)
    ]
    spread = Counter(stem for _, text, heading in found for stem in text | heading)
    rarity: dict[str, float] = {}
    for asked in _WORD.findall(" ".join(question).lower().replace("w&b", "wandb")):
        stem = _stem(asked)
        if stem not in spread and not _synonyms(stem) and len(stem) > 3:
            stem = next(iter(difflib.get_close_matches(stem, spread, 1, 0.85)), stem)
        places = spread[stem] or sum(spread[other] for other in _synonyms(stem))
        if places and not _COMMON.fullmatch(asked):
            rarity[stem] = math.log(1 + len(found) / places)
    ranked = []
    for index, (passage, text, heading) in enumerate(found):
        shares = {
            stem: _share(stem, text) + 2 * _share(stem, heading) for stem in rarity
        }
        points = sum(rarity[stem] * share for stem, share in shares.items())
        matched = sum(share > 0 for share in shares.values())
        is_it = explains(passage.text, " ".join(question))
        if matched or is_it:
            ranked.append((not is_it, -points * matched, len(text), index))
    return [found[index][0] for *_order, index in sorted(ranked)[:most]]


def explains(passage: str, message: str) -> bool:
    """Whether a row of a table `you see` has words of this message in its first column; `...`
    stands for any.
    """
    if not passage.startswith("| you see"):
        return False
    seen = "\n".join(row.split(" | ")[0] for row in passage.splitlines())
    return any(
        re.search(".*".join(map(re.escape, words.split("..."))), message, re.IGNORECASE)
        for words in re.findall(r"`(\S+ [^`]*)`", seen)
    )

"""Where the ranks of a job are, as text and as HTML."""

from __future__ import annotations

from html import escape

from distmagic.render import quantities as q
from distmagic.render.as_html import alert_html, style
from distmagic.render.overview import Alert
from distmagic.render.text_width import one_line, plain
from distmagic.state import explanation
from distmagic.state.explanation import SHOWN_GROUPS, Explanation


def stacks_text(found: Explanation, job: str) -> str:
    """Return the sentence, what to look at first, and the stacks."""
    text = _title(found, job)
    if found.sentence:
        text += f": {plain(found.sentence)}"
    if found.advice:
        text += f"\n{plain(found.advice)}"
    stacks = "\n".join(
        plain(line) for line in explanation.stacks_text(found).split("\n")
    )
    if stacks:
        text += f"\n\n{stacks}"
    return text


def stacks_html(found: Explanation, job: str) -> str:
    """Return the stacks as HTML.

    A click expands the stack of a place; stacks of unusual ranks are open.
    """
    heads = [line for line in (_title(found, job), found.advice) if line]
    parts = [
        f'<div class="dm-head"><span>{escape(one_line(line))}</span></div>'
        for line in heads
    ]
    for index, group in enumerate(found.groups[:SHOWN_GROUPS]):
        is_odd = not index and len(found.groups) > 1
        words = one_line(explanation.sentence_of(group, None))
        lines = "\n".join(explanation.stack_lines(group))
        level = "error" if is_odd else "warning"
        parts.append(alert_html(Alert(level, words, lines), is_open=is_odd))
    for host in found.unanswered:
        words = one_line(f"{host} did not report where its ranks are")
        parts.append(alert_html(Alert("error", words)))
    more = len(found.groups) - SHOWN_GROUPS
    if more > 0:
        parts.append(
            alert_html(Alert("warning", f"ranks are at {q.plural(more, 'more place')}"))
        )
    return f'<div class="distmagic">{style()}{"".join(parts)}</div>'


def _title(found: Explanation, job: str) -> str:
    ranks = sum(len(group.ranks) for group in found.groups)
    if not ranks:
        return f"{plain(job)}: no rank runs" if not found.unanswered else plain(job)
    places = q.plural(len(found.groups), "place")
    return f"{plain(job)}: {q.plural(ranks, 'rank')} at {places}"

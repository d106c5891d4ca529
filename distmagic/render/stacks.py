"""Where the ranks of a job are, as text and as HTML."""

from __future__ import annotations

from html import escape

from distmagic.render.as_html import style
from distmagic.render.text_width import one_line, plain
from distmagic.state import hangs
from distmagic.state.hangs import SHOWN_GROUPS, Explanation


def stacks_text(found: Explanation, job: str) -> str:
    """Return the sentence, what to look at first, and the stacks."""
    head = [line for line in (_head(found, job), plain(found.advice)) if line]
    stacks = "\n".join(plain(line) for line in hangs.stacks_text(found).split("\n"))
    return "\n".join(head) + (f"\n\n{stacks}" if stacks else "")


def stacks_html(found: Explanation, job: str) -> str:
    """Return the same as a page; the stack of each place is unfolded by a click, that of the odd ranks is open."""
    heads = [line for line in (_title(found, job), found.advice) if line]
    parts = [f'<div class="dm-head"><span>{escape(one_line(line))}</span></div>' for line in heads]
    for index, group in enumerate(found.groups[:SHOWN_GROUPS]):
        words = escape(one_line(hangs.sentence_of(group, None)))
        lines = "\n".join(escape(plain(line)) for line in hangs.stack_lines(group))
        is_odd = not index and len(found.groups) > 1
        inner = f'<span class="dm-text">{words}</span>'
        if lines:
            is_open = " open" if is_odd else ""
            inner = f"<details{is_open}><summary>{words}</summary><pre>{lines}</pre></details>"
        parts.append(_alert(inner, is_odd=is_odd))
    unheard = [f"{host} did not tell where its ranks are" for host in found.unheard]
    parts += [_alert(escape(one_line(line)), is_odd=True) for line in unheard]
    if len(found.groups) > SHOWN_GROUPS:
        parts.append(_alert(f"ranks are at {len(found.groups) - SHOWN_GROUPS} more places", is_odd=False))
    return f'<div class="distmagic">{style()}{"".join(parts)}</div>'


def _alert(inner: str, *, is_odd: bool) -> str:
    return f'<div class="dm-alert dm-{"error" if is_odd else "warning"}">{inner}</div>'


def _head(found: Explanation, job: str) -> str:
    return f"{_title(found, job)}: {plain(found.sentence)}" if found.sentence else _title(found, job)


def _title(found: Explanation, job: str) -> str:
    ranks = sum(len(group.ranks) for group in found.groups)
    if not ranks:
        return f"{plain(job)}: no rank runs" if not found.unheard else plain(job)
    places = len(found.groups)
    return f"{plain(job)}: {ranks} rank{'s' if ranks > 1 else ''} at {places} place{'s' if places > 1 else ''}"

"""How a run looks, as text and as HTML. Pure: a `RunState` goes in, a string comes out.

    RunState  --overview-->  Overview: what to say, in which order; rows.py has the table
    Overview  --as_text-->   text: the final table, a terminal's status lines, milestones for a log
    Overview  --as_html-->   HTML: head and table; curves.py draws the metrics, output.py the last words

quantities.py writes numbers and times, text_width.py makes text of hosts harmless, shown.py leaves
out what torchrun says without need, stacks.py shows where ranks are that go nowhere, style.css is all of the looks.
screen.py is the interface of the package `screens`, which puts all this where a user looks.
"""

from __future__ import annotations

from distmagic.render.as_html import about_and_output, head_and_table, html, style
from distmagic.render.as_text import headline, label, milestones, status, text
from distmagic.render.curves import curves
from distmagic.render.shown import is_shown
from distmagic.render.stacks import stacks_html, stacks_text
from distmagic.render.text_width import coloured, columns_of, plain

__all__ = [
    "about_and_output", "coloured", "columns_of", "curves", "head_and_table", "headline", "html", "is_shown", "label",
    "milestones", "plain", "stacks_html", "stacks_text", "status", "style", "text",
]  # fmt: skip

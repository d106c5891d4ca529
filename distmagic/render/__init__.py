"""Writes a run as text and as HTML.

Everything here is pure: a `RunState` goes in, a string comes out. Nothing here knows of notebooks, widgets or terminals
(screens/ does), and no text of a host reaches a page or a terminal unescaped.

    RunState  --overview-->  Overview  --as_text-->  text
                                       --as_html-->  HTML

Read the modules in this order:

    overview.py     what to say of a run, in which order: the one model of text and HTML
    notes.py        what to know that is no failure
    row_choice.py   which ranks want to be seen
    rows.py         the table: a row a rank, or a row a host
    table.py        columns that text and HTML share
    as_text.py      text: the final table, a terminal's status lines, milestones for a log
    as_html.py      HTML: head and table; style.css is all of the looks
    curves.py       metrics as SVG curves
    chart_data.py   the same in numbers, for a page that draws them itself
    output.py       the last lines of output, which of torchrun's are left out, and the pictures that ranks show
    stacks.py       where the ranks of a run are that hangs
    quantities.py   numbers, sizes and times in words
    text_width.py   makes text of hosts harmless, and cuts it to a width
    screen.py       the interface of the package `screens`, which puts all this where a user looks
"""

from __future__ import annotations

from distmagic.render.as_html import (
    about_and_output,
    all_ranks,
    announcement,
    head_and_table,
    html,
    style,
)
from distmagic.render.as_text import headline, label, milestones, status, text
from distmagic.render.chart_data import chart_data
from distmagic.render.curves import curves
from distmagic.render.output import (
    count_of_lines,
    is_shown,
    log_line,
    open_lines,
    pictures,
    torchrun_matters,
)
from distmagic.render.overview import prompts, question, size
from distmagic.render.stacks import stacks_html, stacks_text
from distmagic.render.text_width import coloured, columns_of, plain

__all__ = [
    "about_and_output", "all_ranks", "announcement", "chart_data", "coloured", "columns_of", "count_of_lines", "curves", "head_and_table", "headline", "html", "is_shown", "label",
    "log_line", "milestones", "open_lines", "pictures", "plain", "prompts", "question", "size", "stacks_html", "stacks_text", "status", "style", "text", "torchrun_matters",
]  # fmt: skip

"""Writes a run as text and as HTML.

All modules are pure: a `RunState` goes in, a string comes out. screens/ writes the strings to
notebooks, widgets and terminals. Texts from hosts are always escaped.

    RunState  --overview-->  Overview  --as_text-->  text
                                       --as_html-->  HTML

Read the modules in this order:

    overview.py     what to show of a run, and in which order: the common model of text and HTML
    notes.py        notices that are no failures
    row_choice.py   the ranks that are most worth showing
    rows.py         the table: a row a rank, or a row a host
    table.py        the layout of columns that text and HTML share
    as_text.py      text: the final table, a terminal's status lines, milestones for a log
    as_html.py      HTML: head and table; style.css has all styles
    curves.py       metrics as SVG curves
    chart_data.py   the same as numbers, for a page that draws them itself
    output.py       the last lines of output, without torchrun's noise, and pictures of ranks
    stacks.py       where the ranks of a hanging run are
    quantities.py   numbers, sizes and times in words
    text_width.py   escapes text from hosts, and cuts it to a width
    screen.py       `Screen`, the interface that the package `screens` implements
"""

from __future__ import annotations

from distmagic.render.as_html import (
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
    "all_ranks", "announcement", "chart_data", "coloured", "columns_of", "count_of_lines", "curves", "head_and_table", "headline", "html", "is_shown", "label",
    "log_line", "milestones", "open_lines", "pictures", "plain", "prompts", "question", "size", "stacks_html", "stacks_text", "status", "style", "text", "torchrun_matters",
]  # fmt: skip

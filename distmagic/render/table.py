"""A table for text and HTML: columns of texts, with one cell for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from distmagic.render.text_width import columns_of

NUMBER = "dm-n"
GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column with a cell for each row, "" for none."""

    title: str
    cells: Sequence[str]
    # identifies columns with special styles, "" for others: a metric may have any title
    key: str = ""
    kind: str = ""  # the CSS class of its cells; numbers are right-aligned
    # columns with a higher number are left out first if the space is limited
    spare: int = 0
    best: frozenset[int] = frozenset()  # the rows with the best value

    @property
    def texts(self) -> list[str]:
        """The title, and the cells as text; the best ones have a star."""
        cells = [
            f"{cell} *" if row in self.best else cell
            for row, cell in enumerate(self.cells)
        ]
        return [self.title, *cells]

    @property
    def width(self) -> int:
        """The number of terminal columns that it takes."""
        return max(map(columns_of, self.texts))


def text_lines(columns: Sequence[Column]) -> list[str]:
    """Return the line of titles, and one line for each row."""
    padded = []
    for column in columns:
        width, cells = column.width, []
        for text in column.texts:
            blanks = " " * (width - columns_of(text))
            cells.append(blanks + text if column.kind == NUMBER else text + blanks)
        padded.append(cells)
    return [GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)]


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows, the first of them with the titles, as lines whose columns are as wide as their
    widest text.
    """
    columns = zip(*rows, strict=True)
    return "\n".join(text_lines([Column(title, cells) for title, *cells in columns]))


def html_lines(
    columns: Sequence[Column],
    classes: Sequence[str],
    cell: Callable[[Column, int], str],
) -> list[str]:
    """Return the line of titles, and one line for each row, with a class from `classes`.

    `cell` returns a cell's HTML.
    """
    titles = [_tag("th", column.kind, escape(column.title)) for column in columns]
    lines = [_tag("tr", "", "".join(titles))]
    for row, row_class in enumerate(classes):
        cells = [_tag("td", column.kind, cell(column, row)) for column in columns]
        lines.append(_tag("tr", row_class, "".join(cells)))
    return lines


def html_table(lines: Sequence[str], more_class: str = "") -> str:
    """Return a table of these lines."""
    return (
        f'<table class="dm-table{more_class}"><tbody>{"".join(lines)}</tbody></table>'
    )


def _tag(name: str, kind: str, html: str) -> str:
    return (
        f'<{name} class="{kind}">{html}</{name}>'
        if kind
        else f"<{name}>{html}</{name}>"
    )

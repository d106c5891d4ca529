"""Shows a run or its rest as the value of a cell, but not in the cell that already shows its live view."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def cell_number() -> int | None:
    """Return the number of the cell that IPython is executing, None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else shell.execution_count


def display_page(page: Mapping[str, str]) -> None:
    """Show a page, given by media type: text/plain, text/html."""
    from IPython.display import display

    display(dict(page), raw=True)


def leave_out(short: str) -> None:
    """Show nothing for a value that its cell has already shown; in a terminal, after Out[3]:, show `short`."""
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        print(short)  # noqa: T201

"""Shows a run or its rest as the value of a cell, but not in the cell that already shows its live
view.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def shell() -> Any:
    """Return IPython's shell, None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()


def kernel() -> Any:
    """Return the Jupyter kernel that this process is, None for any other process."""
    return getattr(shell(), "kernel", None)


def cell_number() -> int | None:
    """Return the number of the cell that IPython is executing, None outside of IPython."""
    return getattr(shell(), "execution_count", None)


def display_page(page: Mapping[str, str]) -> None:
    """Show a page, given by media type: text/plain, text/html."""
    from IPython.display import display

    display(dict(page), raw=True)


def leave_out(short: str) -> None:
    """Show nothing for a value that its cell has already shown; in a terminal, after Out[3]:, show
    `short`.
    """
    if kernel() is None:
        print(short)  # noqa: T201

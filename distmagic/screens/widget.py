"""The widget of the live view in a page. The only module that uses anywidget.

Its script consists of the plain ES modules in `page/`. A widget has only one script, so this module
concatenates them, imported modules first.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from distmagic import render
from distmagic.screens import reloaded_pages

_PAGE = Path(__file__).with_name("page")
_MODULES = (
    "channel.js",
    "patch.js",
    "scales.js",
    "chart.js",
    "charts.js",
    "controls.js",
    "lines.js",
    "log.js",
    "place.js",
    "prompts.js",
    "view.js",
)


@cache
def script() -> str:
    """Return all modules of the page as one script."""
    return "\n".join(_without_imports(name) for name in _MODULES)


def _without_imports(name: str) -> str:
    lines = []
    for line in (_PAGE / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("import "):
            continue
        is_last = line.startswith("export default")
        lines.append(line if is_last else line.removeprefix("export "))
    return "\n".join(lines)


def looks() -> str:
    """Return the live view's CSS: the sheet that all pages share, and the sheet of the buttons."""
    sheet = render.style().removeprefix("<style>").removesuffix("</style>")
    return sheet + (_PAGE / "controls.css").read_text(encoding="utf-8")


def shows_itself() -> bool:
    """Whether this front end shows widgets only by its own view: VS Code and Colab."""
    return "VSCODE_PID" in os.environ or "google.colab" in sys.modules


@cache
def _kind() -> Any:
    """Return the class of the data of one run for a page.

    `head`, `table`, `ranks` and `pictures` are HTML, `log` are new lines. `is_cleared`: the output
    was removed from the notebook.
    """
    import anywidget
    from traitlets import Bool, Dict, List, Unicode

    kinds = {
        Unicode: "_esm looks view_id cell_id head table ranks pictures",
        Bool: "shows_itself is_cleared",
        Dict: "run log final",
        List: "charts prompts",
    }
    traits: dict[str, Any] = {"__module__": __name__}  # not that of traitlets
    for kind, names in kinds.items():
        for name in names.split():
            traits[name] = kind().tag(sync=True)
    return type("View", (anywidget.AnyWidget,), traits)


def make_view(view_id: str) -> Any:
    """Return a widget whose script runs in every page of this notebook.

    Raises `ImportError` without anywidget.
    """
    return _kind()(
        _esm=script(),
        looks=looks(),
        view_id=view_id,
        cell_id=reloaded_pages.cell_id(),
        shows_itself=shows_itself(),
    )


def close(view: Any) -> None:
    """Remove a widget, and its data from everything that a notebook might keep."""
    with view.hold_sync():
        for name in ("_esm", "looks", "head", "table", "ranks", "pictures"):
            setattr(view, name, "")
        view.log = view.final = {}
        view.charts = view.prompts = []
    for widget in (view, view.layout):
        widget.close()

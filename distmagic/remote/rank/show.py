"""Shows pictures of this rank in the notebook: by `distmagic.show`, or shown by the user's code as
in a cell.

`plt.show()`, `figure.show()` of matplotlib and `display(figure)` of IPython also show a picture in
the notebook. This module imports neither library: it replaces their functions once the user's code
has imported them. Like a notebook, a rank has `display` among its builtins, also on a host without
IPython.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import inspect
import io
import sys
from typing import Any

from distmagic.remote.rank import report
from distmagic.remote.training import import_hooks

_MOST_BYTES = 120_000  # in base64 it fits one packet to the agent
_SCALES = (1.0, 0.7, 0.5, 0.3)
_PNG = b"\x89PNG"
_keeping: list[bool] = []  # not empty: figures stay open after `plt.show()`


def install() -> None:
    """Replace the show functions of matplotlib and IPython, so that this process's pictures appear
    in the notebook.
    """
    import_hooks.when_imported(
        "matplotlib.pyplot",
        lambda pyplot: import_hooks.wrap(pyplot, "show", _show_all),
    )
    import_hooks.when_imported(
        "matplotlib.figure",
        lambda module: import_hooks.wrap(
            module.Figure, "show", lambda _, figure, *__, **___: show(figure)
        ),
    )
    import_hooks.when_imported("IPython.core.display_functions", _show_from_ipython)
    builtins.display = display  # type: ignore[attr-defined]
    sys.meta_path.append(_StandIn())


def display(*objects: Any, **_: Any) -> None:
    """Show pictures and print anything else, as IPython's `display` does outside a notebook."""
    _display(print, *objects)


def clear_output(*_: Any, **__: Any) -> None:
    """Keep the output, unlike IPython in a notebook: it belongs to the run."""


def show(figure: object) -> None:
    """Show a picture in the run's view and in the saved notebook: a matplotlib figure, a PIL image,
    or bytes of a PNG.

    The run keeps its last pictures. If many come at once, only the first ones are shown. Outside a
    run it does nothing. It never raises: an object that is not an image, or is too large, is left
    out, with one line on stderr.
    """
    if not report.is_in_run():
        return
    try:
        png = figure if isinstance(figure, bytes) else _png(figure)
    except Exception as error:  # noqa: BLE001  # whatever it is, the training goes on
        report.complain("show", f"a {type(figure).__name__} is not an image ({error})")
        return
    if len(png) > _MOST_BYTES:
        report.complain("show", f"a picture of {len(png):,} bytes is too large")
    else:
        report.post_picture(png)


def _png(figure: Any) -> bytes:
    """Return a picture as PNG, scaled down if it would be too large."""
    for scale in _SCALES:
        into = io.BytesIO()
        if hasattr(figure, "savefig"):
            figure.savefig(into, format="png", dpi=100 * scale)
        else:
            size = [max(1, int(side * scale)) for side in figure.size]
            figure.resize(size).save(into, "PNG")
        if into.tell() <= _MOST_BYTES:
            break
    return into.getvalue()


def keep_figures() -> None:
    """Keep figures open after `plt.show()`, because a script may save them afterwards."""
    _keeping.append(True)


def _show_all(_: Any, *__: object, **___: object) -> None:
    """Show all open figures and close them, as a notebook does; in a script, show only the changed
    ones.
    """
    pyplot = sys.modules["matplotlib.pyplot"]
    current = pyplot.gcf() if _keeping and pyplot.get_fignums() else None
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        if figure.stale or not _keeping:
            show(figure)
            figure.stale = False
    if current is None:
        pyplot.close("all")
    else:
        pyplot.figure(current)


def _show_from_ipython(module: Any) -> None:
    """Make `display` show pictures; other objects are written as before."""
    others = [sys.modules.get(name) for name in ("IPython.display", "IPython")]
    import_hooks.wrap(module, "display", _display, *others)


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `IPython.display` on a host without IPython, for the user's code alone: libraries would
    take a host with IPython for a notebook.
    """

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for IPython and its module `display`, None for all others."""
        if name not in ("IPython", "IPython.display"):
            return None
        frame = inspect.currentframe()
        file = __file__
        while frame and (file == __file__ or "importlib" in file):
            frame = frame.f_back
            file = frame.f_code.co_filename if frame else ""
        if "-packages/" in file:
            return None
        is_package = name == "IPython"
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def create_module(self, _: importlib.machinery.ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: Any) -> None:
        """Give the module what a rank has of it."""
        if module.__name__ == "IPython":
            module.version_info, module.get_ipython = (0, 0), lambda: None
            importlib.import_module("IPython.display")  # `import IPython` is enough
        else:
            module.display, module.clear_output = display, clear_output
            module.__getattr__ = _missing


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ModuleNotFoundError("No module named 'IPython'", name="IPython")


def _display(original: Any, *objects: Any, **kwargs: Any) -> Any:
    rest = []
    for one in objects:
        picture = _picture(one)
        if picture is None:
            rest.append(one)
        else:
            show(picture)
    return original(*rest, **kwargs) if rest or not objects else None


def _picture(value: Any) -> Any:
    """Return what `show` accepts: a figure, a PIL image, or the PNG of an IPython image; None for
    anything else.
    """
    # Checks the class: a pandas DataFrame has its columns as attributes, and a mock has any
    # attribute.
    data = getattr(value, "__dict__", {}).get("data")
    if isinstance(data, bytes) and data.startswith(_PNG):
        return data
    kind = type(value)
    is_image = hasattr(kind, "resize") and hasattr(kind, "save")
    return value if is_image or hasattr(kind, "savefig") else None

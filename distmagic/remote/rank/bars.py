"""Shows tqdm bars of the user's code as bars of the rank, without changes to that code.

The methods that draw are replaced: `status_printer`, `display`, `refresh`, `clear` and `close` of
`tqdm.std.tqdm`, from which all other kinds inherit. `__iter__` counts iterations. A bar for stdout
or stderr is sent to the agent instead of being drawn. Only its last line is written when it closes,
for the log. A bar with its own file is unchanged. The classes of `tqdm.notebook` are replaced by
the plain class, because a rank has no notebook, and often no ipywidgets.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from distmagic.remote.rank import report
from distmagic.remote.training import import_hooks, steps
from distmagic.remote.wire.parts import Bar

_STD = "tqdm.std"
_FILE_ARGUMENT = 4  # the position of `file` in tqdm(iterable, desc, total, leave, file)


def install(fallback: str | None = None) -> None:
    """Report every tqdm bar in this process.

    `fallback` is a directory or zip file with a tqdm, for hosts that have none.
    """
    if (
        fallback is not None
        and "tqdm" not in sys.modules
        and importlib.util.find_spec("tqdm") is None
    ):
        sys.path.append(fallback)
    import_hooks.when_imported(_STD, lambda module: _patch(module.tqdm))
    import_hooks.when_imported("tqdm.notebook", _make_plain)


def _make_plain(notebook: ModuleType) -> None:
    std = importlib.import_module(_STD)
    for name in ("tqdm", "tqdm_notebook"):
        setattr(notebook, name, std.tqdm)
    for name in ("trange", "tnrange"):
        setattr(notebook, name, std.trange)


def _patch(tqdm: Any) -> None:
    # Attributes of a bar, and their values for existing bars.
    tqdm.distmagic_id = 0  # its number, 0 for one with its own file
    tqdm.distmagic_at = 0  # the number of its current item, starting at 1
    # Whether it was posted; one that ends within its `delay` never is.
    tqdm.distmagic_shown = False
    # The thread that closes it, until the last line is written.
    tqdm.distmagic_closing = 0
    for name, ours in _REPLACEMENTS.items():
        import_hooks.wrap(tqdm, name, ours)
    tqdm.status_printer = staticmethod(tqdm.status_printer)


# ---- replacements: each is called with tqdm's own method, followed by that method's arguments


def _init(original: Any, bar: Any, *args: Any, **kwargs: Any) -> None:
    file = args[_FILE_ARGUMENT] if len(args) > _FILE_ARGUMENT else kwargs.get("file")
    number = next(report.bar_ids) if file is None or is_standard(file) else 0
    bar.distmagic_id = number
    if number:
        # An argument only of tqdm.notebook, like a width of "100%".
        kwargs.pop("display", None)
        if isinstance(kwargs.get("ncols"), str):
            kwargs["ncols"] = None
        if kwargs.get("disable", False) is None:
            # None means "only on a terminal", and the notebook counts as one.
            kwargs["disable"] = False
    original(bar, *args, **kwargs)


def _status_printer(original: Any, file: Any) -> Any:
    return _draw_nothing if is_standard(file) else original(file)


def _display(original: Any, bar: Any, msg: str | None = None, pos: Any = None) -> Any:
    if not bar.distmagic_id:
        return original(bar, msg, pos)
    if not bar.disable:
        _post(bar)
        return True
    # `close` has disabled the bar, and draws its last line. Other threads may still draw a bar that
    # they share.
    if msg is None and bar.distmagic_closing == threading.get_ident():
        bar.distmagic_closing = 0
        bar.fp.write(str(bar))
    return False


def _refresh(original: Any, bar: Any, *args: Any, **kwargs: Any) -> Any:
    draws_itself = type(bar).display is not sys.modules[_STD].tqdm.display
    if bar.distmagic_id and not bar.disable and draws_itself:
        # A subclass that draws in its own way, and may not call the replaced `display`.
        _post(bar)
    return original(bar, *args, **kwargs)


def _clear(original: Any, bar: Any, *args: Any, **kwargs: Any) -> None:
    if not bar.distmagic_id:
        original(bar, *args, **kwargs)


def _close(original: Any, bar: Any) -> None:
    was_open = not getattr(bar, "disable", True) and bar.distmagic_id
    draws_nothing = was_open and getattr(bar, "sp", None) is _draw_nothing
    if draws_nothing:
        # A subclass may draw by `sp` in its `display`: its last line is written to the log too.
        bar.sp = bar.fp.write
        bar.distmagic_closing = threading.get_ident()
    original(bar)
    if draws_nothing:
        bar.sp = _draw_nothing
    if was_open and bar.distmagic_shown:
        _post(bar, closed=True)


def _iter(original: Any, bar: Any) -> Iterator[Any]:
    for number, item in enumerate(original(bar), 1):
        bar.distmagic_at = number
        yield item
        steps.iterated()


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "status_printer": _status_printer,
    "display": _display,
    "refresh": _refresh,
    "clear": _clear,
    "close": _close,
    "__iter__": _iter,
}


def _draw_nothing(_: str) -> None:
    """Replaces the function by which tqdm draws a line; does nothing."""


def is_standard(file: Any) -> bool:
    """Whether a file is stdout or stderr, possibly inside tqdm's wrappers."""
    while type(file).__module__ == "tqdm.utils":
        file = file._wrapped  # noqa: SLF001
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return any(file is stream for stream in streams)


def _post(bar: Any, *, closed: bool = False) -> None:
    shown = bar.format_dict
    try:
        scale = float(shown["unit_scale"] or 1)  # True means prefixes such as k
        rate = None if closed else shown["rate"]
        if rate is None and shown["elapsed"] > 0:
            done = float(shown["n"]) - float(shown.get("initial") or 0)
            rate = done / shown["elapsed"]
        new = Bar(
            id=bar.distmagic_id,
            desc=str(shown["prefix"] or "").removesuffix(": "),
            n=float(shown["n"]) * scale,
            total=None if shown["total"] is None else float(shown["total"]) * scale,
            unit=str(shown["unit"]),
            rate=None if rate is None else float(rate) * scale,
            postfix="" if shown["postfix"] is None else str(shown["postfix"]),
            closed=closed,
        )
    except (TypeError, ValueError):
        return  # the user's code counts in objects that are no numbers
    bar.distmagic_shown = True
    report.post_bar(new)

"""Bars of tqdm in the user's code become bars of the rank, with no change to that code.

The methods that draw are replaced: `status_printer`, `display`, `refresh`, `clear` and `close` of `tqdm.std.tqdm`, from
which all other kinds inherit. `__iter__` counts iterations. A bar that would be drawn on stdout or stderr is posted to the agent; only its last line is
written when it closes, for the log. A bar with a file of its own stays as it is. `tqdm.notebook` and `tqdm.autonotebook`
are replaced by modules with the plain class, because a rank has no notebook, and often no ipywidgets.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from distmagic.remote.rank.report import bar_ids
from distmagic.remote.training import import_hooks, steps
from distmagic.remote.wire.parts import Bar

_STD = "tqdm.std"
_STAND_INS = ("tqdm.notebook", "tqdm.autonotebook")
ID = "_distmagic_id"  # attribute of a bar: its number, 0 for one with a file of its own
_SHOWN = "_distmagic_shown"  # attribute of a bar: whether it was posted; one that ends within its `delay` never is
_CLOSING = "_distmagic_closing"  # attribute of a bar: the thread that closes it, until the last line is written
_FILE_ARGUMENT = 4  # the position of `file` in tqdm(iterable, desc, total, leave, file)

Post = Callable[[Bar], None]


class _Hook(importlib.abc.MetaPathFinder):
    """Finds the modules that are replaced, and knows where bars go."""

    post: Post

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the modules that are replaced, None for all others."""
        del path, target
        return (
            importlib.machinery.ModuleSpec(name, _StandIn())
            if name in _STAND_INS
            else None
        )


class _StandIn(importlib.abc.Loader):
    """Makes `tqdm.notebook` out of `tqdm.std`."""

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


_hook = _Hook()


def install(post: Post, fallback: str | None = None) -> None:
    """Have `post` called for every bar of tqdm in this process. A second call only changes `post`.

    `fallback` is a directory or zip file with a tqdm, for hosts that have none.
    """
    _hook.post = post
    if (
        fallback is not None
        and "tqdm" not in sys.modules
        and importlib.util.find_spec("tqdm") is None
    ):
        sys.path.append(fallback)
    if _hook in sys.meta_path:
        return
    sys.meta_path.insert(0, _hook)
    import_hooks.when_imported(_STD, lambda module: _patch(module.tqdm))
    for name in _STAND_INS:
        if name in sys.modules:
            _fill(sys.modules[name])


def _fill(module: ModuleType) -> None:
    std = importlib.import_module(_STD)
    names = {
        "tqdm": std.tqdm,
        "tqdm_notebook": std.tqdm,
        "trange": std.trange,
        "tnrange": std.trange,
    }
    vars(module).update(names, __all__=["tqdm_notebook", "tnrange", "tqdm", "trange"])


def _patch(tqdm: Any) -> None:
    if ID in vars(tqdm):
        return
    setattr(tqdm, ID, 0)  # for bars that exist already
    setattr(tqdm, _SHOWN, False)
    setattr(tqdm, _CLOSING, 0)
    for name, make in _REPLACEMENTS.items():
        original = getattr(tqdm, name)
        setattr(tqdm, name, functools.wraps(original)(make(original)))
    tqdm.status_printer = staticmethod(tqdm.status_printer)


# ---- the replacements: each function takes tqdm's own method and returns ours


def _new_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        file = (
            args[_FILE_ARGUMENT] if len(args) > _FILE_ARGUMENT else kwargs.get("file")
        )
        number = next(bar_ids) if file is None or is_standard(file) else 0
        setattr(self, ID, number)
        if number:
            # An argument of tqdm.notebook, as is a width of "100%".
            kwargs.pop("display", None)
            if isinstance(kwargs.get("ncols"), str):
                kwargs["ncols"] = None
            if kwargs.get("disable", False) is None:
                kwargs["disable"] = (
                    False  # None means "only on a terminal", and the notebook counts as one
                )
        original(self, *args, **kwargs)

    return __init__


def _new_status_printer(original: Any) -> Any:
    def status_printer(file: Any) -> Any:
        return _draw_nothing if is_standard(file) else original(file)

    return status_printer


def _new_display(original: Any) -> Any:
    def display(self: Any, msg: str | None = None, pos: int | None = None) -> Any:
        if not _number(self):
            return original(self, msg, pos)
        if not self.disable:
            _post(self)
            return True
        # `close` has disabled the bar, and now has its last line drawn. Other threads may still draw a bar that they share.
        if msg is None and getattr(self, _CLOSING) == threading.get_ident():
            setattr(self, _CLOSING, 0)
            self.fp.write(str(self))
        return False

    return display


def _new_refresh(original: Any) -> Any:
    def refresh(self: Any, nolock: bool = False, lock_args: Any = None) -> Any:  # noqa: FBT001, FBT002
        if (
            _number(self)
            and not self.disable
            and type(self).display is not sys.modules[_STD].tqdm.display
        ):
            # A subclass that draws in its own way, and may not call our `display`.
            _post(self)
        return original(self, nolock, lock_args)

    return refresh


def _new_clear(original: Any) -> Any:
    def clear(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _number(self):
            original(self, *args, **kwargs)

    return clear


def _new_close(original: Any) -> Any:
    def close(self: Any) -> None:
        was_open = not getattr(self, "disable", True) and _number(self)
        draws_nothing = was_open and getattr(self, "sp", None) is _draw_nothing
        if draws_nothing:
            self.sp = self.fp.write  # a subclass may draw by `sp` in its `display`: its last line goes to the log too
            setattr(self, _CLOSING, threading.get_ident())
        original(self)
        if draws_nothing:
            self.sp = _draw_nothing
        if was_open and getattr(self, _SHOWN):
            _post(self, closed=True)

    return close


def _new_iter(original: Any) -> Any:
    def __iter__(self: Any) -> Any:  # noqa: N807
        for item in original(self):
            yield item
            steps.iterated()

    return __iter__


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "__init__": _new_init,
    "status_printer": _new_status_printer,
    "display": _new_display,
    "refresh": _new_refresh,
    "clear": _new_clear,
    "close": _new_close,
    "__iter__": _new_iter,
}


def _draw_nothing(_: str) -> None:
    """Stand in for the function by which tqdm draws a line."""


def is_standard(file: Any) -> bool:
    """Whether this is stdout or stderr, maybe within tqdm's wrappers."""
    while type(file).__module__ == "tqdm.utils":
        file = file._wrapped  # noqa: SLF001
    return any(
        file is stream
        for stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    )


def _number(bar: Any) -> int:
    return getattr(bar, ID)  # type: ignore[no-any-return]


def _post(bar: Any, *, closed: bool = False) -> None:
    shown = bar.format_dict
    try:
        scale = (
            1.0
            if shown["unit_scale"] in (None, False, True)
            else float(shown["unit_scale"])
        )
        rate = None if closed or shown["rate"] is None else float(shown["rate"])
        if rate is None and shown["elapsed"] > 0:
            rate = (float(shown["n"]) - float(shown.get("initial") or 0)) / shown[
                "elapsed"
            ]
        new = Bar(
            id=_number(bar),
            desc=str(shown["prefix"] or "").removesuffix(": "),
            n=float(shown["n"]) * scale,
            total=None if shown["total"] is None else float(shown["total"]) * scale,
            unit=str(shown["unit"]),
            rate=None if rate is None else rate * scale,
            postfix="" if shown["postfix"] is None else str(shown["postfix"]),
            closed=closed,
        )
    except (TypeError, ValueError):
        return  # the user's code counts in objects that are no numbers
    setattr(bar, _SHOWN, True)
    _hook.post(new)

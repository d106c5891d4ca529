"""Why a call can't travel, as errors that name the variable and what to do."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import local_modules
from distmagic.payload.refused import MadeAlone, refuse
from distmagic.payload.sizes import allowance_gib, size_text
from distmagic.remote.values import parcel, unpicklable
from distmagic.remote.values.reductions.source_form import NoSource

Thunk = Callable[[], object]  # the call, with all that it captures
_NAMED_AT_MOST = 3
# Objects to which users give attributes or items of their own.
_CONTAINERS = (dict, list, tuple, set, SimpleNamespace, Namespace)
_INSIDE = "Create it inside the function"
_CURES = {
    unpicklable.TOO_DEEP: "Give its parts in a list, or create it inside the function",
    "an open file": "Open it inside the function, under a path that the hosts have",
    "a generator": "Create it inside the function, or make it a list",
    "a coroutine": "Call the async function inside, or end the cell with `await`",
    "a torch.jit.script function": "Apply torch.jit.script inside the function, to the plain one",
    "a torch.jit.script module": "Apply torch.jit.script inside the function, to the plain module",
    "a torch.library.custom_op": "Define it in a module next to the notebook, or inside the function",
    "a torch.compile function": "Call torch.compile inside the function, on the plain one",
    "a Run of distmagic": "Use what is in it, such as run.results[0]",
    "IPython itself": "There is no IPython on a rank: take get_ipython() and magics out of the function",
    "a widget": "A widget lives in the notebook only: use distmagic.report or tqdm inside the function",
    "a progress bar": "Create the bar inside the function; the notebook shows it anyway",
}


def cannot_travel(culprit: unpicklable.UnpicklablePart, thunk: Thunk) -> PayloadError:
    """Return the error for a part of a call that can't be pickled."""
    part = culprit.part
    user = _user(part, thunk).replace("the call", "The call")
    verb = "is" if part.path == "the call" else f"uses `{part.path}`,"
    why = f"which can't be pickled{culprit.detail}"
    if isinstance(culprit.error, MadeAlone):
        why = "which was made in the notebook. It has the notebook's rank and world size, so each rank would work alone"
    cure = _CURES.get(culprit.what, _INSIDE)
    message = f"{user} {verb} {culprit.what}, {why}."
    holder = _holder(culprit)
    if holder is not None:
        kind = unpicklable.describe(holder.value)
        message = f"{user} uses `{holder.path}`, {kind}, which holds {culprit.what} (`{part.path}`){culprit.detail}."
        cure = _INSIDE
    return PayloadError(
        message,
        f"{cure}; or write %%distributed --whole, and every rank runs the whole cell by itself.",
    )


def _holder(culprit: unpicklable.UnpicklablePart) -> unpicklable.ValuePart | None:
    """Return the object of a library that has a part in a private attribute; None if the user knows
    the part.
    """
    holder = None
    for around in reversed(culprit.around):
        kind = type(around.value)
        if issubclass(kind, _CONTAINERS):
            continue
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None or not local_modules.is_installed(file):
            break
        holder = around
    is_private = holder is not None and "._" in culprit.part.path[len(holder.path) :]
    return holder if is_private else None


def has_no_source(
    part: unpicklable.ValuePart,
    error: NoSource,
    host: str,
    version: tuple[int, ...],
    labels: Mapping[str, str],
) -> PayloadError:
    """Return the error for code without source, which the Python `version` of a host needs."""
    user = f", which {part.owner} uses," if part.owner not in ("", "cell") else ""
    why = error.why
    for name, label in labels.items():
        why = why.replace(name, label)
    theirs = ".".join(map(str, version[:2]))
    ours = ".".join(map(str, sys.version_info[:2]))
    return PayloadError(
        f"`{part.path}`{user} can't travel to {host} (Python {theirs}), because {why}.",
        f"{error.cure}; or name a Python of this notebook's version on that host, which runs its byte code: "
        f"--python {host}=/path/to/python{ours}.",
    )


def _user(part: unpicklable.ValuePart, thunk: Thunk) -> str:
    """Return the name of the function or class that uses a part, or "the call" for the nameless
    function.
    """
    is_call = part.owner in ("", getattr(thunk, "__qualname__", ""))
    return "the call" if is_call else part.owner


def too_large(thunk: Thunk, size_bytes: int, limit_bytes: int) -> PayloadTooLarge:
    """Return the error for a call above the limit; it names the largest variables."""
    sizes = [(_measure(part.value), part) for part in _variables(thunk)]
    sizes.sort(key=lambda pair: pair[0], reverse=True)
    large = [
        f"`{part.path}` ({size_text(size)}, used by {_user(part, thunk)})"
        for size, part in sizes[:_NAMED_AT_MOST]
        if size > limit_bytes / 50
    ]
    named = f" The largest: {', '.join(large)}." if large else ""
    total = max(size_bytes, sum(size for size, _ in sizes))
    return PayloadTooLarge(
        f"The call takes {size_text(total)} to send to every host; at most {size_text(limit_bytes)} are allowed.{named}",
        f"Load it inside the function, from the hosts' own disks; or allow it with --payload-limit {allowance_gib(total)}G.",
    )


def _variables(thunk: Thunk) -> Iterator[unpicklable.ValuePart]:
    """Yield every variable that is sent with a call, through all functions and classes pickled by
    value.
    """
    waiting = [unpicklable.ValuePart(owner="", path="the call", value=thunk)]
    seen = set[int]()
    while waiting:
        part = waiting.pop()
        if id(part.value) in seen:
            continue
        seen.add(id(part.value))
        if unpicklable.travels_by_value(part.value) or isinstance(
            part.value, (partial, MethodType)
        ):
            waiting += unpicklable.parts(part)
        elif not isinstance(part.value, (ModuleType, FunctionType, type)):
            yield part


def _measure(value: object) -> int:
    try:
        return parcel.measure(value, refuse=refuse)
    except Exception:  # noqa: BLE001 - whatever it raises: it is not what made the call too large
        return sys.getsizeof(value)

"""Turns a call into files: the pickled call, the code that it refers to, and its large values.

    call         parcel of a `Call` or a `Whole` (remote/values/call.py)
    code         zip: sources.json, the source of cells and their labels, and the paths of local
                 modules on this machine
    side files   the large values of the call, in separate files (remote/values/side_files.py)

An error names the variable with a value that can't be sent. For hosts with another Python version,
the call is packed again with its code as source (remote/values/reductions/source_form.py).
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import blobs, local_modules, on_ranks
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.local_modules import LocalModule
from distmagic.payload.refused import MadeAlone, refuse
from distmagic.payload.sizes import allowance_gib, size_text
from distmagic.payload.tree import Tree
from distmagic.remote.values import parcel, settings, unpicklable
from distmagic.remote.values.call import Call, Whole
from distmagic.remote.values.pickling import going_by_value
from distmagic.remote.values.reductions.source_form import (
    NoSource,
    SourceForm,
    codes_in,
    names_in,
)
from distmagic.remote.values.seen import Seen
from distmagic.remote.wire.protocol import Blob

Thunk = Callable[[], object]  # the call, with all that it captures
_NAMED_AT_MOST = 3
_NO_GPU = ("cpu", "mps", "gloo")
_BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME")


@dataclass(frozen=True, kw_only=True)
class OtherPython:
    """The oldest Python of those hosts that have another minor version than this machine; `host`
    has it.
    """

    host: str
    version: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The files that every rank of a job gets.

    Equal calls give equal files, which are not sent again to a host that has them.
    """

    call: LocalBlob  # the pickled call
    code: LocalBlob  # the source of cells, and data about local modules
    side_files: tuple[LocalBlob, ...] = ()  # large values of the call
    modules: tuple[LocalModule, ...] = ()  # the local modules that the call needs
    folder: Path | None = None  # the folder of a script
    # Folders in the working directory from which a script also imports.
    roots: tuple[str, ...] = ()
    script: Path | None = None  # the script's own file
    name: str = ""  # the default name of its working directory, "" for a cell
    notice: str = ""  # a message for the user about the files
    # The variable of the call that names another device than a GPU, with it: "device is cpu".
    device: str = ""
    # The top-level modules that the call's functions and values need, and those of `logging` and
    # `warnings`, which any module may use.
    uses: frozenset[str] = frozenset()
    # This process's settings for ranks, and the same in words.
    settings: tuple[str, str] = ("", "")
    title: str = ""  # the call as the user wrote it
    # Folder and modules as blobs, None before it is known that a host needs them
    # (payload/work_files.py).
    tree: Tree | None = None
    limit_bytes: int = sys.maxsize  # includes `tree`
    # Packs the same without byte code, which only the same minor version of Python can run; None if
    # there is no byte code.
    in_source: Callable[[OtherPython], Payload] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def blobs(self) -> tuple[LocalBlob, ...]:
        """All its files."""
        return (
            self.call,
            self.code,
            *self.side_files,
            *(self.tree.blobs if self.tree else ()),
        )


def pack_call(
    thunk: Thunk,
    *,
    limit_bytes: int,
    labels: Mapping[str, str],
    title: str = "",
    other: OtherPython | None = None,
) -> Payload:
    """Pack a function without arguments, with all that it captures; without byte code, if hosts
    have an `other` Python.

    `labels` maps a cell's filename to its label (`Cell In[3]`). `title` is the call as the user
    wrote it, complete if the function is a cell's call. The files are stored in this machine's
    folder of blobs. Raises `PayloadError` for a value that can't be pickled, and `PayloadTooLarge`
    above `limit_bytes`.
    """
    seen = Seen()
    names = _namespace(thunk)
    code = getattr(thunk, "__code__", None)
    is_of_cell = code is not None and code.co_name == "<module>"
    source = None
    if other is not None:
        source = SourceForm(other.version, code if is_of_cell else None, title)
    with _explained(thunk, limit_bytes, labels, other):
        call = dumped(Call(thunk), seen, limit_bytes, source, names)
        # Gradients double the size of a model, so they only travel to code that looks at them.
        if seen.has_gradients and any("grad" in one.co_names for one in _codes(seen)):
            seen = Seen(takes_gradients=True)
            call = dumped(Call(thunk), seen, limit_bytes, source, names)
    codes = _codes(seen)
    captured = frozenset(seen.modules)
    modules = captured.union(*map(local_modules.imports_of_code, codes))
    found = local_modules.found(modules)
    texts = texts_of(seen.codes)
    shown = on_ranks.look(
        [*on_ranks.of_codes(codes, texts, labels), *on_ranks.of_modules(found)],
        modules,
        captured,
        on_ranks.other_names(names),
    )
    used = ["logging", "warnings", *(module.name for module in found), *modules]
    return Payload(
        call=call,
        code=write_code(found, texts, labels, shown),
        # Equal files only once.
        side_files=tuple(
            _local(one.sha256, one.size_bytes) for one in dict.fromkeys(seen.side_files)
        ),
        modules=found,
        title=title,
        notice=shown.notice,
        device=_device(names, seen.codes),
        uses=frozenset(name.partition(".")[0] for name in used),
        settings=settings.read(),
        limit_bytes=limit_bytes,
        in_source=None
        if other
        else lambda python: pack_call(
            thunk, limit_bytes=limit_bytes, labels=labels, title=title, other=python
        ),
    )


def _codes(seen: Seen) -> list[CodeType]:
    # A pickle of source does not name the functions inside a function.
    return [inner for one in seen.codes for inner in codes_in(one)]


def _device(names: Mapping[str, object], codes: Sequence[CodeType]) -> str:
    """Return the variable of the code that names another device than a GPU, or gloo; "" for none.

    A cell chooses it by `torch.cuda.is_available()` on the notebook machine, which may have no GPU.
    """
    mentioned = {
        name for code in codes for one in codes_in(code) for name in one.co_names
    }
    for name in sorted(mentioned & names.keys()):
        for label, value in _choices(name, names[name]):
            is_text = type(value) is str or type(value).__name__ == "device"
            text = str(value) if is_text else ""
            is_choice = text in _NO_GPU and text not in label.lower()
            if name == "map_location":
                continue  # of `torch.load`: no device to train on
            if is_choice and any(name in names_in(one, *_BY_NAME) for one in codes):
                return f"{label} is {text}"
    return ""


def _choices(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a value and what it has under such names, each with its expression."""
    yield name, value
    for key in ("device", "backend"):
        if type(value) is dict:
            yield f"{name}[{key!r}]", value.get(key)
        elif not isinstance(value, ModuleType):
            yield f"{name}.{key}", inspect.getattr_static(value, key, None)


def _namespace(thunk: Thunk) -> Mapping[str, object]:
    """Return the names of the notebook or program that makes the call."""
    function = thunk.func if isinstance(thunk, partial) else thunk
    names: Mapping[str, object] = getattr(function, "__globals__", {})
    return (
        names if names.get("__name__") == "__main__" else vars(sys.modules["__main__"])
    )


@contextmanager
def _explained(
    thunk: Thunk,
    limit_bytes: int,
    labels: Mapping[str, str],
    other: OtherPython | None,
) -> Iterator[None]:
    """Raise errors of the block, in which a call is packed, as errors that name the variable."""
    try:
        yield
    except parcel.Unpicklable as error:
        cause = error.cause
        if other is not None and isinstance(cause.error, NoSource):
            raise _has_no_source(cause.part, cause.error, other, labels) from error
        raise _cannot_travel(cause, thunk) from error
    except parcel.TooLarge as error:
        raise _too_large(thunk, error.size_bytes, limit_bytes) from None


def pack_whole(
    text: str, *, filename: str, labels: Mapping[str, str], limit_bytes: int, argv: tuple[str, ...] = (),
    title: str = "",
) -> Payload:  # fmt: skip
    """Pack the text of a cell that runs as a whole on every rank, in `__main__`.

    With `argv` it runs as a script with these arguments. All else is like `pack_call`.
    """
    if len(text) > limit_bytes:
        raise PayloadError(
            f"The cell's text has {size_text(len(text))}; at most {size_text(limit_bytes)} may be sent."
        )
    call = dumped(Whole(text, filename, argv), Seen(), None)
    found = local_modules.found(local_modules.imports_of_text(text))
    own = (labels.get(filename, filename), text, None)
    shown = on_ranks.look([own, *on_ranks.of_modules(found)])
    return Payload(
        call=call,
        code=write_code(found, {filename: text}, labels, shown),
        modules=found,
        title=title,
        notice=shown.notice,
        limit_bytes=limit_bytes,
    )


def dumped(
    what: object, seen: Seen, limit_bytes: int | None,
    source: SourceForm | None = None, namespace: Mapping[str, object] | None = None, *, in_one: bool = False,
) -> LocalBlob:  # fmt: skip
    """Write the parcel for the ranks. Raises `PayloadError`, and `parcel`'s errors.

    Large values get separate files, unless all must be `in_one`.
    """
    folder = blobs.folder()
    aside = Path(tempfile.mkdtemp(dir=folder, prefix=".payload-"))
    try:
        with going_by_value(local_modules.loaded_by_path()):
            size = parcel.dump(
                what,
                aside / "call",
                seen=seen,
                refuse=refuse,
                limit_bytes=limit_bytes,
                name="the call",
                beside=None if in_one else folder,
                source=source,
                namespace=namespace,
            )
        call = _local(seen.sha256.hexdigest(), size)
        (aside / "call").replace(call.path)
    except OSError as error:
        raise PayloadError(
            f"The payload can't be written to {folder}: {error}.",
            "Make room in that folder.",
        ) from error
    finally:
        aside.rmdir()
    return call


def _local(sha256: str, size_bytes: int) -> LocalBlob:
    return LocalBlob(
        blob=Blob(sha256=sha256, size_bytes=size_bytes), path=blobs.folder() / sha256
    )


def write_code(
    modules: Iterable[LocalModule],
    texts: Mapping[str, str],
    labels: Mapping[str, str],
    shown: on_ranks.OnRanks,
) -> LocalBlob:
    """Write the data about the user's code: texts and labels of cells, paths of local modules, this
    machine's Python version.

    It also lists what may be preloaded in its ranks, and what to preload for the next ones.
    """
    loaded = shown.may_be_loaded
    sources = {
        "texts": texts,
        "labels": {name: labels[name] for name in texts if name in labels},
        "roots": sorted({str(module.root) for module in modules}),
        "python": sys.version_info[:2],
        "may_be_loaded": None if loaded is None else sorted(loaded),
        "imports": sorted(shown.imports),
    }
    data = json.dumps(sources, sort_keys=True).encode()
    return blobs.keep(blobs.zipped({"sources.json": data}), blobs.folder())


def texts_of(codes: Iterable[CodeType]) -> dict[str, str]:
    """Return the text of every cell, or script, with code that is sent."""
    texts = {}
    for name in sorted({code.co_filename for code in codes}):
        lines = () if local_modules.is_installed(name) else linecache.getlines(name)
        if lines:
            texts[name] = "".join(lines)
    return texts


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


def _cannot_travel(culprit: unpicklable.UnpicklablePart, thunk: Thunk) -> PayloadError:
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


def _has_no_source(
    part: unpicklable.ValuePart,
    error: NoSource,
    other: OtherPython,
    labels: Mapping[str, str],
) -> PayloadError:
    user = f", which {part.owner} uses," if part.owner not in ("", "cell") else ""
    why = error.why
    for name, label in labels.items():
        why = why.replace(name, label)
    theirs = ".".join(map(str, other.version[:2]))
    ours = ".".join(map(str, sys.version_info[:2]))
    return PayloadError(
        f"`{part.path}`{user} can't travel to {other.host} (Python {theirs}), because {why}.",
        f"{error.cure}; or name a Python of this notebook's version on that host, which runs its byte code: "
        f"--python {other.host}=/path/to/python{ours}.",
    )


def _user(part: unpicklable.ValuePart, thunk: Thunk) -> str:
    """Return the name of the function or class that uses a part, or "the call" for the nameless
    function.
    """
    is_call = part.owner in ("", getattr(thunk, "__qualname__", ""))
    return "the call" if is_call else part.owner


def _too_large(thunk: Thunk, size_bytes: int, limit_bytes: int) -> PayloadTooLarge:
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

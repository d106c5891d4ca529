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
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

from distmagic.errors import PayloadError
from distmagic.payload import blobs, local_modules, on_ranks
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.local_modules import LocalModule
from distmagic.payload.pack_errors import (
    Thunk,
    cannot_travel,
    has_no_source,
    too_large,
)
from distmagic.payload.refused import refuse
from distmagic.payload.sizes import size_text
from distmagic.payload.tree import Tree
from distmagic.remote.frozen import frozen
from distmagic.remote.records.atomic_file import discard
from distmagic.remote.values import parcel, settings
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

_NO_GPU = ("cpu", "mps", "gloo")
_BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME")


@frozen
class OtherPython:
    """The oldest Python of those hosts that have another minor version than this machine; `host`
    has it.
    """

    host: str
    version: tuple[int, ...]


@frozen
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
    try:
        call = dumped(Call(thunk), seen, limit_bytes, source, names)
        # Gradients double the size of a model, so they only travel to code that looks at them.
        if seen.has_gradients and any("grad" in one.co_names for one in _codes(seen)):
            seen = Seen(takes_gradients=True)
            call = dumped(Call(thunk), seen, limit_bytes, source, names)
    except parcel.Unpicklable as error:
        cause = error.cause
        if other is not None and isinstance(cause.error, NoSource):
            raise has_no_source(
                cause.part, cause.error, other.host, other.version, labels
            ) from error
        raise cannot_travel(cause, thunk) from error
    except parcel.TooLarge as error:
        raise too_large(thunk, error.size_bytes, limit_bytes) from None
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
            LocalBlob(blob=one, path=blobs.folder() / one.sha256)
            for one in dict.fromkeys(seen.side_files)
        ),
        modules=found,
        title=title,
        notice=shown.notice,
        device=_device(names, codes),
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
    mentioned = {name for code in codes for name in code.co_names}
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
    aside = folder / f".payload-{secrets.token_hex(8)}"
    try:
        with going_by_value(local_modules.loaded_by_path()):
            size = parcel.dump(
                what,
                aside,
                seen=seen,
                refuse=refuse,
                limit_bytes=limit_bytes,
                name="the call",
                beside=None if in_one else folder,
                source=source,
                namespace=namespace,
            )
        blob = Blob(sha256=seen.sha256.hexdigest(), size_bytes=size)
        aside.replace(folder / blob.sha256)
    except OSError as error:
        raise PayloadError(
            f"The payload can't be written to {folder}: {error}.",
            "Make room in that folder.",
        ) from error
    finally:
        discard(aside)
    return LocalBlob(blob=blob, path=folder / blob.sha256)


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

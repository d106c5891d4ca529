"""Which names of the notebook follow a cell to ranks that stay, and the cell with them as a parcel. Sends nothing."""

from __future__ import annotations

import inspect
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import blobs, local_modules
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import dumped, texts_of
from distmagic.payload.refused import refuse
from distmagic.payload.sizes import size_text
from distmagic.remote.values import parcel
from distmagic.remote.values.call import Cell
from distmagic.remote.values.pickling import Seen
from distmagic.remote.values.source_form import SourceForm
from distmagic.request.cell import CellPlan, names_wanted

MOST_BYTES = 1 << 20  # of one value
_SHOWN = (int, float, bool, type(None))  # whose values are no secrets


@dataclass(frozen=True, kw_only=True)
class CellParcel:
    """A cell, packed. `digests` are those of all names that it uses here, `notice` says which of them are sent.

    `modules` are the names of those that the cell and these values import.
    """

    parcel: LocalBlob
    digests: Mapping[str, str]
    notice: str
    modules: frozenset[str]


def prepared(
    plan: CellPlan,
    notebook: Mapping[str, object],
    theirs: Iterable[str],
    there: Mapping[str, str],
    labels: Mapping[str, str],
    pythons: Iterable[tuple[int, ...]] = (),
) -> CellParcel:
    """Pack a cell with those names of the `notebook` that it uses, and that are not `theirs`.

    `there` are the digests of values that the ranks have from here, `pythons` the hosts' versions. Raises `PayloadError` for a value that can't be
    sent, and `PayloadTooLarge` for one above 1 MiB.
    """
    own = {name: value for name, value in notebook.items() if name not in set(theirs)}
    digests = {}
    sent: dict[str, object] = {}
    codes: list[types.CodeType] = []
    modules = set(local_modules.imports_of_text(plan.text))
    for name in used(plan, own):
        value = alone(own[name])
        digest, seen = _digest(name, value, form_for(pythons))
        digests[name] = digest
        modules |= seen.modules
        for code in seen.codes:
            modules.update(local_modules.imports_of_code(code))
        if there.get(name) != digest:
            sent[name] = value
            codes += seen.codes
    texts = {**texts_of(codes), plan.filename: plan.text}
    cell = Cell(
        source=plan.text,
        filename=plan.filename,
        names=sent,
        texts=texts,
        labels={name: labels[name] for name in texts if name in labels},
    )
    words = ", ".join(_words(name, value, labels) for name, value in sent.items())
    return CellParcel(
        parcel=dumped(cell, Seen(), None, form_for(pythons), in_one=True),
        digests=digests,
        notice=f"From the notebook: {words}." if words else "",
        modules=frozenset(modules),
    )


def form_for(pythons: Iterable[tuple[int, ...]]) -> SourceForm | None:
    """Return how to write code for hosts where one has another Python, None where this one's byte code runs on all."""
    others = {version[:2] for version in pythons} - {sys.version_info[:2]}
    return SourceForm(min(others)) if others else None


def used(plan: CellPlan, notebook: Mapping[str, object]) -> list[str]:
    """Return the names of the notebook that a cell uses, and that functions and classes among them use, in turn."""
    found: dict[str, None] = {}
    waiting = list(names_wanted(plan))
    while waiting:
        name = waiting.pop(0)
        if name in notebook and name not in found:
            found[name] = None
            waiting += _names_in(notebook[name])
    return list(found)


def _names_in(value: object) -> Iterator[str]:
    """Yield the global names that the code of a function or a class of the notebook mentions."""
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, types.FunctionType):
        if function.__module__ == "__main__":
            yield from _names_of_code(function.__code__)
    elif isinstance(value, type) and value.__module__ == "__main__":
        for member in vars(value).values():
            for one in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):  # fmt: skip
                if isinstance(one, types.FunctionType):
                    yield from _names_in(one)


def _names_of_code(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_of_code(const)


def alone(value: object) -> object:
    """Return a twin of a function of the notebook without its globals, which follow by their own names."""
    if type(value) is not types.FunctionType or value.__module__ != "__main__":
        return value
    twin = types.FunctionType(
        value.__code__,
        {"__name__": "__main__", "__builtins__": __builtins__},
        value.__name__,
        value.__defaults__,
        value.__closure__,
    )
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):  # fmt: skip
        setattr(twin, name, getattr(value, name))
    vars(twin).update(vars(value))
    return twin


def _digest(name: str, value: object, source: SourceForm | None) -> tuple[str, Seen]:
    """Return the digest of a value as it would be sent, and what it refers to."""
    seen = Seen()
    with tempfile.NamedTemporaryFile(dir=blobs.folder(), prefix=".value-") as file:
        try:
            parcel.dump(
                value,
                Path(file.name),
                seen=seen,
                refuse=refuse,
                limit_bytes=MOST_BYTES,
                name=name,
                source=source,
            )
        except parcel.TooLarge as error:
            raise PayloadTooLarge(
                f"{name} takes {size_text(error.size_bytes)}; a value up to {size_text(MOST_BYTES)} follows the notebook "
                "by itself.",
                "Make it in a cell on the ranks, from the hosts' own disks.",
            ) from None
        except parcel.Unpicklable as error:
            raise PayloadError(
                f"The cell uses {name} of the notebook, and {error.cause.sentence}.",
                f"Make {name} in a cell on the ranks.",
            ) from error
    return seen.sha256.hexdigest(), seen


def _words(name: str, value: object, labels: Mapping[str, str]) -> str:
    code = getattr(value, "__code__", None)
    label = labels.get(code.co_filename, "") if code is not None else ""
    if label:
        return f"{name} ({label})"
    return f"{name} = {value!r}" if isinstance(value, _SHOWN) else name

"""Chooses the names of the notebook that a cell on ranks that stay needs, and packs both. Sends nothing."""

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

MOST_BYTES = 1 << 20  # size limit of one value
# Types whose values may be shown, because they hold no secrets.
_SHOWN = (int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True)
class CellParcel:
    """A packed cell. `digests` has all names of the notebook that it uses; `notice` lists those that are sent.

    `modules` are the names of the modules that the cell and these values import.
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
    """Pack a cell with the names of `notebook` that it uses, except `theirs`, which cells on the ranks have assigned.

    `there` are the digests of values that were sent to the ranks before, and `pythons` the hosts' Python versions.
    Raises `PayloadError` for a value that can't be sent, and `PayloadTooLarge` for one above 1 MiB.
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
        is_users=True,
    )
    words = ", ".join(_words(name, value, labels) for name, value in sent.items())
    return CellParcel(
        parcel=dumped(cell, Seen(), None, form_for(pythons), in_one=True),
        digests=digests,
        notice=f"From the notebook: {words}." if words else "",
        modules=frozenset(modules),
    )


def form_for(pythons: Iterable[tuple[int, ...]]) -> SourceForm | None:
    """Return the source form for code if a host has another Python version; None if all can run this version's byte
    code.
    """
    others = {version[:2] for version in pythons} - {sys.version_info[:2]}
    return SourceForm(min(others)) if others else None


def used(plan: CellPlan, notebook: Mapping[str, object]) -> list[str]:
    """Return the names of the notebook that a cell uses, including those that its functions and classes use in turn."""
    found: dict[str, None] = {}
    waiting = list(names_wanted(plan))
    while waiting:
        name = waiting.pop(0)
        if name in notebook and name not in found:
            found[name] = None
            waiting += _names_in(notebook[name])
    return list(found)


def _names_in(value: object) -> Iterator[str]:
    """Yield the global names in the code of a function or class that the notebook defined."""
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
    """Return a copy of a notebook function without its globals, which are sent separately by name."""
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
    """Return the digest of a value as it would be sent, and the objects it refers to."""
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

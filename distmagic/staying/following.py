"""Chooses the names of the notebook that a cell on ranks that stay needs, and packs both.

Sends nothing.
"""

from __future__ import annotations

import ast
import dis
import functools
import sys
import types
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import local_modules
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import dumped, texts_of
from distmagic.payload.refused import refuse
from distmagic.payload.sizes import size_text
from distmagic.remote.frozen import frozen
from distmagic.remote.values import parcel
from distmagic.remote.values.call import Cell
from distmagic.remote.values.reductions.source_form import SourceForm, names_in
from distmagic.remote.values.seen import Seen
from distmagic.request.cells.cell import CellPlan

MOST_BYTES = 1 << 20  # size limit of one value
# Types whose values may be shown, because they hold no secrets.
_SHOWN = (int, float, bool, type(None))
_CANT_BE_SENT = "can't be sent"  # in place of a digest
_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_GLOBAL = "STORE_GLOBAL"  # an assignment in a function with `global`
_ASSIGNS = ("STORE_NAME", _BY_GLOBAL)


@frozen
class CellParcel:
    """A packed cell."""

    parcel: LocalBlob
    # of the names of the notebook that ranks have when the cell has begun
    digests: Mapping[str, str]
    notice: str  # lists the names that are sent
    # names of the modules that the cell and these values import
    modules: set[str]


def prepared(
    plan: CellPlan,
    notebook: Mapping[str, object],
    theirs: Iterable[str],
    there: Mapping[str, str],
    labels: Mapping[str, str],
    pythons: Iterable[tuple[int, ...]] = (),
    some_ranks: Iterable[str] = (),
) -> CellParcel:
    """Pack a cell with the names of `notebook` that it uses, except `theirs`, which cells on the
    ranks have assigned.

    `there` are the digests of values that were sent to the ranks before, and `pythons` the hosts'
    Python versions. Values sent before are sent again when they have changed: functions that live
    on the ranks may use them. Raises `PayloadError` for a value that can't be sent, and
    `PayloadTooLarge` for one above 1 MiB, unless the cell, or a cell on `some_ranks`, assigns that
    name.
    """
    theirs = set(theirs)
    source = form_for(pythons)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: types.CodeType = compile(
        plan.text, plan.filename, "exec", flags, dont_inherit=True
    )
    # The names that the cell assigns, also in its functions.
    assigned = [one.argval for one in dis.get_instructions(code) if one.opname in _ASSIGNS]  # fmt: skip
    optional = {*some_ranks, *assigned, *names_in(code, _BY_GLOBAL)}
    own = {name: value for name, value in notebook.items() if name not in theirs}
    needed = _needed(code, own, there, optional, source)
    texts = {**texts_of(needed.codes), plan.filename: plan.text}
    cell = Cell(
        source=plan.text,
        filename=plan.filename,
        names=needed.sent,
        texts=texts,
        labels={name: labels[name] for name in texts if name in labels},
        is_users=True,
    )
    digests = {name: there[name] for name in there.keys() - theirs} | needed.digests
    for name in names_in(code, "DELETE_NAME", "DELETE_GLOBAL"):
        digests.pop(name, None)
    return CellParcel(
        parcel=dumped(cell, Seen(only=needed.sent), None, source, in_one=True),
        digests=digests,
        notice=_notice(needed, labels),
        modules=needed.modules.union(local_modules.imports_of_text(plan.text)),
    )


@dataclass
class _Needed:
    """The values of the notebook for one cell."""

    digests: dict[str, str] = field(default_factory=dict)  # the digest of each value
    sent: dict[str, object] = field(default_factory=dict)  # values to be sent
    # values that have changed and can't be sent
    outdated: list[str] = field(default_factory=list)
    # code of the values to be sent
    codes: list[types.CodeType] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)  # modules that the values import


def _needed(
    code: types.CodeType,
    own: Mapping[str, object],
    there: Mapping[str, str],
    optional: Container[str],
    source: SourceForm | None,
) -> _Needed:
    """Return the values of the names that a cell uses, of those that these use in turn, and of
    those sent before.

    Raises `PayloadError` for a value that the cell uses and that can't be sent, unless its name is
    `optional`.
    """
    found = _Needed()
    # The names that the cell uses; those that its functions and classes use in turn follow.
    waiting = list(_names_read(code))
    used = set(waiting)
    waiting += there
    while waiting:
        name = waiting.pop(0)
        if name in found.digests or name not in own:
            continue
        try:
            digest, seen = _digest(name, own[name], source)
        except PayloadError:
            if name in used and name not in optional:
                raise
            if there.get(name, _CANT_BE_SENT) != _CANT_BE_SENT:
                found.outdated.append(name)
            found.digests[name] = _CANT_BE_SENT
            continue
        found.digests[name] = digest
        found.modules |= seen.modules
        for used_code in seen.codes:
            found.modules.update(local_modules.imports_of_code(used_code))
        # Functions in it go without their globals.
        more = [name for one in seen.codes for name in _names_read(one)]
        waiting[:0] = more
        used.update(more if name in used else ())
        if there.get(name) != digest:
            found.sent[name] = own[name]
            found.codes += seen.codes
    return found


def _notice(needed: _Needed, labels: Mapping[str, str]) -> str:
    found = []
    if needed.sent:
        words = [_words(name, value, labels) for name, value in needed.sent.items()]
        found.append(f"From the notebook: {', '.join(words)}.")
    if needed.outdated:
        found.append(
            f"Changed in the notebook, but too large to be sent again, or not picklable: {', '.join(needed.outdated)}."
        )
    return " ".join(found)


def form_for(pythons: Iterable[tuple[int, ...]]) -> SourceForm | None:
    """Return the source form for code if a host has another Python version; None if all can run
    this version's byte code.
    """
    others = {version[:2] for version in pythons} - {sys.version_info[:2]}
    return SourceForm(min(others)) if others else None


@functools.lru_cache(2_000)
def _names_read(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that code and the functions in it read before the code has assigned
    them.
    """
    found = []
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    made = {name for one in inner for name in names_in(one, _BY_GLOBAL)}
    for step in dis.get_instructions(code):
        if step.opname in _ASSIGNS:
            made.add(step.argval)
        elif step.opname in _READS and step.argval not in made:
            found.append(step.argval)
    is_cell = code.co_name == "<module>"  # the names of a class are its own
    for one in inner:
        found += (name for name in _names_read(one) if not (is_cell and name in made))
    return tuple(found)


def _digest(name: str, value: object, source: SourceForm | None) -> tuple[str, Seen]:
    """Return the digest of a value as it would be sent, and the objects it refers to."""
    seen = Seen(only=())
    try:
        parcel.dump(
            value,
            None,
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
            f'Send it once: ranks["{name}"] = {name}; or make it in a cell on the ranks, from the hosts\' own disks.',
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

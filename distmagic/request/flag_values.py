"""Flags, and options: fields of a request that declare a flag, a keyword argument and a help text
at once. Pure.

Below are the parsers of their values. Each raises `UsageError`, naming the flag.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from distmagic.errors import UsageError
from distmagic.request.command_prefix import ENVIRONMENT

# The help's headings, in the order of help/flags.md.
HEADINGS = {
    "torchrun": "torchrun's flags: change the number of ranks, hosts and restarts",
    "hosts": "Hosts",
    "nodes": "Nodes of a scheduler",
    "files": "Files instead of a run",
    "ranks": "The ranks",
    "times": "How long a run may take: time limits",
}
Pairs = tuple[tuple[str, str], ...]  # names with their values
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}
_UNITS_BYTES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_DIGITS = 9  # limit for any sensible number
DAY_S = 86400.0
ANY_TIME = (1e-9, math.inf, "a time", "Use a number of seconds above 0.")


@dataclass(frozen=True)
class Flag:
    """One flag of the line.

    heading    its heading in the help, from `HEADINGS`
    metavar    name of its value in the help, "" for a switch
    read       converts its text to the value; errors start with the flag, its second argument
    repeats    whether it may be repeated
    not_with   which of "export", "workflow" and "stay" reject it; systems/osmo/run.py has more
               about some flags
    argument   help of the keyword of `distmagic.run`, "" if the flag's help fits
    """

    name: str
    heading: str
    help: str
    metavar: str = ""
    read: Callable[[str, str], object] = lambda text, _: text
    repeats: bool = False
    not_with: str = ""
    argument: str = ""


def option(  # noqa: PLR0913  # all that an option is
    heading: str,
    text: str,
    metavar: str = "",
    *,
    default: object = None,
    name: str = "",
    is_secret: bool = False,
    choices: Sequence[str] = (),
    within: tuple[float, float, str, str] = (-math.inf, math.inf, "", ""),
    **more: Any,
) -> Any:
    """Declare a field of a request as an option: a flag of the line and a keyword of
    `distmagic.run`.

    Both have the field's name, or `name`; the flag has hyphens, and no `_s` for times. `text` and
    `more` are those of `Flag`. A secret value is in no `repr`. `choices` are all its values, if
    limited. `within` has the min and max number, what a wrong number is not, and the cure.
    """
    metadata = {
        "name": name,
        "flag": (heading, text, metavar),
        "more": more,
        "choices": choices,
        "within": within,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


def check_values(request: Any) -> None:
    """Raise `UsageError` if an option of a request has an invalid value."""
    refuse_zero_bytes(request)
    for one in fields(request):
        value = getattr(request, one.name)
        flag = f"--{one.name.removesuffix('_s').replace('_', '-')}"
        check_number(one, value, flag)
        choices = one.metadata.get("choices", ())
        if choices and value not in (None, *choices):
            raise UsageError(
                f"{flag} {value!r} is not known.", f"Use {' or '.join(choices)}."
            )


def check_number(one: Field[Any], value: object, where: str) -> None:
    """Raise `UsageError` naming `where` for a number outside an option's range."""
    if isinstance(value, int | float) and "within" in one.metadata:
        least, most, kind, cure = one.metadata["within"]
        if not least <= value <= most:
            raise UsageError(f"{where} {value:.10g} is not {kind}.", cure)


def options_of(record: Any) -> dict[str, Flag]:
    """Return the flags of the options of a class of requests, by their keywords in
    `distmagic.run`.
    """
    found = {}
    for one in fields(record):
        if not one.metadata:
            continue  # only a setting
        argument = one.metadata["name"] or one.name
        name = argument.removesuffix("_s").replace("_", "-")
        found[argument] = Flag(name, *one.metadata["flag"], **one.metadata["more"])
    return found


# ---- parsers of values


def parse_duration(text: str, where: str) -> float:
    """Return the seconds in `90`, `90s`, `10m` or `2h`. Raises `UsageError` naming `where`."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(
            f"{where}: {text!r} is not a time.",
            "Write seconds, or a number with a unit: 90s, 10m, 2h.",
        )
    return float(found[1]) * _UNITS_S[found[2]]


def rank_numbers(text: str, where: str) -> tuple[int, ...]:
    """Return the ranks in `0,4-7`, in ascending order. Raises `UsageError` naming `where`."""
    found = set[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not re.fullmatch(r"\d{1,5}(-\d{1,5})?", part) or int(last or first) < int(first):  # fmt: skip
            raise UsageError(
                f"{where}: {text!r} is not a list of ranks.", "Write 0,4-7."
            )
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def parse_size(text: str, where: str) -> int:
    """Return the bytes in `1000000`, `512K`, `256M` or `2G` (powers of 1024).

    Raises `UsageError` naming `where`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", text.strip().upper())
    size_bytes = int(float(found[1]) * _UNITS_BYTES[found[2]]) if found else 0
    if size_bytes < 1:
        raise UsageError(
            f"{where}: {text!r} is not a size.",
            "Write bytes, or a number with a unit: 512K, 256M, 2G.",
        )
    return size_bytes


def whole_number(text: str, where: str) -> int:
    """Return a whole number. Raises `UsageError` naming `where`."""
    if re.fullmatch(r"[+-]?\d+", text) is None:
        raise UsageError(f"{where}: {text!r} is not a whole number.")
    if len(text) > _DIGITS:
        raise UsageError(f"{where}: {text[:_DIGITS]}... is too large.")
    return int(text)


def time_or_zero(text: str, where: str) -> float:
    """Return a time in seconds, which may be 0. Raises `UsageError` naming `where`."""
    return 0.0 if text.strip() == "0" else parse_duration(text, where)


def nnodes(text: str, where: str) -> tuple[int, int]:
    """Return the min and max number of nodes in `2` or `1:4`."""
    found = re.fullmatch(r"(-?\d{1,9})(?::(-?\d{1,9}))?", text)
    if found is None:
        raise UsageError(
            f"{where}: {text!r} is not a number of nodes.",
            f"Write {where} 2 or {where} 1:4.",
        )
    return int(found[1]), int(found[2] or found[1])


def python(text: str, where: str) -> tuple[str, str]:
    """Return (host, path) of `HOST=PATH`, or ("", path) for all hosts."""
    host, equals, path = text.partition("=")
    if not equals or "/" in host:  # a path that contains =
        host, path = "", text
    if not path.removeprefix(ENVIRONMENT):
        raise UsageError(
            f"{where} {text!r} names no interpreter.",
            f"Write {where} PATH or {where} HOST=PATH.",
        )
    return host, path


def device_list(text: str, _: str) -> tuple[str, ...]:
    """Return the devices in `0,1`, as written."""
    return tuple(text.split(",")) if text else ()


def sbatch_option(text: str, _: str) -> tuple[str, str]:
    """Return (name, value) of `NAME=VALUE`, or (name, "") of a switch."""
    name, _, value = text.partition("=")
    return name.removeprefix("--"), value


def variable_name(text: str, where: str) -> str:
    """Return the name of a variable of the notebook. Raises `UsageError` naming `where`."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise UsageError(
            f"{where} {text!r} can't be the name of a variable in Python.",
            f"Write {where} run.",
        )
    return text


def refuse_zero_bytes(request: Any, what: str = "--") -> None:
    """Raise `UsageError` if a text in a request contains a NUL byte; `what` is the prefix of the
    field's name.
    """
    for one in fields(request):
        if any("\0" in text for text in _texts(getattr(request, one.name))):
            raise UsageError(
                f"{what}{one.name.replace('_', '-')} has a zero byte in it.",
                "No shell and no process takes one.",
            )


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _texts(inner)

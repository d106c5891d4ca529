"""A script with its arguments, as `%distributed run` and `distmagic run` take it: `--hosts gpu-a train.py 50 --lr 0.1`. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from distmagic.errors import SpecError
from distmagic.request import flag_parser
from distmagic.request.flag_values import refuse_zero_bytes

USAGE = "run [FLAGS] SCRIPT [ARGUMENTS], or run [FLAGS] -m MODULE [ARGUMENTS]"

# Programs that start the one behind them.
_STARTERS = re.compile(
    r"(\S*/)?(python[\d.]*( -[BEIOsu]+)*|torchrun|deepspeed|mpirun|accelerate[ -]launch|fabric run|lightning run model) "
    r"|-m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch) "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank runs: a script's path on this machine, or a module's name, and its arguments. Raises `SpecError`."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        refuse_zero_bytes(self, "the program's ")


def split_program(words: Sequence[str]) -> tuple[tuple[str, ...], Program]:
    """Return the flags in front of a program, and the program. What follows its name is all its own.

    Raises `SpecError` where no program is named, or one that starts others, as torchrun does.
    """
    place = 0
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "-m":
            _refuse_starter(words, place)
            return tuple(words[:place]), _module(words[place + 1 :])
        if words[place] == "--":
            place += 1
            break
        place += 1 + flag_parser.values_after(words[place])
    if place >= len(words):
        raise SpecError("No script is named.", f"Write {USAGE}.")
    _refuse_starter(words, place)
    before = [word for word in words[:place] if word != "--"]
    return tuple(before), Program(target=words[place], args=tuple(words[place + 1 :]))


def _refuse_starter(words: Sequence[str], place: int) -> None:
    text = rest = f"{shlex.join(words[place:])} "
    while found := _STARTERS.match(rest):
        rest = rest[found.end() :]
    if rest != text:
        line = f"{shlex.join(words[:place])} {rest or 'SCRIPT'}".strip()
        raise SpecError(
            f"{text.removesuffix(rest)}starts programs, as this command does.",
            f"Leave it out: %distributed run {line}",
        )


def _module(words: Sequence[str]) -> Program:
    if not words or not all(part.isidentifier() for part in words[0].split(".")):
        raise SpecError(
            f"-m {' '.join(words[:1])}: this is not a module's name.",
            "Write -m package.module.",
        )
    return Program(target=words[0], args=tuple(words[1:]), is_module=True)

"""Flags of a line: the parser, its errors, the help text and the names for completion. Pure.

All of it is derived from flag_table.py.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from distmagic.errors import UsageError
from distmagic.request.flag_table import FLAGS
from distmagic.request.flag_values import HEADINGS, Flag
from distmagic.request.systems import places, that_can


def parse(words: list[str]) -> argparse.Namespace:
    """Return the values of all flags.

    Raises `UsageError` that names the flag, with the closest known one.
    """
    hyphened = [_hyphened(word) for word in words]
    args, unknown = _parser().parse_known_args(hyphened)
    if unknown:
        raise _unknown(unknown[0])
    return args


def help_text(
    usage: str = "%%distributed [FLAGS]",
    description: str = "Run the cell's last expression on every rank of the hosts, under torchrun.",
    without: Sequence[str] = (),
) -> str:
    """Return the help of `%%distributed`, or of a command with its flags, `without` some of
    them.
    """
    parser = _parser(without)
    parser.usage, parser.description = usage.replace("%", "%%"), description
    return parser.format_help()


def help_of_program(command: str, *, is_in_notebook: bool) -> str:
    """Return the help of the command that runs a program."""
    without = "whole script stay ranks"
    if not is_in_notebook:
        without += " output background"
    return help_text(
        command,
        "Run a script on every rank of the hosts, under torchrun.",
        without.split(),
    )


def flag_names() -> tuple[str, ...]:
    """Return every long flag, for tab completion."""
    return ("--help", *(f"--{flag.name}" for flag in FLAGS))


def values_after(word: str) -> int:
    """Return how many words after a flag belong to it: 1 after `--hosts`, none after
    `--hosts=gpu-a`.
    """
    name = _hyphened(word)
    if name == "-o":
        return 1
    for flag in FLAGS:
        if name == f"--{flag.name}":
            return len(flag.metavar.split())
    return 0


def split_way(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags in `words` about hosts and how to reach them, with their values, and all
    other words.
    """
    names = [f"--{flag.name}" for flag in FLAGS if flag.heading == "hosts"]
    way = []
    others = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if _hyphened(word).partition("=")[0] in names:
            count = values_after(word)
            way += [word, *rest[:count]]
            del rest[:count]
        else:
            others.append(word)
    return way, others


def _hyphened(word: str) -> str:
    """Return a word of the line with hyphens instead of underscores in a flag's name; values are
    unchanged.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


# Flags of other launchers, with their equivalents. By spelling alone, another flag would be
# suggested.
_ELSEWHERE = {
    "The number of ranks on each host is --nproc-per-node.": "--nprocs --nproc --np -np -n --num-processes --ngpus --num-gpus --workers "
    "--ntasks-per-node --ppn",
    "Hosts are named with --hosts; for a scheduler --nodes sets the number.": "-N -H --num-nodes --num-machines --ntasks --include",
    "The GPUs of each host are named with --devices: --devices 0,1.": "--cuda --cuda-visible-devices --gpu-ids --gpu-id --device --gpu -g",
    "GPUs of a scheduler's nodes are asked for with --gpus-per-node.": "--gres --gpus-per-task",
    "Hosts keep all that ranks write: %distributed logs JOB RANK shows it.": "--log-dir --tee --redirects -r -t",
    "Leave it out: the first host of --hosts is the one that the others dial.": "--master-addr --node-rank --machine-rank",
    "The port of the first host is --master-port.": "--main-process-port",
    "CPUs of a scheduler's nodes are asked for with --cpus-per-task.": "--cpus --num-cpus -c",
    "Other options of sbatch stand after --slurm: --slurm exclude=NODE.": "--exclude --nodelist -w --job-name -J --gpu-bind",
    "A scheduler's partition is --partition.": "-p",
    "A host is written user@name:port; its key is named in ~/.ssh/config.": "--port --user --identity --key -i",
    "Write %distributed run -m MODULE for a module.": "-m --module --no-python",
    "--background returns at once, and the run continues; --detach needs no notebook.": "--bg --async -d",
    "Leave it out: torchrun's default is what ranks get.": "--role --monitor-interval --start-method --numa-binding --local-ranks-filter",
    "This machine alone is --hosts localhost.": "--standalone",
}
_FOREIGN = {name: hint for hint, names in _ELSEWHERE.items() for name in names.split()}
_ALIKE = 0.8  # minimum similarity of two flags' names


def _unknown(word: str) -> UsageError:
    """Return the error for a word of the line that is neither a flag nor a flag's value."""
    if not word.startswith("-"):
        return UsageError(
            f"{word!r} is not a flag.",
            "Hosts are named with --hosts gpu-a,gpu-b; %distributed --help lists all flags.",
        )
    name = word.partition("=")[0]
    if name in _FOREIGN:
        return UsageError(
            f"{name} is not a flag of %%distributed.",
            _FOREIGN[name],
        )
    close = (
        difflib.get_close_matches(name, flag_names(), n=1, cutoff=_ALIKE)
        if name.startswith("--")
        else []
    )
    hint = (
        "%distributed --help lists all flags; those of a script stand after its name."
    )
    if close:
        hint = f"Did you mean {close[0]}? %distributed --help lists all flags."
    return UsageError(f"{name} is not a flag of %%distributed.", hint)


class Once(argparse.Action):
    """Stores a value, and rejects a second one, which would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  # argparse gives it
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value. Raises `UsageError` for a second one."""
        if getattr(namespace, self.dest) is not None:
            hint = "Keep one of them."
            if self.metavar == "LIST":
                hint = f"Write one list: {option_string} A,B."
            raise UsageError(f"{option_string} is given twice.", hint)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argparse parser that neither prints nor exits."""

    hint = "%distributed --help lists all flags."

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with argparse's own sentence."""
        raise UsageError(f"{message.removeprefix('argument ')}.", self.hint)


def _read(flag: Flag, text: str) -> object:
    return flag.read(text, "-o" if flag.name == "output" else f"--{flag.name}")


def _parser(without: Sequence[str] = ()) -> Parser:
    parser = Parser(
        prog="%%distributed",
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=32, width=110
        ),
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this text")
    groups = {}
    for heading, text in HEADINGS.items():
        groups[heading] = parser.add_argument_group(text)
    for flag in FLAGS:
        if flag.name in without:
            continue
        words: dict[str, Any] = {"help": flag.help}
        if not flag.metavar:
            words["action"] = "store_true"
        else:
            words |= {
                "action": Once,
                "metavar": flag.metavar,
                "type": partial(_read, flag),
            }
        if flag.repeats:
            words |= {"action": "append", "default": []}
            words["help"] += "; may be repeated"
        if flag.name == "export":
            words |= {"nargs": 2, "metavar": tuple(flag.metavar.split())}
            exported = [system.name for system in that_can("export")]
            words["help"] = flag.help.replace("SYSTEMS", ", ".join(exported))
        if flag.name == "on":
            words["help"] = flag.help.replace("PLACES", places())
        names = ("-o", "--output") if flag.name == "output" else (f"--{flag.name}",)
        groups[flag.heading].add_argument(*names, **words)
    return parser

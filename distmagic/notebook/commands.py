"""The table of `%distributed` subcommands, which are those of `distmagic` in a terminal. Usage text, dispatch, completion and
the tests of the README read it.

A new subcommand is one entry of `SUBCOMMANDS`, and its handler in host_commands.py, job_commands.py, file_commands.py,
run_command.py or help_pages.py.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from distmagic.connection.prompts import asker_of
from distmagic.errors import SpecError
from distmagic.notebook import (
    file_commands,
    help_pages,
    host_commands,
    job_commands,
    run_command,
)
from distmagic.notebook.host_commands import CommandLine
from distmagic.notebook.settings import Notebook
from distmagic.request import flag_parser, flags


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedNames:
    """What the Tab key offers of this notebook, asked for only where it is being typed: hosts are read from ~/.ssh/config.

    `jobs` are those that this kernel has begun or listed, the newest first, `ranks` those of such a job.
    """

    hosts: Callable[[], Iterable[str]]
    jobs: Callable[[], Iterable[str]]
    ranks: Callable[[str], Iterable[int]]


_TEXT_COLUMN = 52  # of the usage text, where the explanations begin


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """One line of the usage text: the arguments of a subcommand, and what it does with them."""

    arguments: str
    text: str


def _no_candidates(_words: Sequence[str], _names: OfferedNames) -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """One word after `%distributed`, or after `distmagic` in a terminal.

    `is_of_notebook`: it means nothing in a terminal. `takes_way`: the flags of the help's heading Hosts may stand behind it,
    and count for it alone.
    `complete` returns the candidates for the last of the words that follow the name; "" stands for a word that has not
    begun.
    """

    name: str
    usages: tuple[UsageLine, ...]
    handler: Callable[[CommandLine], object]
    complete: Callable[[Sequence[str], OfferedNames], list[str]] = _no_candidates
    is_of_notebook: bool = False
    takes_way: bool = True


def _complete_hosts(words: Sequence[str], names: OfferedNames) -> list[str]:
    if words[-1].startswith("-"):
        return list(host_commands.FLAGS)
    return list(names.hosts())


def _complete_playground(_words: Sequence[str], _names: OfferedNames) -> list[str]:
    return ["stop"]


def _complete_add(words: Sequence[str], names: OfferedNames) -> list[str]:
    if len(words) < 2:
        return list(names.jobs())
    return _complete_hosts(words, names)


def _complete_clean(words: Sequence[str], names: OfferedNames) -> list[str]:
    if len(words) > 1:
        return ["--everybody"] if words[0] == "all" else []
    return ["all", *names.jobs()]


def _complete_job(words: Sequence[str], names: OfferedNames) -> list[str]:
    return list(names.jobs()) if len(words) < 2 else []


def _complete_logs(words: Sequence[str], names: OfferedNames) -> list[str]:
    if len(words) < 2:
        return list(names.jobs())
    return [str(rank) for rank in names.ranks(words[0])] if len(words) == 2 else []


def _complete_run(words: Sequence[str], _names: OfferedNames) -> list[str]:
    if words[-1].startswith("-"):
        return list(flag_parser.flag_names())
    return sorted(str(path) for path in Path().glob("*.py"))


def _complete_get(words: Sequence[str], names: OfferedNames) -> list[str]:
    return list(names.hosts()) if len(words) < 2 else []


def _complete_put(words: Sequence[str], names: OfferedNames) -> list[str]:
    if len(words) < 2:
        return list(names.hosts())
    return sorted(str(path) for path in Path().glob("*")) if len(words) == 2 else []


def _complete_env(words: Sequence[str], names: OfferedNames) -> list[str]:
    if len(words) < 2:
        return ["sync"]
    if words[-2] == "--hosts":
        return list(names.hosts())
    if words[-2] == "--requirements":
        return sorted(str(path) for path in Path().glob("*.txt"))
    if words[-2] == "--lock":
        found = [*Path().glob("*.lock"), *Path().glob("*.toml"), *Path().glob("*.txt")]
        return sorted(map(str, found))
    return ["--hosts", *file_commands.ENV_FLAGS]


def _complete_down(words: Sequence[str], _names: OfferedNames) -> list[str]:
    return ["--cluster"] if len(words) < 2 else []


def _complete_help(_words: Sequence[str], _names: OfferedNames) -> list[str]:
    return list(help_pages.topics())


SUBCOMMANDS = (
    Subcommand(
        name="hosts",
        usages=(
            UsageLine(
                arguments="LIST", text="set the hosts of this notebook: gpu-a:4,gpu-b:2"
            ),
            UsageLine(
                arguments="--hostfile FILE",
                text="the same from a file with one host a line: gpu-a slots=4",
            ),
            UsageLine(
                arguments="LIST --python P --ssh-config F",
                text="set also their Python, and the SSH configuration, for all that follows",
            ),
            UsageLine(arguments="", text="show the hosts"),
        ),
        handler=host_commands.hosts,
        is_of_notebook=True,
        complete=_complete_hosts,
    ),
    Subcommand(
        name="playground",
        usages=(
            UsageLine(
                arguments="N", text="start N throw-away SSH hosts on this machine"
            ),
            UsageLine(arguments="stop", text="end them"),
        ),
        handler=host_commands.playground,
        is_of_notebook=True,
        takes_way=False,
        complete=_complete_playground,
    ),
    Subcommand(
        name="run",
        usages=(
            UsageLine(
                arguments="[FLAGS] SCRIPT [ARGS]",
                text="run a script on every rank, with the flags of a cell",
            ),
            UsageLine(
                arguments="[FLAGS] -m MODULE [ARGS]",
                text="the same as python -m runs a module",
            ),
        ),
        handler=run_command.run,
        takes_way=False,
        complete=_complete_run,
    ),
    Subcommand(
        name="jobs",
        usages=(
            UsageLine(
                arguments="", text="list the jobs on these hosts, running and ended"
            ),
        ),
        handler=job_commands.jobs,
    ),
    Subcommand(
        name="runs",
        usages=(
            UsageLine(
                arguments="",
                text="compare the runs of this notebook: a table, and curves of the same call in one",
            ),
        ),
        handler=job_commands.runs,
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="attach",
        usages=(
            UsageLine(
                arguments="ID", text="follow a running job, or show an ended one"
            ),
            UsageLine(
                arguments="ID NAME",
                text="the same in a notebook, whose variable NAME gets the run",
            ),
        ),
        handler=job_commands.attach,
        complete=_complete_job,
    ),
    Subcommand(
        name="view",
        usages=(
            UsageLine(
                arguments="[ID]",
                text="show a running job live in this cell: ID, or the newest, detached ones first",
            ),
        ),
        handler=job_commands.view,
        complete=_complete_job,
    ),
    Subcommand(
        name="add",
        usages=(
            UsageLine(arguments="ID LIST", text="add hosts to a running elastic job"),
        ),
        handler=job_commands.add,
        complete=_complete_add,
    ),
    Subcommand(
        name="stop",
        usages=(UsageLine(arguments="ID", text="stop a job"),),
        handler=job_commands.stop,
        complete=_complete_job,
    ),
    Subcommand(
        name="logs",
        usages=(
            UsageLine(arguments="ID RANK", text="print a rank's output"),
            UsageLine(
                arguments="ID RANK --by-time",
                text="the same, with stdout and stderr as they came",
            ),
        ),
        handler=job_commands.logs,
        complete=_complete_logs,
    ),
    Subcommand(
        name="stacks",
        usages=(
            UsageLine(
                arguments="[ID]",
                text="print where the ranks of a running job are, and which one stands out",
            ),
        ),
        handler=job_commands.stacks,
        complete=_complete_job,
    ),
    Subcommand(
        name="get",
        usages=(
            UsageLine(
                arguments="HOST PATH [TO]",
                text="copy a file, a folder or the files of a pattern from a host to this machine",
            ),
        ),
        handler=file_commands.get,
        complete=_complete_get,
    ),
    Subcommand(
        name="put",
        usages=(
            UsageLine(
                arguments="HOST PATH [TO]",
                text="copy a file or a folder of this machine to a host",
            ),
        ),
        handler=file_commands.put,
        complete=_complete_put,
    ),
    Subcommand(
        name="env",
        usages=(
            UsageLine(
                arguments="sync [FLAGS]",
                text="create an environment on each host with this kernel's packages, or with those of "
                "--requirements FILE or --lock FILE; --hosts LIST, --name NAME",
            ),
        ),
        handler=file_commands.env,
        complete=_complete_env,
    ),
    Subcommand(
        name="clean",
        usages=(
            UsageLine(
                arguments="[ID|all]",
                text="show what ended jobs keep on the hosts; remove it",
            ),
            UsageLine(
                arguments="all --everybody",
                text="also remove what jobs of other notebooks keep",
            ),
        ),
        handler=job_commands.clean,
        complete=_complete_clean,
    ),
    Subcommand(
        name="status",
        usages=(
            UsageLine(
                arguments="",
                text="list the warm processes of hosts, and their memory",
            ),
        ),
        handler=job_commands.status,
    ),
    Subcommand(
        name="allocations",
        usages=(
            UsageLine(
                arguments="[PLACE]",
                text="list your allocations of Slurm or clusters of SkyPilot; take hold of slurm:JOB or sky:NAME",
            ),
        ),
        handler=host_commands.allocations,
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="down",
        usages=(
            UsageLine(
                arguments="",
                text="end warm processes, connections and allocations",
            ),
            UsageLine(
                arguments="--cluster NAME", text="take a cluster of SkyPilot down"
            ),
        ),
        handler=host_commands.down,
        is_of_notebook=True,
        takes_way=False,
        complete=_complete_down,
    ),
    Subcommand(
        name="help",
        usages=(
            UsageLine(
                arguments="[TOPIC | WORDS]",
                text="list the pages of the manual; show one; search them all",
            ),
        ),
        handler=help_pages.show,
        takes_way=False,
        complete=_complete_help,
    ),
)
NAMES = tuple(command.name for command in SUBCOMMANDS)


def usage_text(*, is_terminal: bool = False) -> str:
    """Return the list of all subcommands, a line for each way to write one."""
    last = (
        f"{'%distributed --help':<{_TEXT_COLUMN}}the flags of a %%distributed cell, too"
    )
    if is_terminal:
        last = f"{'distmagic run --help':<{_TEXT_COLUMN}}the flags of a run; those of Hosts may stand behind any command"
    known = _known(is_terminal=is_terminal)
    return "\n".join(
        [*(_usage_of(command, is_terminal=is_terminal) for command in known), last]
    )


def _known(*, is_terminal: bool) -> list[Subcommand]:
    return [one for one in SUBCOMMANDS if not (is_terminal and one.is_of_notebook)]


def _usage_of(command: Subcommand, *, is_terminal: bool) -> str:
    name, width = command.name, _TEXT_COLUMN - 2
    magic = "distmagic" if is_terminal else "%distributed"
    return "\n".join(
        f"{f'{magic} {name} {usage.arguments}':<{width}}  {usage.text}"
        for usage in command.usages
    )


def execute(notebook: Notebook, words: Sequence[str]) -> object:
    """Execute the words of one line of `%distributed`, or of `distmagic`, and return its value.

    Raises `SpecError` for an unknown word.
    """
    is_terminal = notebook.shell is None
    if not words:
        print(usage_text(is_terminal=is_terminal))
        return None
    if words[0] in ("-h", "--help"):
        print(usage_text(is_terminal=is_terminal))
        if not is_terminal:
            print(f"\n{flag_parser.help_text()}")
        return None
    command = find(words[0], is_terminal=is_terminal)
    rest = list(words[1:])
    # What follows a script is its own.
    if command.name != "run" and not {"-h", "--help"}.isdisjoint(rest):
        print(_usage_of(command, is_terminal=is_terminal))
        return None
    way: list[str] = []
    if command.takes_way:
        way, rest = flag_parser.split_way(rest)
    with closing(asker_of(notebook.shell)) as asker:
        return command.handler(
            CommandLine(
                notebook=notebook,
                asker=asker,
                words=tuple(rest),
                request=flags.parse_words(way, notebook.config.defaults(os.environ)),
            )
        )


def find(name: str, *, is_terminal: bool = False) -> Subcommand:
    """Return the subcommand of this name. Raises `SpecError` that names the closest one."""
    known = {command.name: command for command in _known(is_terminal=is_terminal)}
    if name in known:
        return known[name]
    if name in NAMES:
        raise SpecError(
            f"{name} is a command of notebooks.",
            "In a terminal hosts are named behind each command, by --hosts LIST, or by DISTMAGIC_HOSTS.",
        )
    if name.startswith("-"):
        raise SpecError(
            f"%distributed takes no flag {name}: flags belong to a cell, under %%distributed.",
            "For all cells of this notebook: %distributed hosts LIST, or %config Distmagic.",
        )
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    raise SpecError(
        f"%distributed {name} is not known.", f"{guess}Known are: {', '.join(known)}."
    )

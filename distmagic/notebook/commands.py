"""The table of subcommands of `%distributed`, and of `distmagic` in a terminal. Usage text, dispatch, completion and
tests read it.

A new subcommand is one entry of `SUBCOMMANDS`, and its handler in host_commands.py, job_commands.py, doctor_command.py,
file_commands.py, run_command.py or help_pages.py.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from distmagic.connection.prompts import asker_of
from distmagic.errors import UsageError
from distmagic.notebook import (
    doctor_command,
    file_commands,
    help_pages,
    host_commands,
    job_commands,
    run_command,
)
from distmagic.notebook.host_commands import CommandLine
from distmagic.notebook.settings import Notebook
from distmagic.request import flag_parser, flags

_TEXT_COLUMN = 52  # column of the usage text in which the explanations start


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One word after `%distributed`, or after `distmagic` in a terminal.

    `is_of_notebook`: it means nothing in a terminal. `takes_way`: the flags under the help's heading Hosts may follow
    it, and only apply to it. `usages` are its lines of the usage text: arguments, and a description. `counts` are the
    min and max number of words in addition to its `flags`, which are written as in the usage text. None: the handler
    reads the whole line. `words` are the completions for each position after the name, as in completion.py; dots after
    the last one mean all further positions.
    """

    name: str
    usages: tuple[tuple[str, str], ...]
    handler: Callable[[CommandLine], object]
    counts: tuple[int, int] | None = (0, 0)
    flags: tuple[str, ...] = ()
    words: str = ""
    is_of_notebook: bool = False
    takes_way: bool = True


SUBCOMMANDS = (
    Subcommand(
        name="hosts",
        usages=(
            ("LIST", "set the hosts of this notebook: gpu-a:4,gpu-b:2"),
            (
                "--hostfile FILE",
                "the same from a file with one host per line: gpu-a slots=4",
            ),
            (
                "LIST --python P --ssh-config F",
                "set also their Python, and the SSH configuration, for all that follows",
            ),
            ("", "show the hosts"),
        ),
        handler=host_commands.hosts,
        counts=None,
        is_of_notebook=True,
        words="hosts...",
    ),
    Subcommand(
        name="playground",
        usages=(
            ("N", "start N throw-away SSH hosts on this machine"),
            ("", "show them"),
            ("freeze NODE", "a host falls silent; thaw NODE wakes it"),
            ("cut NODE", "this notebook can't reach a host; heal NODE ends that"),
            ("off NODE", "a host loses its power; on NODE starts it again"),
            ("stop", "end them"),
        ),
        handler=host_commands.playground,
        counts=None,
        is_of_notebook=True,
        takes_way=False,
        words="playground host",
    ),
    Subcommand(
        name="run",
        usages=(
            (
                "[FLAGS] SCRIPT [ARGS]",
                "run a script on every rank, with the flags of a cell",
            ),
            ("[FLAGS] -m MODULE [ARGS]", "the same as python -m runs a module"),
        ),
        handler=run_command.run,
        counts=None,
        takes_way=False,
        words="program...",
    ),
    Subcommand(
        name="jobs",
        usages=(("", "list the jobs on these hosts, running and ended"),),
        handler=job_commands.jobs,
    ),
    Subcommand(
        name="runs",
        usages=(
            (
                "",
                "compare the runs of this notebook: a table, and curves of the same call in one",
            ),
        ),
        handler=job_commands.runs,
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="attach",
        usages=(
            ("ID", "follow a running job, or show an ended one"),
            ("ID NAME", "the same in a notebook, whose variable NAME gets the run"),
            ("NAME", "go on with ranks that outlived their kernel, from a notebook"),
        ),
        handler=job_commands.attach,
        counts=(1, 2),
        words="job",
    ),
    Subcommand(
        name="view",
        usages=(
            (
                "[ID]",
                "show a running job live in this cell: ID, or the newest, detached ones first",
            ),
        ),
        handler=job_commands.view,
        counts=(0, 1),
        words="job",
    ),
    Subcommand(
        name="add",
        usages=(("ID LIST", "add hosts to a running elastic job"),),
        handler=job_commands.add,
        counts=(2, 10_000),
        words="job hosts...",
    ),
    Subcommand(
        name="stay",
        usages=(
            ("", "show the ranks that stay: hosts, cells, and the names they hold"),
            ("NAME", "the same, and their idle time begins anew"),
        ),
        handler=job_commands.stay,
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="end",
        usages=(("[NAME]", "end ranks that stay; NAME where there are several"),),
        handler=job_commands.end,
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="debug",
        usages=(
            (
                "[NAME] [--rank N]",
                "open pdb where the last cell failed on ranks that stay",
            ),
        ),
        handler=job_commands.debug,
        counts=(0, 1),
        flags=("--rank N",),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="stop",
        usages=(("ID", "stop a job"),),
        handler=job_commands.stop,
        counts=(1, 1),
        words="job",
    ),
    Subcommand(
        name="logs",
        usages=(
            ("ID RANK", "print a rank's output"),
            ("ID RANK --by-time", "the same, with stdout and stderr as they came"),
        ),
        handler=job_commands.logs,
        counts=(2, 2),
        flags=("--by-time",),
        words="job",
    ),
    Subcommand(
        name="stacks",
        usages=(
            (
                "[ID]",
                "print where the ranks of a running job are, and which one stands out",
            ),
        ),
        handler=job_commands.stacks,
        counts=(0, 1),
        words="job",
    ),
    Subcommand(
        name="profile",
        usages=(
            (
                "[ID] [--steps N]",
                "profile 3 steps of running ranks, or N: one trace of all, and for whom they wait",
            ),
        ),
        handler=job_commands.profile,
        counts=(0, 1),
        flags=("--steps N",),
        words="job",
    ),
    Subcommand(
        name="doctor",
        usages=(
            (
                "[--collective] [--json]",
                "find what is wrong with the hosts and between them: each finding with its cure",
            ),
        ),
        handler=doctor_command.doctor,
        flags=("--collective", "--json"),
    ),
    Subcommand(
        name="get",
        usages=(
            (
                "HOST PATH [TO]",
                "copy a file, a folder or the files of a pattern from a host to this machine",
            ),
        ),
        handler=file_commands.get,
        counts=(2, 3),
        words="host",
    ),
    Subcommand(
        name="put",
        usages=(
            ("HOST PATH [TO]", "copy a file or a folder of this machine to a host"),
            (
                "PATH --all [TO]",
                "copy it to every host: once from here, then from host to host",
            ),
        ),
        handler=file_commands.put,
        counts=(1, 3),
        flags=("--all",),
        words="host path",
    ),
    Subcommand(
        name="env",
        usages=(
            (
                "sync [FLAGS]",
                (
                    "create an environment on each host with this kernel's packages, or with those of "
                    "--requirements FILE or --lock FILE; --hosts LIST, --name NAME"
                ),
            ),
        ),
        handler=file_commands.env,
        counts=(1, 1),
        flags=("--requirements FILE", "--lock FILE", "--name NAME"),
        words="sync env...",
    ),
    Subcommand(
        name="clean",
        usages=(
            ("[ID|all]", "show what ended jobs keep on the hosts; remove it"),
            ("all --everybody", "also remove what jobs of other notebooks keep"),
        ),
        handler=job_commands.clean,
        counts=(0, 1),
        flags=("--everybody",),
        words="ended",
    ),
    Subcommand(
        name="status",
        usages=(("", "list the warm processes of hosts, and their memory"),),
        handler=job_commands.status,
    ),
    Subcommand(
        name="allocations",
        usages=(
            (
                "[PLACE]",
                "list your allocations of Slurm or clusters of SkyPilot; take hold of slurm:JOB or sky:NAME",
            ),
        ),
        handler=host_commands.allocations,
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        name="down",
        usages=(
            ("", "end warm processes, connections and allocations"),
            ("--cluster NAME", "take a cluster of SkyPilot down"),
        ),
        handler=host_commands.down,
        counts=None,
        is_of_notebook=True,
        takes_way=False,
        words="down",
    ),
    Subcommand(
        name="help",
        usages=(
            (
                "[TOPIC | WORDS]",
                "list the pages of the manual; show one; search them all",
            ),
        ),
        handler=help_pages.show,
        counts=None,
        takes_way=False,
        words="topic...",
    ),
)
NAMES = tuple(command.name for command in SUBCOMMANDS)


def usage_text(*, is_terminal: bool = False) -> str:
    """Return the list of all subcommands, one line for each form."""
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
        f"{f'{magic} {name} {arguments}':<{width}}  {text}"
        for arguments, text in command.usages
    )


def execute(notebook: Notebook, words: Sequence[str]) -> object:
    """Execute the words of one line of `%distributed`, or of `distmagic`, and return its value.

    Raises `UsageError` for an unknown word.
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
    # All words after a script belong to it.
    if command.name != "run" and not {"-h", "--help"}.isdisjoint(rest):
        print(_usage_of(command, is_terminal=is_terminal))
        return None
    way: list[str] = []
    if command.takes_way:
        way, rest = flag_parser.split_way(rest)
    given = argparse.Namespace()
    if command.counts is not None:
        rest, given = _arguments(command, command.counts, rest)
    with closing(asker_of(notebook.shell)) as asker:
        return command.handler(
            CommandLine(
                notebook=notebook,
                asker=asker,
                words=tuple(rest),
                flags=given,
                request=flags.parse_words(way, notebook.config.defaults(os.environ)),
            )
        )


def _arguments(
    command: Subcommand, counts: tuple[int, int], words: Sequence[str]
) -> tuple[list[str], argparse.Namespace]:
    """Return the words after a command that are no flags, and its flags. Raises `UsageError`."""
    usages = [f"%distributed {command.name} {usage}" for usage, _ in command.usages]
    parser = flag_parser.Parser(add_help=False, allow_abbrev=False)
    parser.hint = f"Write {' or '.join(usage.strip() for usage in usages)}."
    for form in command.flags:
        flag, _, metavar = form.partition(" ")
        if metavar:
            parser.add_argument(flag, action=flag_parser.Once)
        else:
            parser.add_argument(flag, action="store_true")
    given, own = parser.parse_known_args(words)
    least, most = counts
    wrong = [word for word in own if word.startswith("--")] or own[most:]
    if wrong or len(own) < least:
        why = f"can't take {wrong[0]!r}" if wrong else "needs another word after it"
        raise UsageError(f"%distributed {command.name} {why}.", parser.hint)
    return own, given


def find(name: str, *, is_terminal: bool = False) -> Subcommand:
    """Return the subcommand of this name. Raises `UsageError` that names the closest one."""
    known = {command.name: command for command in _known(is_terminal=is_terminal)}
    if name in known:
        return known[name]
    if name in NAMES:
        raise UsageError(
            f"{name} works only in a notebook.",
            "In a terminal, pass --hosts LIST to each command, or set DISTMAGIC_HOSTS. distmagic --help lists the commands.",
        )
    if name.startswith("-"):
        raise UsageError(
            f"%distributed takes no flag {name}: flags belong to a cell, under %%distributed.",
            "For all cells of this notebook: %distributed hosts LIST, or %config Distmagic.",
        )
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"%distributed {name} is not known.", f"{guess}Known are: {', '.join(known)}."
    )

"""The table of subcommands of `%distributed`, and of `distmagic` in a terminal.

Usage text, dispatch, completion and tests read it.

A new subcommand is one entry of `SUBCOMMANDS`, and its handler in host_commands.py,
job_commands.py, file_commands.py, run_command.py or help_pages.py.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from distmagic.connection.prompts import asker_of
from distmagic.errors import UsageError
from distmagic.notebook import (
    file_commands,
    help_pages,
    host_commands,
    job_commands,
    run_command,
)
from distmagic.notebook.settings import CommandLine, Notebook
from distmagic.request import flag_parser

_TEXT_COLUMN = 52  # column of the usage text in which the explanations start


@dataclass(frozen=True)
class Subcommand:
    """One word after `%distributed`, or after `distmagic` in a terminal."""

    name: str
    handler: Callable[[CommandLine], object]
    usage: str  # its lines of the usage text: arguments, two blanks, a description
    # min and max number of words in addition to its flags; None: the handler reads the whole line
    counts: tuple[int, int] | None = (0, 0)
    flags: tuple[str, ...] = ()  # written as in the usage text
    # completions for each position after the name, as in completion.py; dots after the last one
    # mean all further positions
    words: str = ""
    is_of_notebook: bool = False  # it means nothing in a terminal
    # flags under the help's heading Hosts may follow it, and only apply to it
    takes_way: bool = True

    @property
    def usages(self) -> list[tuple[str, str]]:
        """Its lines of the usage text: arguments, and a description."""
        found = []
        for line in self.usage.strip().splitlines():
            arguments, _, text = line.strip().rpartition("  ")
            found.append((arguments.strip(), text))
        return found


SUBCOMMANDS = (
    Subcommand(
        "hosts",
        host_commands.hosts,
        """
        LIST                            set the hosts of this notebook: gpu-a:4,gpu-b:2
        --hostfile FILE                 the same from a file with one host per line: gpu-a slots=4
        LIST --python P --ssh-config F  set also their Python, and the SSH configuration, for all that follows
        show the hosts
        """,
        counts=None,
        flags=("--hostfile FILE", "--python P", "--ssh-config F"),
        words="hosts...",
        is_of_notebook=True,
    ),
    Subcommand(
        "playground",
        host_commands.playground,
        """
        N            start N throw-away SSH hosts on this machine
        N --keep     the same for all kernels, until stop or 2 hours without use
        show them
        freeze NODE  a host falls silent; thaw NODE wakes it
        cut NODE     this notebook can't reach a host; heal NODE ends that
        off NODE     a host loses its power; on NODE starts it again
        stop         end them
        """,
        counts=None,
        words="playground host",
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "run",
        run_command.run,
        """
        [FLAGS] SCRIPT [ARGS]     run a script on every rank, with the flags of a cell
        [FLAGS] -m MODULE [ARGS]  the same as python -m runs a module
        """,
        counts=None,
        flags=flag_parser.flag_names(),
        words="program...",
        takes_way=False,
    ),
    Subcommand(
        "jobs",
        job_commands.jobs,
        "list the jobs on these hosts, running and ended",
    ),
    Subcommand(
        "runs",
        job_commands.runs,
        "compare the runs of this notebook: a table, and curves of the same call in one",
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "attach",
        job_commands.attach,
        """
        ID       follow a running job, or show an ended one
        ID NAME  the same in a notebook, whose variable NAME gets the run
        NAME     go on with ranks that outlived their kernel, from a notebook
        """,
        counts=(1, 2),
        words="job",
    ),
    Subcommand(
        "view",
        job_commands.view,
        "[ID]  show a running job live in this cell: ID, or the newest, detached ones first",
        counts=(0, 1),
        words="job",
    ),
    Subcommand(
        "add",
        job_commands.add,
        "ID LIST  add hosts to a running elastic job",
        counts=(2, 10000),
        words="job hosts...",
    ),
    Subcommand(
        "stay",
        job_commands.stay,
        """
        show the ranks that stay: hosts, cells, and the names they hold
        NAME  the same, and their idle time begins again
        """,
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "end",
        job_commands.end,
        "[NAME]  end ranks that stay; NAME where there are several",
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "debug",
        job_commands.debug,
        """
        [ID] [--rank N]  open pdb where a rank of a failed run raised its exception
        NAME [--rank N]  the same, on ranks that stay; without a name, they come before runs
        """,
        counts=(0, 1),
        flags=("--rank N",),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "stop",
        job_commands.stop,
        "ID  stop a job",
        counts=(1, 1),
        words="job",
    ),
    Subcommand(
        "logs",
        job_commands.logs,
        """
        ID RANK            print a rank's output
        ID RANK --by-time  the same, with stdout and stderr as they came
        """,
        counts=(2, 2),
        flags=("--by-time",),
        words="job",
    ),
    Subcommand(
        "stacks",
        job_commands.stacks,
        "[ID]  print where the ranks of a running job are, and which one stands out",
        counts=(0, 1),
        words="job",
    ),
    Subcommand(
        "profile",
        job_commands.profile,
        "[ID] [--steps N]  profile 3 steps of running ranks, or N: one trace of all, and for whom they wait",
        counts=(0, 1),
        flags=("--steps N",),
        words="job",
    ),
    Subcommand(
        "doctor",
        host_commands.doctor,
        "[--collective] [--json]  find what is wrong with the hosts and between them: each finding with its cure",
        flags=("--collective", "--json"),
    ),
    Subcommand(
        "get",
        file_commands.get,
        "HOST PATH [TO]  copy a file, a folder or the files of a pattern from a host to this machine",
        counts=(2, 3),
        words="host",
    ),
    Subcommand(
        "put",
        file_commands.put,
        """
        HOST PATH [TO]   copy a file or a folder of this machine to a host
        PATH --all [TO]  copy it to every host: once from this machine, then from host to host
        """,
        counts=(1, 3),
        flags=("--all",),
        words="host path",
    ),
    Subcommand(
        "env",
        file_commands.env,
        "sync [FLAGS]  create an environment on each host with this kernel's packages, or with those of --requirements FILE or --lock FILE; --hosts LIST, --name NAME",
        counts=(1, 1),
        flags=("--requirements FILE", "--lock FILE", "--name NAME"),
        words="sync",
    ),
    Subcommand(
        "clean",
        file_commands.clean,
        """
        [ID|all]         show what ended jobs keep on the hosts; remove it
        all --everybody  also remove what jobs of other notebooks keep
        """,
        counts=(0, 1),
        flags=("--everybody",),
        words="ended",
    ),
    Subcommand(
        "status",
        job_commands.status,
        "list the warm processes of hosts, and their memory",
    ),
    Subcommand(
        "allocations",
        host_commands.allocations,
        "[PLACE]  list your allocations of Slurm or clusters of SkyPilot; take hold of slurm:JOB or sky:NAME",
        counts=(0, 1),
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "down",
        host_commands.down,
        """
        end warm processes, connections and allocations
        --cluster NAME  take a cluster of SkyPilot down
        """,
        counts=None,
        words="down",
        is_of_notebook=True,
        takes_way=False,
    ),
    Subcommand(
        "help",
        help_pages.show,
        "[TOPIC | WORDS]  list the pages of the manual; show one; search them all",
        counts=None,
        words="topic...",
        takes_way=False,
    ),
)
NAMES = tuple(command.name for command in SUBCOMMANDS)


def usage_text(*, is_terminal: bool) -> str:
    """Return the list of all subcommands, one line for each form."""
    last = (
        f"{'%distributed --help':<{_TEXT_COLUMN}}the flags of a %%distributed cell, too"
    )
    if is_terminal:
        last = f"{'distmagic run --help':<{_TEXT_COLUMN}}the flags of a run; those of Hosts may stand after any command"
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
    if not words or words[0] in ("-h", "--help"):
        print(usage_text(is_terminal=is_terminal))
        if words and not is_terminal:
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
                request=notebook.request(way),
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
        action = flag_parser.Once if metavar else "store_true"
        parser.add_argument(flag, action=action)
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

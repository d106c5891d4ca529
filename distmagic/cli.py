"""The program `distmagic` for a terminal: the commands of `%distributed`, above all `distmagic run
train.py 50 --lr 0.1`.
"""

# ruff: noqa: T201  # what a command prints is its output

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence

from distmagic.errors import Cancelled, DistmagicError, UsageError
from distmagic.notebook import commands
from distmagic.notebook.settings import Notebook
from distmagic.request import flag_parser
from distmagic.request.config import Distmagic
from distmagic.request.flags import split_program
from distmagic.request.spec import check_system

FAILED, MISUSED, INTERRUPTED = 1, 2, 130  # exit codes, as shells and torchrun have them
_COMMAND = re.compile(r"(?<!%)%distributed\b")
_OF_A_JOB = re.compile(r"(?<!%)%distributed ([a-z]+) (?=\d|ID\b|all\b)")
_LOGS = re.compile(r"\b_?run\.logs\(([^)]*)\)")
_OF_A_RUN = re.compile(r"\b_?run\.(results\[\d+\]|fetch\([^)]*\))")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    words = tuple(sys.argv[1:] if argv is None else argv)
    if words[:1] == ("--version",):
        print(f"distmagic {sys.modules['distmagic'].__version__}")
        return 0
    notebook = Notebook(None, Distmagic(), terminal_words=for_terminal(words))
    try:
        check_system()
        left = commands.execute(notebook, words)
    except DistmagicError as error:
        job = getattr(getattr(error, "run", None), "job", "")
        print(notebook.worded(_not_shown_yet(error), job), file=sys.stderr)
        if isinstance(error, UsageError):
            return MISUSED
        return INTERRUPTED if isinstance(error, Cancelled) else FAILED
    except KeyboardInterrupt:  # before anything was started
        return INTERRUPTED
    if left is not None:
        return _tell(left)
    return 0 if words else MISUSED


def for_terminal(words: Sequence[str]) -> Callable[[str, str], str]:
    """Return a function that rewords a message, which may be about a job, for a user who typed
    `words` in a terminal.

    A terminal has neither magics nor a variable `run`. Suggested commands about a job repeat the
    hosts in `words`, because no kernel remembers them.
    """
    typed = words[1:]
    if words[:1] == ("run",):
        try:
            typed, _ = split_program(typed)
        except UsageError:
            typed = ()
    flags, _ = flag_parser.split_way(typed)
    way = f"{shlex.join(flags)} " if flags else ""

    def worded(text: str, job: str) -> str:
        text = text.replace("a flag of %%distributed", "a flag of distmagic run")
        text = text.replace("%distributed --help", "distmagic run --help")
        text = text.replace("%distributed hosts", "--hosts")
        logs = f"%distributed logs {job or 'ID'}"
        text = _LOGS.sub(lambda found: f"{logs} {found[1]}", text)
        text = _OF_A_JOB.sub(lambda found: f"distmagic {found[1]} {way}", text)
        text = _COMMAND.sub("distmagic", text)
        attached = f"after %distributed attach {job} run, in a notebook"
        return _OF_A_RUN.sub(lambda found: f"run.{found[1]} {attached}", text)

    return worded


def _not_shown_yet(error: DistmagicError) -> str:
    """Return the text of an error, without the rank's traceback if the rank's own output above
    shows it already.
    """
    traceback = getattr(error, "remote_traceback", "").rstrip()
    run = getattr(error, "run", None)
    if traceback and run is not None:
        last = traceback.splitlines()[-1].rstrip()
        if any(line.text.rstrip() == last for line in run.state.lines):
            return str(error).removeprefix(traceback).lstrip("\n")
    return str(error)


def _tell(left: object) -> int:
    """Print where to find a job that runs on detached, and return the exit code.

    A finished run was shown already.
    """
    from distmagic.diagnosis.report import Report
    from distmagic.outcome.detached import Detached
    from distmagic.outcome.run import Run

    if isinstance(left, Detached):
        print(left.job)
    if isinstance(left, Report):  # it has already printed itself
        return FAILED if left.has_errors else 0
    return int(isinstance(left, Run) and bool(left.unfetched))


if __name__ == "__main__":
    sys.exit(main())

"""`distmagic run train.py 50 --lr 0.1` in a terminal: a script on every rank, with the flags of the notebook's cells."""

# ruff: noqa: T201  # what a command prints is its output

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

from distmagic.errors import Cancelled, DistmagicError, SpecError
from distmagic.request import flag_parser, flags
from distmagic.request.config import Distmagic, choose_hosts
from distmagic.request.program import USAGE, Program, split_program
from distmagic.request.spec import check_system

if TYPE_CHECKING:
    from distmagic.request.hosts import Host
    from distmagic.request.spec import Access, JobSpec
    from distmagic.session.inside import Outcome

FAILED, MISUSED, INTERRUPTED = 1, 2, 130  # exit codes, as shells and torchrun have them


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(
            f"usage: distmagic {USAGE}\n\nRun a script on every rank of several hosts. Flags: distmagic run --help"
        )
        return 0 if words else MISUSED
    if words[0] == "--version":
        print(f"distmagic {sys.modules['distmagic'].__version__}")
        return 0
    try:
        return _command(words[0], words[1:])
    except SpecError as error:
        print(_for_terminal(error), file=sys.stderr)
        return MISUSED
    except DistmagicError as error:
        print(_without_run(error, _not_shown_yet(error)), file=sys.stderr)
        return INTERRUPTED if isinstance(error, Cancelled) else FAILED
    except KeyboardInterrupt:  # before anything was begun
        return INTERRUPTED


def _for_terminal(error: SpecError) -> str:
    """Return the text of an error about flags for somebody who has typed them in a terminal."""
    text = str(error).replace("a flag of %%distributed", "a flag of distmagic run")
    return text.replace("%distributed --help", "distmagic run --help")


def _not_shown_yet(error: DistmagicError) -> str:
    """Return the text of an error; without the rank's traceback where that stands above it, in the rank's own output."""
    traceback = getattr(error, "remote_traceback", "").rstrip()
    run = getattr(error, "run", None)
    if traceback and run is not None:
        last = traceback.splitlines()[-1].rstrip()
        if any(line.text.rstrip() == last for line in run.state.lines):
            return str(error).removeprefix(traceback).lstrip("\n")
    return str(error)


def _without_run(error: DistmagicError, text: str) -> str:
    """Return the text of an error for somebody who has no variable `run`."""
    job = getattr(getattr(error, "run", None), "job", "")
    text = re.sub(
        r"run\.logs\(([^)]*)\)",
        rf"%distributed logs {job} \1, in a notebook",
        text,
    )
    return re.sub(
        r"run\.results\[(\d+)\]",
        rf"run.results[\1] after %distributed attach {job} run, in a notebook",
        text,
    )


def _command(name: str, words: Sequence[str]) -> int:
    if name != "run":
        raise SpecError(f"distmagic {name} is not known.", f"Write distmagic {USAGE}.")
    if words and words[0] in ("-h", "--help"):
        print(flag_parser.help_of_program(f"distmagic {USAGE}", is_in_notebook=False))
        return 0
    own, program = split_program(words)
    check_system()
    config = Distmagic()
    request = flags.parse_words(own, config.defaults(os.environ))
    chosen = choose_hosts(request, None, config, os.environ)

    # Only now: a wrong word is told at once, without the time that these take.
    from distmagic.api import session
    from distmagic.connection.prompts import asker_of
    from distmagic.screens.choose import screen_for
    from distmagic.session import programs

    programs.check_request(request)
    if request.background:
        raise SpecError(
            "--background is for a notebook, and this command ends with its run.",
            "Leave it out; --detach lets a job go on without this command.",
        )
    if request.export is not None or request.workflow is not None:
        _without_hosts(request, program, chosen.hosts)
        return 0
    part = None
    if chosen.is_default and not request.allocation and not request.ignores_system:
        part = session().inside.part(os.environ)
    if part is not None and part.place.task is not None:
        programs.run_as_rank(program, part.place)
        return 0
    with _sigterm_interrupts(request.spec), closing(asker_of()) as asker:

        def launch(hosts: tuple[Host, ...], access: Access) -> Outcome:
            if not request.dry_run:
                return programs.run_program(
                    session(), request, program, hosts, access, asker, screen_for()
                )
            print(programs.dry_run(session(), request, program, hosts, access, asker))
            return None

        if part is None:
            hosts = () if request.allocation else chosen.hosts
            left = launch(hosts, request.access)
        else:
            left = part.run(
                programs.digest(program), request.access, request.spec, launch
            )
    return _tell(left)


def _sigterm_interrupts(spec: JobSpec) -> AbstractContextManager[None]:
    """Have whoever ends this command end its ranks too, but not those of a job that goes on without it."""
    from distmagic.runner import interrupts

    if spec.on_disconnect == "keep":
        return nullcontext()
    return interrupts.from_signal(signal.SIGTERM)


def _without_hosts(
    request: flags.Request, program: Program, hosts: tuple[Host, ...]
) -> None:
    """Write the folder that the request asks for, or run its workflow."""
    from distmagic.screens.choose import screen_for
    from distmagic.session import exporting, programs

    if request.export is not None:
        print(exporting.export_program(program, request, hosts))
        return
    with _sigterm_interrupts(request.spec):
        programs.run_workflow(request, program, screen_for())


def _tell(left: Outcome) -> int:
    """Say where a job is found that goes on alone; return the exit code. A run that is over has been shown."""
    from distmagic.runner.outcome import Detached, Run

    if isinstance(left, Detached):
        print(left.job)
    return int(isinstance(left, Run) and bool(left.unfetched))


if __name__ == "__main__":
    sys.exit(main())

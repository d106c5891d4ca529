"""`%distributed run SCRIPT`, in a terminal `distmagic run SCRIPT`: a script, or a module, on every
rank.

It has the flags of a cell, and returns the same kind of run.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from distmagic.errors import UsageError
from distmagic.notebook import run_names
from distmagic.notebook.settings import CommandLine, say
from distmagic.request import flag_parser
from distmagic.request.access import Access
from distmagic.request.flags import USAGE, split_program
from distmagic.request.hosts import Hosts


def run(line: CommandLine) -> object:
    """Run a program and return the run, unless a variable gets it. Raises the errors of a cell."""
    if line.words and line.words[0] in ("-h", "--help"):
        is_in_notebook = line.notebook.shell is not None
        magic = "%distributed" if is_in_notebook else "distmagic"
        print(
            flag_parser.help_of_program(
                f"{magic} {USAGE}", is_in_notebook=is_in_notebook
            )
        )
        return None
    return _run_program(line)


def _run_program(line: CommandLine) -> object:
    """Run the program as `run` describes."""
    words, program = split_program(line.words)
    notebook = line.notebook
    request = notebook.request(words)
    is_terminal = notebook.shell is None
    if is_terminal and request.background:
        raise UsageError(
            "--background is for a notebook, and this command ends with its run.",
            "Leave it out; --detach lets a job continue without this command.",
        )
    # Late import: a wrong word is reported without waiting for it.
    from distmagic.runner import interrupts
    from distmagic.session import exporting, programs

    names = [request.output] if request.output else []
    variable = run_names.variable_of(names)
    programs.check_request(request)
    if request.export is not None:
        hosts = notebook.choose(request).hosts
        say(exporting.export_program(program, request, hosts))
        return None
    session = notebook.session()

    def run_on(hosts: Hosts, access: Access) -> Any:
        if request.dry_run:
            say(programs.dry_run(session, request, program, hosts, access, line.asker))
            return None
        make_screen = partial(notebook.screen, in_background=request.background)
        return programs.run_program(
            session, request, program, hosts, access, line.asker, make_screen, variable
        )

    def start() -> Any:
        if request.workflow is not None:
            pack = partial(programs.packed, program, request)
            return programs.run_workflow(request, notebook.screen, pack, variable)
        return notebook.launch(request, partial(programs.digest, program), run_on)

    is_of_hosts = request.workflow is None
    part = notebook.part(request) if is_terminal and is_of_hosts else None
    if part is not None and part.place.task is not None:
        programs.run_as_rank(program, part.place)
        return None
    ends: AbstractContextManager[None] = nullcontext()
    if is_terminal and request.spec.on_disconnect != "keep":
        # A signal that ends this command also ends its ranks.
        ends = interrupts.from_signal(signal.SIGTERM)
    with ends:
        return run_names.bound(notebook.shell, names, start)

"""`%distributed run SCRIPT`: a script, or a module, on every rank; its flags, and its run, are those of a cell."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distmagic import sanitize
from distmagic.errors import RunError
from distmagic.notebook import run_names
from distmagic.notebook.host_commands import CommandLine
from distmagic.request import flag_parser, flags
from distmagic.request.program import USAGE, split_program

if TYPE_CHECKING:
    from distmagic.request.hosts import Host
    from distmagic.request.spec import Access


def run(line: CommandLine) -> object:
    """Run a program and return the run, if it gets no name. Raises what a cell raises."""
    if line.words and line.words[0] in ("-h", "--help"):
        print(flag_parser.help_of_program(f"%distributed {USAGE}", is_in_notebook=True))
        return None
    names: list[str] = []
    try:
        return _run_program(line, names)
    except BaseException as error:
        run_names.say_not_started(line.notebook.shell, names, error)
        raise


def _run_program(line: CommandLine, names: list[str]) -> object:
    """Do what `run` promises; `names` is given the name of the run as soon as it is known."""
    from distmagic.screens.choose import screen_for
    from distmagic.session import exporting, programs

    words, program = split_program(line.words)
    notebook = line.notebook
    request = flags.parse_words(words, notebook.config.defaults(os.environ))
    names += [request.output] if request.output else []
    variable = run_names.variable_of(names)
    programs.check_request(request)
    if request.export is not None:
        hosts = notebook.choose(request, os.environ).hosts
        print(sanitize.lines(exporting.export_program(program, request, hosts)))
        return None
    if request.workflow is not None:
        screen = screen_for(notebook.shell)
        return _bound(
            lambda: programs.run_workflow(request, program, screen, variable),
            line,
            names,
        )
    session = notebook.session()

    def launch(hosts: tuple[Host, ...], access: Access) -> Any:
        if request.dry_run:
            text = programs.dry_run(
                session, request, program, hosts, access, line.asker
            )
            print(sanitize.lines(text))
            return None
        screen = screen_for(notebook.shell, in_background=request.background)
        return programs.run_program(
            session, request, program, hosts, access, line.asker, screen, variable
        )

    part = notebook.part(request, os.environ)

    def start() -> Any:
        if part is None:
            return launch(*notebook.way(request, os.environ))
        return part.run(programs.digest(program), request.access, request.spec, launch)

    return _bound(start, line, names)


def _bound(start: Callable[[], Any], line: CommandLine, names: list[str]) -> object:
    """Start a run and give it its names; return it where it has none."""
    shell = line.notebook.shell
    try:
        found = start()
    except RunError as error:
        run_names.bind_failed(shell, names, error)
        raise
    if found is None:  # a dry run
        return None
    run_names.bind(shell, names, found)
    # As for a cell: Out would keep a run whose name is gone.
    return None if names else found

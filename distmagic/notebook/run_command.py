"""`%distributed run SCRIPT`: a script, or a module, on every rank; its flags are those of a cell."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import os

from distmagic import sanitize
from distmagic.errors import RunError
from distmagic.notebook.host_commands import CommandLine
from distmagic.request import flags
from distmagic.request.program import USAGE, split_program

LAST_RUN = "_run"  # always the last run, as IPython's `_` is the last value


def run(line: CommandLine) -> object:
    """Run a program and return the run, if it gets no name. Raises what a cell raises."""
    from distmagic.session import programs

    if line.words and line.words[0] in ("-h", "--help"):
        print(f"%distributed {USAGE}\n\n{flags.help_text()}")
        return None
    words, program = split_program(line.words)
    notebook = line.notebook
    request = flags.parse_words(words, notebook.config.defaults(os.environ))
    programs.check_request(request)
    hosts = notebook.choose(request, os.environ).hosts
    access = notebook.access(request, hosts)
    session = notebook.session()
    if request.dry_run:
        print(sanitize.lines(programs.dry_run(session, request, program, hosts, access, line.asker)))
        return None
    names = [request.output] if request.output else []
    screen = notebook.backend.screen_for(notebook.shell)
    try:
        found = programs.run_program(session, request, program, hosts, access, line.asker, screen)
    except RunError as error:
        if error.run is not None:
            _bind(line, names, error.run)
            error.hint = error.hint.replace("run.logs(", f"{request.output or LAST_RUN}.logs(")
        raise
    _bind(line, names, found)
    return None if names else found  # as for a cell: Out would keep a run whose name is gone


def _bind(line: CommandLine, names: list[str], run: object) -> None:
    line.notebook.shell.push({LAST_RUN: run}, interactive=False)
    line.notebook.shell.push(dict.fromkeys(names, run))

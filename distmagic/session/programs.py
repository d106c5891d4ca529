"""Runs a script, or a module, on hosts: the code that `%distributed run` and `distmagic run`
share.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.inside.addresses import address_of_lead
from distmagic.inside.job_node import JobNode
from distmagic.outcome.run import Run
from distmagic.payload.pack import Payload
from distmagic.payload.program import pack_program, placed
from distmagic.payload.work_files import named_folder
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.flags import Program, Request
from distmagic.request.hosts import Hosts
from distmagic.request.systems import part
from distmagic.session.background import BackgroundRun, Left
from distmagic.session.dry_run import start_commands
from distmagic.session.inside import digest_of
from distmagic.session.place import place_of
from distmagic.session.session import Session


def check_request(request: Request) -> None:
    """Raise `UsageError` for flags that only make sense for a cell."""
    if request.whole or request.script:
        name = "--whole" if request.whole else "--script"
        raise UsageError(
            f"{name} is for a cell; a script always runs as a whole.", "Leave it out."
        )


def packed(program: Program, request: Request) -> Payload:
    """Return the files of a program. Raises the errors of `pack_program`."""
    return pack_program(
        program,
        sync=request.spec.sync,
        current=Path.cwd(),
        limit_bytes=request.payload_limit_bytes,
    )


def dry_run(
    session: Session,
    request: Request,
    program: Program,
    hosts: Hosts,
    access: Access,
    asker: NotebookAsker,
) -> str:
    """Return the commands that a run would start on every host. Starts nothing."""
    payload = packed(program, request)
    folder = named_folder(request.spec.sync, payload.folder)
    target = placed(program, folder, Path.cwd())
    words = ["-m"] if program.is_module else []
    words += [target, *program.args]
    first_links = session.reach(hosts, access, asker)
    return start_commands(first_links, request.spec, shlex.join(words), payload)


def digest(program: Program) -> str:
    """Return a digest of a program with its arguments, equal on nodes that run the same one."""
    kind = "module" if program.is_module else "script"
    text = ""
    if not program.is_module:
        with suppress(OSError):  # the launch reports it
            text = Path(program.target).read_text(
                encoding="utf-8", errors="surrogateescape"
            )
    return digest_of(kind, Path(program.target).name, *program.args, text)


def run_as_rank(program: Program, place: JobNode) -> None:
    """Run a program in this process, which is one rank of a job that starts one task for each rank.

    The program sees the variables that torchrun would set. Raises the program's exceptions.
    """
    assert place.task is not None
    task = place.task
    own = {
        "RANK": task.rank,
        "WORLD_SIZE": task.world_size,
        "LOCAL_RANK": task.local_rank,
        "LOCAL_WORLD_SIZE": task.local_world_size,
        "GROUP_RANK": place.node_rank,
        "MASTER_ADDR": address_of_lead(place),
        "MASTER_PORT": place.ports[0],
    }
    for name, value in own.items():
        os.environ.setdefault(name, str(value))
    sys.argv = [program.target, *program.args]
    if program.is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program.target).absolute().parent))
        runpy.run_path(program.target, run_name="__main__")


def run_workflow(
    request: Request,
    make_screen: Callable[[], Screen],
    pack: Callable[[], Payload],
    variable: str,
) -> Run:
    """Run the payload from `pack` as a whole job of a system; `variable` as for `Session.launch`.

    Raises the errors of the system's `run.py`.
    """
    assert request.workflow is not None
    runner = part(request.workflow.system, "run")
    runner.check(request)
    payload = pack()
    left: Run = runner.run(request, payload, make_screen(), variable)
    return left


def run_program(  # noqa: PLR0913, PLR0917  # all that a run is made of
    session: Session, request: Request, program: Program, hosts: Hosts, access: Access,
    asker: NotebookAsker, make_screen: Callable[[], Screen], variable: str,
) -> Left | BackgroundRun:  # fmt: skip
    """Run a program on every rank of `hosts`, or of the nodes that the request asks a scheduler
    for.

    `variable` as for `Session.launch`. Raises the errors of `Allocations.get` and `Session.launch`,
    and `UsageError`.
    """
    if request.background:
        asker.can_ask = False  # the user may be away during the run
    wanted = request.allocation or hosts
    return place_of(session, wanted, access, asker, request.spec).run(
        make_screen,
        lambda _: packed(program, request),
        variable,
        in_background=request.background,
    )

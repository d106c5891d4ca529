"""Runs a script, or a module, on hosts: what `%distributed run` and `distmagic run` have in common."""

from __future__ import annotations

import shlex
from pathlib import Path

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import Cancelled, SpecError
from distmagic.payload.program import pack_program, placed
from distmagic.render.screen import Screen
from distmagic.request.flags import Request
from distmagic.request.hosts import Host
from distmagic.request.program import Program
from distmagic.request.spec import Access
from distmagic.runner.outcome import Detached, Run
from distmagic.session.place import place_of
from distmagic.session.session import Session


def check_request(request: Request) -> None:
    """Raise `SpecError` for flags that mean a cell."""
    if request.whole or request.script:
        name = "--whole" if request.whole else "--script"
        raise SpecError(
            f"{name} is for a cell; a script always runs as a whole.", "Leave it out."
        )


def dry_run(
    session: Session,
    request: Request,
    program: Program,
    hosts: tuple[Host, ...],
    access: Access,
    asker: NotebookAsker,
) -> str:
    """Return the commands that a run would start on every host, or ask of a scheduler, having started nothing."""
    if request.allocation is not None:
        return session.preview(request.allocation, access, request.spec)
    payload = pack_program(
        program,
        sync=request.spec.sync,
        current=Path.cwd(),
        limit_bytes=request.payload_limit_bytes,
    )
    target = placed(program, sync=request.spec.sync, current=Path.cwd())
    words = ["-m"] if program.is_module else []
    words += [target, *program.args]
    reaching = session.reach(hosts, access, asker)
    return session.dry_run(reaching, request.spec, shlex.join(words), payload)


def run_program(
    session: Session, request: Request, program: Program, hosts: tuple[Host, ...], access: Access,
    asker: NotebookAsker, screen: Screen,
) -> Run | Detached:  # fmt: skip
    """Run a program on every rank of `hosts`, or of the nodes that the request asks a scheduler for.

    Raises what `Session.allocation` and `Session.launch` raise, and `SpecError`.
    """
    place = place_of(session, request, hosts, access, asker)
    try:
        payload = pack_program(
            program,
            sync=request.spec.sync,
            current=Path.cwd(),
            limit_bytes=request.payload_limit_bytes,
        )
        reaching = place.reach(screen)
    except KeyboardInterrupt:
        place.cancel()
        raise Cancelled("Interrupted before anything was started on a host.") from None
    except BaseException:
        place.cancel()
        raise
    return session.launch(reaching, request.spec, payload, screen)

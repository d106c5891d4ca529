"""Shows what a run would start, without starting it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distmagic.connection.first_links import FirstLinks
from distmagic.names import new_job, owner, work_dir
from distmagic.payload.pack import Payload
from distmagic.payload.work_files import named_folder, place_of
from distmagic.planning import plan as planning
from distmagic.request.flags import Request
from distmagic.request.spec import JobSpec
from distmagic.runner.launch import enough_hosts
from distmagic.runner.prepare import prepare
from distmagic.systems.protocol import hosts_of


def preview(request: Request) -> str:
    """Return the request for hosts that a scheduler would get. Sends nothing."""
    assert request.allocation is not None
    return hosts_of(request.allocation.system).preview(
        request.allocation, request.access, owner(), is_elastic=request.spec.is_elastic
    )


def start_commands(
    first_links: FirstLinks,
    spec: JobSpec,
    program: str = "<the cell>",
    payload: Payload | None = None,
) -> str:
    """Return the commands that a run would start on every host.

    Starts nothing. Only a script has a `payload`.
    """
    fleet = first_links.fleet
    enough = enough_hosts(spec, len(fleet.hosts))
    work = work_dir(spec, payload)
    folder = named_folder(spec.sync, payload.folder if payload is not None else None)
    if folder is not None:
        _, inside = place_of(folder.resolve(), Path.cwd().resolve())
        work = replace(work, inside=inside)
    with first_links.opened(enough, needs_remote=True) as opened:
        links = list(opened.values())
        terms = planning.terms_of(spec, lease_s=fleet.access.lease_s, owner=owner())
        plan, warnings = prepare(links, spec, new_job(), terms, work)
        pythons = [link.facts.executable for link in links]
        comments = [f"# {warning}" for warning in warnings]
        return "\n".join([*comments, planning.commands(plan, pythons, program)])

"""Makes a plan from connected hosts: asks them for what the plan needs, and checks them for
problems.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel, join_errors
from distmagic.connection.requests.host_requests import route_to
from distmagic.errors import PreflightError
from distmagic.payload.pack import OtherPython
from distmagic.planning import plan as planning
from distmagic.planning import preflight
from distmagic.planning.plan import Plan, Reached
from distmagic.remote.system import facts
from distmagic.remote.wire.protocol import JobTerms, Route, WorkDir
from distmagic.request.spec import JobSpec


def other_python(links: Sequence[Link]) -> OtherPython | None:
    """Return the oldest Python of the hosts that can't run this version's byte code; None if all
    can.
    """
    others = [link for link in links if link.python[:2] != sys.version_info[:2]]
    if not others:
        return None
    oldest = min(others, key=lambda link: link.python[:2])
    return OtherPython(host=oldest.host.name, version=oldest.python[:2])


def prepare(
    links: Sequence[Link],
    spec: JobSpec,
    job: str,
    terms: JobTerms,
    work: WorkDir,
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan for connected hosts, and warnings.

    Raises `PreflightError`, `HostErrors` or `UsageError`.
    """
    names = tuple(link.host.name for link in links)
    local_torch = facts.torch_version()
    warnings: list[str] = []
    for link in links:
        warnings += link.warnings
    errors: list[BaseException] = []
    for link in links:
        try:
            warnings += preflight.check(link.host.name, link.facts, local_torch)
        except PreflightError as error:
            errors.append(error)
    if errors:
        # From all hosts at once, so that the user can fix all of them at once.
        raise join_errors(errors)
    facts_of_all = tuple(link.facts for link in links)
    preflight.check_among(names, facts_of_all)
    warnings += preflight.shared_machines(names, facts_of_all)
    routes, wrong_clocks = routes_of(links)
    warnings += wrong_clocks
    reached = [
        Reached(host=link.host, facts=link.facts, route=route)
        for link, route in zip(links, routes, strict=True)
    ]
    plan = planning.make_plan(
        spec,
        reached,
        job=job,
        terms=terms,
        local_cwd=str(Path.cwd()),
        work=work,
    )
    return plan, tuple(warnings)


def routes_of(links: Sequence[Link]) -> tuple[list[Route], tuple[str, ...]]:
    """Return the address of each host for the other hosts, and a warning for each wrong clock.

    The lead's address is on its route to the other hosts; each other host's address is on its route
    to the lead.
    """
    first = route_of_lead(links)
    if len(links) == 1:
        return [first], ()
    # The lead too, because its clock is compared.
    answers = in_parallel(lambda link: _timed_route(link, first.address), links)
    clocks = [
        (link.host.name, least, most)
        for link, (route, least, most) in zip(links, answers, strict=True)
        if route.time_s
    ]
    routes = [first, *[route for route, _, _ in answers[1:]]]
    return routes, preflight.clocks_apart(clocks)


def route_of_lead(links: Sequence[Link]) -> Route:
    """Return the first host's address for the other hosts."""
    lead, *others = links
    peers = [link.facts.address for link in others if not link.host.is_local]
    if lead.host.is_local and peers:
        return route_to(lead, peers[0])
    return Route(address=lead.facts.address, interface=lead.facts.interface)


def _timed_route(link: Link, peer: str) -> tuple[Route, float, float]:
    """Return the route to a peer, and the min and max of the host's clock minus this machine's
    monotonic one.
    """
    asked = time.monotonic()
    route = route_to(link, peer)
    return route, route.time_s - time.monotonic(), route.time_s - asked

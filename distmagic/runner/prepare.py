"""From hosts that were reached to a plan: they are asked what the plan needs to know, and looked at for what is wrong."""

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
    """Return the oldest Python of the hosts on which this one's byte code does not run; None if it runs on all."""
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
    """Return the plan for hosts that were reached, and warnings. Raises `PreflightError`, `HostErrors` or `UsageError`."""
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
        # Of all hosts at once, so that they can be mended at once.
        raise join_errors(errors)
    facts_of_all = tuple(link.facts for link in links)
    preflight.check_among(names, facts_of_all)
    warnings += preflight.shared_machines(names, facts_of_all)
    routes, wrong_clocks = routes_of(links)
    warnings += wrong_clocks
    reached = []
    for link, route in zip(links, routes, strict=True):
        reached.append(Reached(host=link.host, facts=link.facts, route=route))
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
    """Return each host's address as the others dial it, and a warning for each clock that is wrong.

    The lead's is that which leads to the others, and of the others the one that leads to it.
    """
    first = route_of_lead(links)
    if len(links) == 1:
        return [first], ()
    # The lead, too: it says what time it is.
    answers = in_parallel(lambda link: _timed_route(link, first.address), links)
    clocks = []
    for link, (route, least, most) in zip(links, answers, strict=True):
        if route.time_s:
            clocks.append((link.host.name, least, most))
    routes = [first, *[route for route, _, _ in answers[1:]]]
    return routes, preflight.clocks_apart(clocks)


def route_of_lead(links: Sequence[Link]) -> Route:
    """Return the first host's address as the others dial it."""
    lead, *others = links
    peers = [link.facts.address for link in others if not link.host.is_local]
    if lead.host.is_local and peers:
        return route_to(lead, peers[0])
    return Route(address=lead.facts.address, interface=lead.facts.interface)


def _timed_route(link: Link, peer: str) -> tuple[Route, float, float]:
    """Return the way to a peer, and between which two values the host's clock less this machine's steady one is."""
    asked = time.monotonic()
    route = route_to(link, peer)
    return route, route.time_s - time.monotonic(), route.time_s - asked

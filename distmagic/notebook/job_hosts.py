"""Finds jobs: on the hosts of the notebook, and on hosts where this kernel has started a job, with
the settings of that time.

Each function first asks hosts for their jobs, and then finds the hosts of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from distmagic.errors import DistmagicError
from distmagic.notebook.settings import CommandLine, say
from distmagic.planning.jobs import Job, choose, whereabouts
from distmagic.request.hosts import LOCALHOST, Hosts

if TYPE_CHECKING:
    from distmagic.connection.first_links import FirstLinks


def known_hosts(line: CommandLine, job_name: str = "") -> Hosts:
    """Return the hosts of the notebook; for a job that this kernel has started, its hosts first."""
    session = line.notebook.session()
    request = line.request
    named = line.notebook.choose(request).hosts or (LOCALHOST,)
    names_hosts = request.hosts is not None or request.hostfile is not None
    held = () if names_hosts else session.allocations.hosts
    here = held if held and named == (LOCALHOST,) else (*named, *held)
    begun = session.begun_at(job_name)
    if begun is None:
        return here
    # An elastic job may have moved to other hosts since.
    later = [host for host in here if host not in (*begun.hosts, LOCALHOST)]
    return (*begun.hosts, *later)


def reach(
    line: CommandLine,
    hosts: Hosts,
    job_name: str = "",
    spare: Hosts = (),
) -> FirstLinks:
    """Start to connect to `hosts` in the background; a followed job may later use `spare` hosts.

    For a job that this kernel has started, the SSH configuration and Python of its start are used.
    """
    notebook = line.notebook
    begun = notebook.session().begun_at(job_name)
    access = begun.access if begun else notebook.access(line.request, hosts)
    return notebook.session().reach(hosts, access, line.asker, spare=spare)


def jobs_of(line: CommandLine, job_name: str = "") -> tuple[Job, ...]:
    """Return the jobs of all hosts that are up, and print which hosts are down; `job_name` is the
    wanted job.
    """
    first_links = reach(line, known_hosts(line, job_name), job_name)
    return _listed(line, first_links)


def _listed(line: CommandLine, first_links: FirstLinks) -> tuple[Job, ...]:
    """Return the jobs that these hosts list, and print which hosts are down."""
    found = line.housekeeping.jobs(first_links)
    for why in first_links.absent.values():
        say(f"{why} What it has of jobs is not known.")
    return found


def all_jobs(line: CommandLine) -> tuple[Job, ...]:
    """Return the jobs on the notebook's hosts, and on hosts where this kernel has started any.

    See `jobs_of`.
    """
    session = line.notebook.session()
    # Also by the first host: other hosts may have another job of that name.
    found = {(job.name, job.hosts[0]): job for job in jobs_of(line)}
    asked = {replace(host, slots=None) for host in known_hosts(line)}
    for name in session.begun:
        begun = session.begun_at(name)
        if begun is None:  # a background run has just failed to connect to its hosts
            continue
        more = [replace(host, slots=None) for host in begun.hosts]
        more = [host for host in more if host not in asked and not host.allocation]
        if not more:
            continue
        asked.update(more)
        try:
            first_links = session.reach(tuple(more), begun.access, line.asker)
            for job in _listed(line, first_links):
                found.setdefault((job.name, job.hosts[0]), job)
        except DistmagicError as error:  # they may be gone for good
            say(f"{error.message} So the list lacks their jobs.")
    return tuple(sorted(found.values(), key=lambda job: -job.began_ago_s))


def find(
    line: CommandLine,
    name: str,
    places: Callable[[Job, Hosts], Hosts] = whereabouts,
) -> tuple[Job, Hosts]:
    """Return a job and its hosts, in the order of its nodes; by `known_whereabouts`, those that
    answered.

    Raises `UsageError`.
    """
    job = choose(jobs_of(line, name), name)
    return job, places(job, known_hosts(line, name))

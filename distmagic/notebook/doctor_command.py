"""`%distributed doctor`: finds faults of the hosts, and of the network between them."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.errors import Cancelled, DistmagicError
from distmagic.notebook.host_commands import CommandLine
from distmagic.notebook.job_hosts import known_hosts, reach
from distmagic.request.access import CONNECT_TIMEOUT_S
from distmagic.request.hosts import Host

if TYPE_CHECKING:
    from distmagic.diagnosis.report import Report

_COLLECTIVES_S = 600.0  # a generous limit: hosts may start slowly


def doctor(line: CommandLine) -> Report:
    """Return the doctor's report; in a terminal, after printing it; with --json as data for programs.

    With --collective, also the speed between pairs of hosts, if a run can start.
    """
    from distmagic.session.doctor import CONNECT_S, examine, imported

    notebook, hosts = line.notebook, known_hosts(line)
    access = line.request.access
    if access.connect_timeout_s == CONNECT_TIMEOUT_S:  # the user has not set it
        # This machine needs more time for many hosts.
        seconds = max(CONNECT_S, min(len(hosts) / 4, CONNECT_TIMEOUT_S))
        access = replace(access, connect_timeout_s=seconds)
        line = replace(line, request=replace(line.request, access=access))
    packages = imported(notebook.shell.user_ns) if notebook.shell is not None else ()
    found = examine(reach(line, hosts), packages)
    if line.flags.collective and len(hosts) > 1 and not found.has_errors:
        found = _with_collectives(line, found, hosts)
    cures = [replace(one, cure=notebook.worded(one.cure)) for one in found.findings]
    found = replace(found, findings=tuple(cures), is_data=line.flags.json)
    if notebook.shell is None:
        print(sanitize.lines(repr(found)))
    return found


def _with_collectives(
    line: CommandLine, found: Report, hosts: tuple[Host, ...]
) -> Report:
    """Return the report with the measurements of a run with one rank on each host.

    That run leaves nothing on the hosts.
    """
    from distmagic import api
    from distmagic.diagnosis.report import with_failure, with_pairs
    from distmagic.names import owner
    from distmagic.outcome.run import Run
    from distmagic.remote.checkup.collective import measure
    from distmagic.screens.log import NoScreen

    began = time.monotonic()
    name = f"doctor-{secrets.token_hex(4)}"
    run: object | None
    try:
        run = api.run(
            measure,
            hosts=[replace(host, slots=1) for host in hosts],
            access=replace(line.notebook.access(line.request, hosts), cold=True),
            screen=NoScreen(),  # only the report is printed, possibly for a program
            timeout_s=_COLLECTIVES_S,
            name=name,
        )
        assert isinstance(run, Run)
        found = with_pairs(found, dict(run.results), time.monotonic() - began)
    except Cancelled:
        raise
    except DistmagicError as error:
        found = with_failure(found, error)
        run = getattr(error, "run", None)
    jobs = line.housekeeping.jobs(reach(line, hosts))
    ours = [job for job in jobs if job.name == getattr(run, "job", "")]
    line.housekeeping.remove(reach(line, hosts), ours, owner())
    kept = {host.name: [name] for host in hosts if not host.is_local}
    line.housekeeping.remove_work_dirs(reach(line, hosts), kept)
    return found

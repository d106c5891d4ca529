"""Requests to a host about itself and about what it stores: jobs, blobs, working directories."""

from __future__ import annotations

import time

from distmagic.connection.link import BOOT_TIMEOUT_S, WALK_S, Link
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_JOBS


def route_to(link: Link, peer: str) -> protocol.Route:
    """Return the address and interface of this host on its route to `peer`; "" means its route to
    this notebook.
    """
    return link.query(protocol.GetRoute(peer=peer), protocol.Route)


def examine(
    link: Link, request: protocol.Examine
) -> tuple[protocol.Examined, tuple[float, float]]:
    """Return the host's answers for the doctor, and the min and max seconds by which its clock is
    ahead of this machine's.

    The comparison uses this machine's monotonic clock, so these values can only be compared between
    hosts.
    """
    asked = time.monotonic()
    found = link.query(request, protocol.Examined)
    its_s = found.route.time_s
    return found, (its_s - time.monotonic(), its_s - asked)


def knock(link: Link, doors: tuple[protocol.HostDoor, ...]) -> tuple[str, ...]:
    """Return the ports in `doors` of other hosts to which this host can connect; see
    `distmagic.remote.checkup.doors`.

    An empty `doors` makes the host close its own ports.
    """
    return link.query(protocol.Knock(doors=doors), protocol.Knocked).answers


def free_port(link: Link, address: str) -> int:
    """Return a free port at this host's own `address`.

    Raises `PreflightError` if it has no such address.
    """
    return link.query(protocol.GetFreePort(address=address), protocol.FreePort).port


def claim_devices(
    link: Link, job: str, devices: tuple[str, ...]
) -> tuple[protocol.DeviceClaim, ...]:
    """Reserve all these devices of the host for a job, or none; return the claims of jobs that have
    some of them.

    An empty result means that the job has them now. Empty `devices` releases all.
    """
    request = protocol.ClaimDevices(job=job, devices=devices)
    return link.query(request, protocol.DevicesClaimed).others


def list_jobs(link: Link, job: str = "") -> tuple[protocol.JobListing, ...]:
    """Return the host's jobs, or one `job`, oldest first; very long lists are cut."""
    found: list[protocol.JobListing] = []
    with link.bounded(WALK_S, "had no end of its list of jobs"):
        link.send(protocol.ListJobs(job=job))
        while True:
            with link.bounded(BOOT_TIMEOUT_S):
                some = link.answer(protocol.Jobs).jobs
            if not some:
                return tuple(found)
            found += some[: MOST_JOBS - len(found)]


def remove_job(link: Link, job: str, owner: str = "") -> int:
    """Remove the files of a finished job on the host; return the bytes.

    With an `owner`, the host removes nothing of a job that its records assign to another owner.
    Raises `PreflightError` if it still runs.
    """
    request = protocol.RemoveJob(job=job, owner=owner)
    return link.query(request, protocol.Removed, WALK_S).size_bytes


def prune_blobs(link: Link, *, removes: bool, owner: str = "") -> int:
    """Return the bytes of unused blobs and other generated files on the host; with `removes`,
    remove them.

    With an `owner`, files of other owners are left out.
    """
    request = protocol.PruneBlobs(removes=removes, owner=owner)
    return link.query(request, protocol.Removed, WALK_S).size_bytes


def list_work_dirs(link: Link) -> tuple[protocol.KeptWorkDir, ...]:
    """Return the working directories on the host."""
    return link.query(protocol.ListWorkDirs(), protocol.WorkDirs, WALK_S).dirs


def remove_work_dir(link: Link, name: str) -> int:
    """Remove a working directory on the host; return the bytes.

    Raises `PreflightError` if a job uses it.
    """
    request = protocol.RemoveWorkDir(name=name)
    return link.query(request, protocol.Removed, WALK_S).size_bytes

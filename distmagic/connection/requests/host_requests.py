"""What a host is asked about itself, and about what it keeps: jobs, blobs, working directories."""

from __future__ import annotations

import time

from distmagic.connection.link import BOOT_TIMEOUT_S, Link
from distmagic.remote.wire import protocol
from distmagic.remote.wire.bounds import MOST_JOBS

_LISTING_S = (
    600.0  # for all of it; a slow file server takes half a minute for a thousand jobs
)


def route_to(link: Link, peer: str) -> protocol.Route:
    """Return the address, and its interface, from which this host dials `peer`; "": its address towards this notebook."""
    return link.query(protocol.GetRoute(peer=peer), protocol.Route)


def examine(
    link: Link, request: protocol.Examine
) -> tuple[protocol.Examined, tuple[float, float]]:
    """Return what can be wrong with this host, and the least and the most seconds that its clock can be ahead of ours.

    Of our clock only the steady one counts, so that these are comparable among hosts alone.
    """
    asked = time.monotonic()
    found = link.query(request, protocol.Examined)
    its_s = found.route.time_s
    return found, (its_s - time.monotonic(), its_s - asked)


def knock(link: Link, doors: tuple[protocol.HostDoor, ...]) -> tuple[str, ...]:
    """Return which of these doors of other hosts the host can dial; see `distmagic.remote.checkup.doors`.

    Without any the host closes its own doors.
    """
    return link.query(protocol.Knock(doors=doors), protocol.Knocked).answers


def free_port(link: Link, address: str) -> int:
    """Return a port of this host's own `address` that is free now. Raises `PreflightError` where it has no such address."""
    return link.query(protocol.GetFreePort(address=address), protocol.FreePort).port


def claim_devices(
    link: Link, job: str, devices: tuple[str, ...]
) -> tuple[protocol.DeviceClaim, ...]:
    """Get all these devices of the host for a job, or none; return the claims of jobs that have some of them.

    None: this job has them now. No devices: give all back.
    """
    request = protocol.ClaimDevices(job=job, devices=devices)
    return link.query(request, protocol.DevicesClaimed).others


def list_jobs(link: Link, job: str = "") -> tuple[protocol.JobListing, ...]:
    """Return what the host has of jobs, or of one `job`; the oldest first, and of very many only these."""
    found: list[protocol.JobListing] = []
    with link.bounded(_LISTING_S, "had no end of its list of jobs"):
        link.send(protocol.ListJobs(job=job))
        while True:
            with link.bounded(BOOT_TIMEOUT_S):
                some = link.answer(protocol.Jobs).jobs
            if not some:
                return tuple(found)
            found += some[: MOST_JOBS - len(found)]


def remove_job(link: Link, job: str, owner: str = "") -> int:
    """Remove what a job that has ended left on the host; return the bytes. Raises `PreflightError` if it runs.

    With an `owner` the host removes nothing of a job that it knows to be another one's.
    """
    request = protocol.RemoveJob(job=job, owner=owner)
    return link.query(request, protocol.Removed).size_bytes


def prune_blobs(link: Link, *, removes: bool, owner: str = "") -> int:
    """Return how many bytes of blobs and more the host keeps that nobody uses; with `removes` it has removed them.

    With an `owner` without what others have made.
    """
    request = protocol.PruneBlobs(removes=removes, owner=owner)
    return link.query(request, protocol.Removed).size_bytes


def list_work_dirs(link: Link) -> tuple[protocol.KeptWorkDir, ...]:
    """Return the working directories that the host keeps."""
    return link.query(protocol.ListWorkDirs(), protocol.WorkDirs).dirs


def remove_work_dir(link: Link, name: str) -> int:
    """Remove a working directory on the host; return the bytes. Raises `PreflightError` if a job uses it."""
    return link.query(protocol.RemoveWorkDir(name=name), protocol.Removed).size_bytes

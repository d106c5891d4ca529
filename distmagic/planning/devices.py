"""`--devices` that other jobs have: in which order hosts are waited for, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from distmagic.errors import PreflightError
from distmagic.remote.wire.protocol import DeviceClaim, Facts


def waiting_order(facts: Sequence[Facts]) -> list[int]:
    """Return the places of hosts in the order in which every run waits for them.

    A run that waits for one host keeps the devices of those before it. Two runs never wait for each other, because all
    have one order, whatever the hosts are called.
    """
    return sorted(range(len(facts)), key=lambda place: facts[place].host_id)


def waits_for(before: Sequence[DeviceClaim]) -> str:
    """Return which devices a run waits for, and because of which job.

    `before` are the claims of the jobs before it, the oldest first, at least one.
    """
    first = _in_the_way(before)
    devices = [claim.device for claim in before if claim.job == first.job]
    named = f"device{'s' if len(devices) > 1 else ''} {','.join(devices)}"
    if not first.job:
        return f"{named}, held by another run"
    job = f"job {first.job}"
    if first.owner:
        job += f" of {first.owner}"
    since = time.strftime("%H:%M", time.localtime(first.since_s))
    if first.is_held:
        text = f"{named}, held by {job} since {since}"
    else:
        text = f"{named}, which {job} has been waiting for since {since}"
    others = len({claim.job for claim in before} - {first.job})
    if others:
        text += f"; {others} more {'runs come' if others > 1 else 'run comes'} before"
    return text


def _in_the_way(before: Sequence[DeviceClaim]) -> DeviceClaim:
    """Return the oldest claim of a job that has a device; where none has, that of the first one in the queue."""
    return next((claim for claim in before if claim.is_held), before[0])


def lapsed(host: str, before: Sequence[DeviceClaim]) -> str:
    """Return the notice of a run that had devices of a host, while it waited for those of another one, and lost them."""
    return (
        f"{host}: other runs got its devices, because nothing was heard of this machine for the length of the lease "
        f"(was it asleep?). The run waits for them again: {waits_for(before)}."
    )


def missing_at_join(host: str, before: Sequence[DeviceClaim]) -> PreflightError:
    """Return the error of a host that was to come to an elastic job, and whose devices other jobs have."""
    return PreflightError(host, f"the run would wait for {waits_for(before)}.")


def refusal(host: str, before: Sequence[DeviceClaim]) -> PreflightError:
    """Return the error of a run that was not to wait (--no-wait) for the jobs before it."""
    hint = "Name other devices, or leave out --no-wait: then the run begins as soon as they are free."
    job = _in_the_way(before).job
    if job:
        hint += f" %distributed stop {job} ends that job, if it is yours."
    return PreflightError(
        host, f"--no-wait, but the run would wait for {waits_for(before)}.", hint
    )

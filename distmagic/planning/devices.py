"""Messages about `--devices` that other jobs use, for a run that waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from distmagic.errors import PreflightError
from distmagic.remote.wire.protocol import DeviceClaim


def waits_for(claims: Sequence[DeviceClaim]) -> str:
    """Return as text which devices a run waits for, and which job has them.

    `claims` are those of other jobs, at least one.
    """
    first = claims[0]
    devices = [claim.device for claim in claims if claim.job == first.job]
    named = f"device{'s' if len(devices) > 1 else ''} {','.join(devices)}"
    if not first.job:
        return f"{named}, held by another run"
    job = f"job {first.job}"
    if first.owner:
        job += f" of {first.owner}"
    since = time.strftime("%H:%M", time.localtime(first.since_s))
    others = len({claim.job for claim in claims} - {first.job})
    more = (
        f"; {others} more {'jobs have' if others > 1 else 'job has'} others"
        if others
        else ""
    )
    return f"{named}, held by {job} since {since}{more}"


def missing_at_join(host: str, claims: Sequence[DeviceClaim]) -> PreflightError:
    """Return the error for a host that can't join an elastic job because other jobs have its
    devices.
    """
    return PreflightError(host, f"the run would wait for {waits_for(claims)}.")


def refusal(host: str, claims: Sequence[DeviceClaim]) -> PreflightError:
    """Return the error for a run with --no-wait whose devices other jobs have."""
    hint = "Name other devices, or leave out --no-wait: then the run starts as soon as they are free."
    job = claims[0].job
    if job:
        hint += f" %distributed stop {job} ends that job, if it is yours."
    return PreflightError(
        host, f"--no-wait, but the run would wait for {waits_for(claims)}.", hint
    )

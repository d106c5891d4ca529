"""Which job has a device of this host, and which jobs wait for it: names of unix sockets that are bound, and nothing else.

    distmagic-device-KEY                     a job has the device: only one socket can have this name
    distmagic-claim-KEY-SINCE-UID-JOB        a job asked for it, SINCE nanoseconds after 1970, and has it or waits for it

The names are in the abstract namespace, which all users of this network share, and /proc/net/unix lists them. Nobody
can connect to them. A name is gone as soon as no process has its socket: nothing is left of a job that was killed.

A job gets all its devices of the host at once: when no older claim of another job is on any of them. So jobs get devices
in the order in which they asked, and on one host none waits for a device while it has another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.system import facts, processes
from distmagic.remote.wire.parts import DeviceClaim

_HELD = "distmagic-device-"
_CLAIM = "distmagic-claim-"
_LISTING = Path("/proc/net/unix")
_ASLEEP_S = 60.0  # a notebook that waits for devices asks every second
_MOST_DEVICES = 100  # more than a host has; each takes two descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One job's claim on one device. `key` names the device, `uid` is the user's number."""

    key: str
    since_ns: int
    uid: int
    job: str

    @property
    def name(self) -> str:
        """The name of its socket."""
        return f"{_CLAIM}{self.key}-{self.since_ns}-{self.uid}-{self.job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimQueue:
    """All claims on devices of this host, and the keys of those devices that a job has."""

    claims: tuple[Claim, ...]
    held: frozenset[str]


def parse(listing: str) -> ClaimQueue:
    """Return what the text of /proc/net/unix says of devices. Names of others are left out. Pure."""
    claims = []
    held = set()
    for line in listing.splitlines():
        name = line.rpartition("@")[2]
        if name.startswith(_HELD):
            held.add(name.removeprefix(_HELD))
        elif name.startswith(_CLAIM):
            words = name.removeprefix(_CLAIM).split("-", 3)
            if len(words) == 4 and words[1].isdecimal() and words[2].isdecimal():
                key, since, uid, job = words
                claims.append(
                    Claim(key=key, since_ns=int(since), uid=int(uid), job=job)
                )
    return ClaimQueue(claims=tuple(claims), held=frozenset(held))


def claims_before(own: Sequence[Claim], claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims of other jobs on the same devices that are older than our `own`, the oldest first. Pure."""
    places = {claim.key: (claim.since_ns, claim.job) for claim in own}
    jobs = {claim.job for claim in own}
    before = []
    for claim in claims:
        place = (claim.since_ns, claim.job)
        if claim.job not in jobs and place < places.get(claim.key, (0, "")):
            before.append(claim)
    return tuple(sorted(before, key=lambda claim: (claim.since_ns, claim.job)))


class DeviceClaims:
    """The claims of one node of a job. They last as long as a process has their descriptors open: this one, or an agent."""

    def __init__(self) -> None:
        self._wanted: tuple[str, tuple[str, ...]] = ("", ())
        self._own: tuple[Claim, ...] = ()
        self._devices: dict[str, str] = {}  # as the job names them, by key
        self._sockets: list[socket.socket] = []
        self._has_devices = False
        # After how much silence of the notebook others get the devices; 0: they are kept.
        self.lease_s = 0.0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a process has to keep open to keep the devices."""
        return tuple(one.fileno() for one in self._sockets)

    def take(
        self, job: str, devices: tuple[str, ...], *, waits: bool, lease_s: float = 0.0
    ) -> tuple[DeviceClaim, ...]:
        """Get devices for a job; return the claims of jobs before it, none if it has the devices now.

        With `waits` the job keeps its place in the queue until it asks again. Without, nothing is kept of a job that
        does not get its devices. `lease_s` holds until the job asks again, see `lapse`. Raises OSError and ValueError.
        """
        if (job, devices) != self._wanted:
            self.release()
            self._claim(job, devices)
        self.lease_s = lease_s
        if self._has_devices:
            return ()
        before = claims_before(self._own, parse(_LISTING.read_text()).claims)
        if not before:
            before = self._hold()
        held = parse(_LISTING.read_text()).held
        told = tuple(_told(claim, self._devices[claim.key], held) for claim in before)
        if before and not waits:
            self.release()
        return told

    def release(self) -> None:
        """Give devices back, and places in the queue; what an agent has open stays."""
        for one in self._sockets:
            one.close()
        self._sockets = []
        self._own = ()
        self._wanted = ("", ())
        self._has_devices = False
        self.lease_s = 0.0

    def lapse(self, silent_s: float) -> None:
        """Let the jobs behind this one go first, if its notebook has been silent for too long; it has to ask again then.

        That is a minute for a place in the queue. Devices that the job has go to others after their lease, if there is
        one.
        """
        limit_s = self.lease_s if self._has_devices else _ASLEEP_S
        if limit_s and silent_s >= limit_s:
            self.release()

    def _claim(self, job: str, devices: tuple[str, ...]) -> None:
        if len(devices) > _MOST_DEVICES:
            raise ValueError(f"{len(devices)} devices are more than a host has")
        uuids = facts.nvidia_uuids()
        self._devices = {device_key(device, uuids): device for device in devices}
        since_ns = int(processes.up_s() * 1e9)
        claims = []
        for key in sorted(self._devices):
            claims.append(Claim(key=key, since_ns=since_ns, uid=os.getuid(), job=job))
        self._wanted = (job, devices)
        self._own = tuple(claims)
        for claim in claims:
            self._sockets.append(_bound(claim.name))

    def _hold(self) -> tuple[Claim, ...]:
        """Hold all devices, or none where another job has one; return the claims of that job."""
        held: list[socket.socket] = []
        for own in self._own:
            try:
                held.append(_bound(f"{_HELD}{own.key}"))
            except OSError:
                there = parse(_LISTING.read_text()).claims
                on_it = [claim for claim in there if claim.key == own.key]
                others = [claim for claim in on_it if claim.job != own.job]
                # One machine may be two nodes of the job, which then share the device.
                if not others and len(on_it) > 1:
                    continue
                for one in held:
                    one.close()
                unknown = Claim(key=own.key, since_ns=own.since_ns, uid=own.uid, job="")
                return tuple(others) or (unknown,)
        self._sockets += held
        self._has_devices = True
        return ()


def device_key(device: str, uuids: Sequence[str] = ()) -> str:
    """Return what names a device in the names of sockets, which are short: a number as it is, any other word hashed.

    `uuids` are those of the host's GPUs, by number. A GPU with a UUID has one key, however it is named, also where each
    container or allocation numbers its own GPUs from 0. Pure.
    """
    fits = [uuid for uuid in uuids if uuid.startswith(device)]
    if device.isdecimal():
        fits = list(uuids[int(device) : int(device) + 1])
    name = fits[0] if len(fits) == 1 else device
    if name.isdecimal():
        return str(int(name))
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _bound(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


def _told(claim: Claim, device: str, held: frozenset[str]) -> DeviceClaim:
    owner = ""
    if claim.uid != os.getuid():
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(claim.uid).pw_name
    return DeviceClaim(
        device=device,
        job=claim.job,
        owner=owner,
        since_s=time.time() - processes.up_s() + claim.since_ns / 1e9,
        is_held=claim.key in held,
    )

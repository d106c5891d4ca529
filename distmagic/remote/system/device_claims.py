"""Records which job has a device of this host, only by the names of bound unix sockets.

    distmagic-device-KEY               a job has the device: only one socket can have this name
    distmagic-claim-KEY-SINCE-UID-JOB  this job of user UID has it since SINCE, in nanoseconds after
                                       boot

The names are in the abstract namespace, which all users of a network namespace share, and
/proc/net/unix lists them. No process can connect to them. A name disappears with the last process
that has its socket, so a killed job leaves nothing.

A job gets all its devices of the host at once, or none. So no job waits for a device while it has
another one on the same host.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.system import facts, processes
from distmagic.remote.wire.parts import DeviceClaim

_HELD = "distmagic-device-"
_CLAIM = "distmagic-claim-"
_LISTING = Path("/proc/net/unix")
_MOST_DEVICES = 100  # more than a host has; each takes two descriptors


@frozen
class Claim:
    """One job's claim on one device. `key` identifies the device, `uid` is the user ID."""

    key: str
    since_ns: int
    uid: int
    job: str

    @property
    def name(self) -> str:
        """The name of its socket."""
        return f"{_CLAIM}{self.key}-{self.since_ns}-{self.uid}-{self.job}"


def parse(listing: str) -> tuple[Claim, ...]:
    """Return the claims in the text of /proc/net/unix, oldest first.

    Other names are left out. Pure.
    """
    claims = []
    for line in listing.splitlines():
        name = line.rpartition("@")[2]
        words = name.removeprefix(_CLAIM).split("-", 3)
        is_claim = name.startswith(_CLAIM) and len(words) == 4
        if is_claim and words[1].isdecimal() and words[2].isdecimal():
            key, since, uid, job = words
            claims.append(Claim(key=key, since_ns=int(since), uid=int(uid), job=job))
    return tuple(sorted(claims, key=lambda claim: (claim.since_ns, claim.job)))


class DeviceClaims:
    """The devices of one node of a job.

    They are reserved while a process has the descriptors open: this one, or an agent.
    """

    def __init__(self) -> None:
        self._job = ""
        self._sockets: list[socket.socket] = []

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a process must keep open to reserve the devices."""
        return tuple(one.fileno() for one in self._sockets)

    def take(self, job: str, devices: tuple[str, ...]) -> tuple[DeviceClaim, ...]:
        """Reserve all these devices for a job, or none; return the claims of the jobs that have
        some of them.

        An empty result means that the job has them now. Raises OSError and ValueError.
        """
        if len(devices) > _MOST_DEVICES:
            raise ValueError(f"{len(devices)} devices are more than a host has")
        if self._sockets and self._job == job:
            return ()
        self.release()
        uuids = facts.nvidia_uuids()
        keys = {device_key(device, uuids): device for device in devices}
        since_ns = int(processes.up_s() * 1e9)
        own = [Claim(key=key, since_ns=since_ns, uid=os.getuid(), job=job) for key in sorted(keys)]  # fmt: skip
        taken = []
        for claim in own:
            is_held = False
            with suppress(OSError):
                self._sockets.append(facts.named_socket(f"{_HELD}{claim.key}"))
                is_held = True
            there = [one for one in parse(_LISTING.read_text()) if one.key == claim.key]
            others = [one for one in there if one.job != job]
            # One machine may be two nodes of the job, which then share the device.
            if not is_held and not there:
                others = [replace(claim, job="")]  # its claim name does not exist yet
            taken += others
        if taken:
            self.release()
            return tuple(_told(claim, keys[claim.key]) for claim in taken)
        self._sockets += [facts.named_socket(claim.name) for claim in own]
        self._job = job
        return ()

    def release(self) -> None:
        """Release the devices; descriptors that an agent has open keep them reserved."""
        for one in self._sockets:
            one.close()
        self._sockets = []
        self._job = ""


def device_key(device: str, uuids: Sequence[str] = ()) -> str:
    """Return a short key of a device for names of sockets: a number unchanged, any other word
    hashed.

    `uuids` are those of the host's GPUs, by number. A GPU with a UUID has one key under all its
    names, even if each container or allocation numbers its own GPUs from 0. Pure.
    """
    fits = [uuid for uuid in uuids if uuid.startswith(device)]
    if device.isdecimal():
        fits = list(uuids[int(device) : int(device) + 1])
    name = fits[0] if len(fits) == 1 else device
    if name.isdecimal():
        return str(int(name))
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _told(claim: Claim, device: str) -> DeviceClaim:
    owner = ""
    if claim.uid != os.getuid():
        with suppress(KeyError):
            owner = pwd.getpwuid(claim.uid).pw_name
    since_s = time.time() - processes.up_s() + claim.since_ns / 1e9
    return DeviceClaim(device=device, job=claim.job, owner=owner, since_s=since_s)

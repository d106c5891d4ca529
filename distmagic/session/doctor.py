"""Collects what `%distributed doctor` shows: asks all hosts at once.

It changes nothing on them, and leaves nothing behind.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests import host_requests
from distmagic.diagnosis.finding import (
    ANSWERS,
    ANY_PORT,
    Finding,
    Subject,
    Unreached,
)
from distmagic.diagnosis.report import Report, report
from distmagic.errors import DistmagicError
from distmagic.remote.frozen import frozen
from distmagic.remote.system import facts
from distmagic.remote.wire import protocol
from distmagic.runner.prepare import route_of_lead

_OTHER_NAMES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
CONNECT_S = 5.0  # time limit for a connection to a host that may not answer
_TORCHS_PORT = 29500  # torch's default port for a rendezvous
# Packages whose versions matter to a job, even if the notebook has not imported them.
PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flash-attn",
    "lightning",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "peft",
    "pytorch-lightning",
    "torch",
    "torchvision",
    "transformers",
    "triton",
)


@frozen
class _Visit:
    """A host with its answer. It listens on the ports in that for hosts that have its `secret`."""

    subject: Subject
    link: Link
    secret: str


def examine(
    first_links: FirstLinks,
    packages: Sequence[str] = (),
    port: int = 0,
    reported: Sequence[Finding] = (),
) -> Report:
    """Return the faults of the hosts, and of the network between them.

    An unreachable host is a finding, too.

    Each host is asked once, and then connects to each other one. `packages` are the notebook's
    packages, by distribution name. `port` is the rendezvous port if the user has named one, else
    torch's default is tested. `reported` are findings of the hosts' scheduler. Raises `Cancelled`
    for an interrupt.
    """
    began = time.monotonic()
    found = first_links.each()
    links = [one for one in found if isinstance(one, Link)]
    names = [host.name for host in first_links.fleet.hosts]
    request = protocol.Examine(packages=tuple(dict.fromkeys((*PACKAGES, *packages))))
    try:
        if len(links) > 1:
            ports = (port or _TORCHS_PORT, ANY_PORT)
            request = replace(request, peer=_meeting_place(links), ports=ports)
        named_ports = (port,) if port else ()
        own_s = time.time() - time.monotonic()
        visit = partial(_visit, request, named_ports, own_s)
        asked = in_parallel(visit, names, found)
        visits = [one for one in asked if isinstance(one, _Visit)]
        subjects = in_parallel(partial(_dialled, visits, request.ports), visits)
        in_parallel(_shut, visits)
    except BaseException:  # an answer may still be on its way
        in_parallel(Link.close, links)
        raise
    in_parallel(first_links.opener.connections.keep_idle, links)
    answered = iter(subjects)
    every: list[Subject | Unreached] = [
        one if isinstance(one, Unreached) else next(answered) for one in asked
    ]
    took_s = time.monotonic() - began
    return report(every, facts.torch_version(), took_s, reported)


def imported(names: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages of all modules that cells have imported; most have the same name as their
    module.
    """
    modules = set()
    for value in names.values():
        module = value.__name__ if isinstance(value, types.ModuleType) else None
        module = module or getattr(value, "__module__", None)
        if isinstance(module, str):
            modules.add(module.partition(".")[0])
    modules -= {*sys.stdlib_module_names, "__main__"}
    return tuple(sorted(_OTHER_NAMES.get(module, module) for module in modules))


def port_in(reason: str) -> int:
    """Return the port in the reason why a node can't connect to the rendezvous, 0 if it has
    none.
    """
    found = re.search(r" port (\d{1,5})\b", reason)
    return int(found[1]) if found else 0


def _meeting_place(links: Sequence[Link]) -> str:
    """Return the address of the first host, to which the other hosts connect in a run."""
    try:
        return route_of_lead(links).address
    except DistmagicError:  # it is gone now, or has no address that leads to the others
        return links[0].facts.address


def _visit(
    request: protocol.Examine,
    named_ports: tuple[int, ...],
    own_s: float,
    name: str,
    found: Link | DistmagicError,
) -> _Visit | Unreached:
    """Return a host's answer, or the error of asking it. From then on it listens.

    `own_s` is this machine's time minus its monotonic clock.
    """
    if isinstance(found, DistmagicError):
        return Unreached(name=name, error=found)
    # Each host has its own secret: an address that two hosts share may lead to the wrong one.
    secret = secrets.token_hex(16)
    try:
        examined, (least, most) = host_requests.examine(found, replace(request, secret=secret))  # fmt: skip
    except DistmagicError as error:
        found.close()
        return Unreached(name=name, error=error)
    subject = Subject(
        name=name,
        by_hand=found.by_hand,
        python=found.python,
        facts=found.facts,
        examined=examined,
        clock_s=(least - own_s, most - own_s),
        named_ports=named_ports,
    )
    return _Visit(subject=subject, link=found, secret=secret)


def _dialled(visits: Sequence[_Visit], kinds: Sequence[int], one: _Visit) -> Subject:
    """Return a host with the results of its connections to all others; a host that is gone has
    none.
    """
    doors, asked = [], []
    own = visits.index(one)
    # It starts with the next host, so that all hosts do not connect to the same one at once.
    for other in (*visits[own + 1 :], *visits[:own]):
        examined = other.subject.examined
        address = examined.route.address
        # A port is 0 if another program uses it.
        for kind, port in zip(kinds, examined.ports, strict=False):
            if port:
                doors.append(protocol.HostDoor(address=address, port=port, secret=other.secret))  # fmt: skip
                asked.append((other.subject.name, kind))
    if not doors:
        return one.subject
    try:
        answers = host_requests.knock(one.link, tuple(doors))
    except DistmagicError:
        return one.subject
    dials = {}
    for place, answer in zip(asked, answers, strict=False):
        dials[place] = answer if answer in ANSWERS else "another"
    return replace(one.subject, dials=dials)


def _shut(one: _Visit) -> None:
    """Close the listening ports of a host whose link stays open; those of any other host close with
    its link.
    """
    if one.link.kept is not None:
        try:
            host_requests.knock(one.link, ())
        except DistmagicError:
            one.link.close()

"""The doctor: asks all hosts at once what can be wrong with them. It changes nothing there, and leaves nothing behind."""

from __future__ import annotations

import re
import secrets
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests import host_requests
from distmagic.diagnosis.finding import ANSWERS, ANY_PORT, Subject, Unreached
from distmagic.diagnosis.report import Report, report
from distmagic.errors import DistmagicError
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
CONNECT_S = 5.0  # to a host that may well be silent
_TORCHS_PORT = 29500  # where runs by hand meet
# Packages whose versions matter to a job, whether the notebook has imported them or not.
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


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """A host that was asked. It listens on `ports` for those that have its `secret`."""

    subject: Subject
    link: Link
    secret: str
    ports: tuple[int, ...]


def examine(
    first_links: FirstLinks, packages: Sequence[str] = (), port: int = 0
) -> Report:
    """Return what is wrong with the hosts, and between them. A host that can't be reached is a finding, too.

    Each host is asked once, and then dials each other one. `packages` are those of the notebook, by the names of their
    distributions. `port` is the one at which a run meets, if the user has named it, else torch's own is tried. Raises
    `Cancelled` for an interrupt.
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
        asked = in_parallel(partial(_visit, request), names, found)
        visits = [one for one in asked if isinstance(one, _Visit)]
        subjects = in_parallel(partial(_dialled, visits, request.ports), visits)
        in_parallel(_shut, visits)
    except BaseException:  # an answer may be on its way yet
        in_parallel(Link.close, links)
        raise
    in_parallel(first_links.opener.connections.keep_idle, links)
    answered = iter(subjects)
    every: list[Subject | Unreached] = []
    for one in asked:
        if isinstance(one, Unreached):
            every.append(one)
        else:
            named = (port,) if port else ()
            every.append(replace(next(answered), named_ports=named))
    return report(every, facts.torch_version(), time.monotonic() - began)


def imported(names: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages of the modules that cells have imported, by whichever name: most are called as their module is."""
    modules = set()
    for value in names.values():
        module = value.__name__ if isinstance(value, types.ModuleType) else None
        module = module or getattr(value, "__module__", None)
        if isinstance(module, str):
            modules.add(module.partition(".")[0])
    modules -= {*sys.stdlib_module_names, "__main__"}
    return tuple(sorted(_OTHER_NAMES.get(module, module) for module in modules))


def port_in(reason: str) -> int:
    """Return the port that stands in the reason why a node can't dial the rendezvous, 0 for none."""
    found = re.search(r" port (\d{1,5})\b", reason)
    return int(found[1]) if found else 0


def _meeting_place(links: Sequence[Link]) -> str:
    """Return the address of the first host as the others dial it in a run."""
    try:
        return route_of_lead(links).address
    except DistmagicError:  # it has just gone, or no way leads to the others
        return links[0].facts.address


def _visit(
    request: protocol.Examine, name: str, found: Link | DistmagicError
) -> _Visit | Unreached:
    """Return what a host answers, or what is wrong with it. From then on it listens."""
    if isinstance(found, DistmagicError):
        return Unreached(name=name, error=found)
    # A secret of its own: who dials an address that two hosts have may reach the other one.
    secret = secrets.token_hex(16)
    try:
        examined, clock_s = host_requests.examine(found, replace(request, secret=secret))  # fmt: skip
    except DistmagicError as error:
        found.close()
        return Unreached(name=name, error=error)
    subject = Subject(
        name=name,
        by_hand=found.by_hand,
        python=found.python,
        facts=found.facts,
        examined=examined,
        clock_s=clock_s,
    )
    return _Visit(subject=subject, link=found, secret=secret, ports=examined.ports)


def _dialled(visits: Sequence[_Visit], kinds: Sequence[int], one: _Visit) -> Subject:
    """Return a host with what it finds behind the doors of all others; one that is gone meanwhile finds nothing."""
    doors, asked = [], []
    own = visits.index(one)
    # The next one first, so that no host is dialled by all at the same time.
    for other in (*visits[own + 1 :], *visits[:own]):
        address = other.subject.examined.route.address
        # A port is 0 where something else has it.
        for kind, port in zip(kinds, other.ports, strict=False):
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
    """Close the doors of a host whose link rests from now on; those of any other close with its link."""
    if one.link.kept is not None:
        try:
            host_requests.knock(one.link, ())
        except DistmagicError:
            one.link.close()

"""The doctor: asks all hosts at once what can be wrong with them. It changes nothing there, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distmagic.connection.first_links import FirstLinks
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests import host_requests
from distmagic.diagnosis.finding import Subject
from distmagic.diagnosis.report import Report, report
from distmagic.errors import DistmagicError
from distmagic.remote.system import facts
from distmagic.remote.wire.protocol import Route
from distmagic.runner.prepare import routes_of
from distmagic.session.dialling import Dialling

_OTHER_NAMES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
CONNECT_S = 5.0  # to a host that may well be silent
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


def examine(
    first_links: FirstLinks, packages: Sequence[str] = (), port: int = 0
) -> Report:
    """Return what is wrong with the hosts, and between them. A host that can't be reached is a finding, too.

    `packages` are those of the notebook, by the names of their distributions. `port` is the one at which a run meets, if the
    user has named it, else torch's own is tried. Raises `Cancelled` for an interrupt.
    """
    began = time.monotonic()
    wanted = tuple(dict.fromkeys((*PACKAGES, *packages)))
    found = first_links.each()
    links = [one for one in found if isinstance(one, Link)]
    try:
        asked = in_parallel(lambda one: _asked(one, wanted), found)
        subjects = [
            replace(subject, name=host.name)
            for host, subject in zip(first_links.fleet.hosts, asked, strict=True)
        ]
        subjects = _with_routes(subjects, found)
        there = {
            index: link
            for index, link in enumerate(found)
            if isinstance(link, Link) and subjects[index].route is not None
        }
        if len(there) > 1:
            subjects = Dialling(subjects, there, port).result()
    except BaseException:  # an answer may be on its way yet
        in_parallel(Link.close, links)
        raise
    in_parallel(first_links.opener.connections.keep_idle, links)
    return report(subjects, facts.torch_version(), time.monotonic() - began)


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


def _asked(found: Link | DistmagicError, packages: tuple[str, ...]) -> Subject:
    """Return what a host answers, or what is wrong with it."""
    if isinstance(found, DistmagicError):
        return Subject(name="", error=found)
    try:
        examined, least, most = host_requests.examine(found, packages)
    except DistmagicError as error:
        found.close()
        return Subject(name="", error=error)
    return Subject(
        name="",
        by_hand=found.by_hand,
        python=found.python,
        facts=found.facts,
        examined=examined,
        clock_s=(least, most),
    )


def _with_routes(
    subjects: Sequence[Subject], found: Sequence[Link | DistmagicError]
) -> list[Subject]:
    """Return the hosts with their addresses as the others would dial them in a run."""
    there = {
        index: link
        for index, link in enumerate(found)
        if isinstance(link, Link) and subjects[index].error is None
    }
    routes = {}
    if there:
        try:
            answers, _ = routes_of(list(there.values()))
        except DistmagicError:  # of a host that has just gone
            answers = [
                Route(address=link.facts.address, interface=link.facts.interface)
                for link in there.values()
            ]
        routes = dict(zip(there, answers, strict=True))
    return [
        replace(subject, route=routes.get(index))
        for index, subject in enumerate(subjects)
    ]

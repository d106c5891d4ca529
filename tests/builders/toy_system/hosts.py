"""`--on toy` puts nodes on a shelf; `--on toy:SHELF` takes those of one that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distmagic.errors import UsageError
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Host, Source
from distmagic.transports.local import LocalTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRequest(HostsRequest):
    system: ClassVar[str] = "toy"
    shelf: str = ""
    nodes: int = 1

    @property
    def is_there(self):
        return bool(self.shelf)


def asked(place, wanted):
    if wanted.options:
        raise UsageError(
            f"--{wanted.options[0][0]} means nothing to a toy.", "Leave it out."
        )
    return ToyRequest(shelf=place.partition(":")[2], **wanted.given("nodes"))


def preview(request, access, owner, *, is_elastic):
    return f"toy shelve --nodes {request.nodes}"


class Shelf:
    error = None
    is_alive = True

    def __init__(self, request):
        self.request, self.awaited = request, request.nodes
        self.title = f"toy shelf {request.shelf or 'new'}"
        self.source = Source(
            name=f"toy:{request.shelf or 'new'}",
            by_hand="toy exec {node}",
            ended="The toys were put away.",
            cure="Run the cell again.",
        )
        self.hosts = ()
        self.awaited_by = set()

    def fits(self, request):
        return request == self.request

    def check(self, asker):
        return self.is_alive

    def wait(self, asker, tell):
        tell("The toys are on their way.")
        self.hosts = tuple(
            Host(name=f"toy-{number}", allocation=self.source)
            for number in range(self.awaited)
        )
        return self.hosts

    def transport(self, host, access, asker):
        return LocalTransport()

    def advise(self, error):
        error.hint = f"Ask the toys.\n{error.hint}"

    def findings(self, asker):
        return ()

    def end(self):
        self.is_alive = False

    leave = end


class pool:  # noqa: N801
    def __init__(self, connect):
        self.made = []

    def get(self, request, access, asker, owner, *, is_elastic):
        self.made.append(Shelf(request))
        return self.made[-1]

    def listed(self, request, access, asker):
        return [
            ("shelf", "nodes"),
            *((one.title, str(one.awaited)) for one in self.made),
        ]

    def close(self):
        self.made = []

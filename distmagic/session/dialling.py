"""Each host dials each other one, at the addresses that torch would use; each listens for that moment alone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.requests import host_requests
from distmagic.diagnosis.finding import ANSWERS, ANY_PORT, Dial, Subject
from distmagic.errors import DistmagicError
from distmagic.remote.wire.protocol import HostDoor

TORCHS_PORT = 29500  # where runs by hand meet


class Dialling:
    """The hosts of `links`, by index, dial each other at a port that is free, and at `port`, or torch's own for 0.

    Each has a secret, and only who has that gets an answer. A host that is gone meanwhile has dialled nobody.
    """

    def __init__(
        self, subjects: Sequence[Subject], links: Mapping[int, Link], port: int
    ) -> None:
        self._subjects, self._links = subjects, links
        self._ports = (port or TORCHS_PORT, ANY_PORT)
        self._named_ports = (port,) if port else ()
        self._secrets = {index: secrets.token_hex(16) for index in links}
        self._opened: dict[int, tuple[int, ...]] = {}

    def result(self) -> list[Subject]:
        """Return all subjects, with what those found that could dial."""
        order = list(self._links)
        opened = in_parallel(self._listen, order)
        self._opened = dict(zip(order, opened, strict=True))
        dialled = in_parallel(self._dial, order)
        in_parallel(self._close, order)
        found = list(self._subjects)
        for index, dials in zip(order, dialled, strict=True):
            found[index] = replace(
                found[index], dials=dials, named_ports=self._named_ports
            )
        return found

    def _address(self, index: int) -> str:
        route = self._subjects[index].route
        assert route is not None
        return route.address

    def _listen(self, index: int) -> tuple[int, ...]:
        link, secret = self._links[index], self._secrets[index]
        try:
            return host_requests.open_doors(
                link, self._address(index), self._ports, secret
            )
        except DistmagicError:
            return ()

    def _close(self, index: int) -> None:
        try:
            host_requests.open_doors(self._links[index], "", (), "")
        except DistmagicError:
            self._links[index].close()  # and with it the doors

    def _dial(self, index: int) -> tuple[Dial, ...]:
        order = list(self._links)
        place = order.index(index)
        doors, asked = [], []
        # The next one first, so that no host is dialled by all at the same time.
        for other in (*order[place + 1 :], *order[:place]):
            # A port is 0 where something else has it.
            for kind, port in zip(self._ports, self._opened[other], strict=False):
                if port:
                    address, secret = self._address(other), self._secrets[other]
                    doors.append(HostDoor(address=address, port=port, secret=secret))
                    asked.append((self._subjects[other].name, kind))
        try:
            answers = host_requests.knock(self._links[index], tuple(doors))
        except DistmagicError:
            return ()
        dials = []
        for (name, kind), answer in zip(asked, answers, strict=False):
            known = answer if answer in ANSWERS else "another"
            dials.append(Dial(host=name, port=kind, answer=known))
        return tuple(dials)

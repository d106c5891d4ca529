"""What hosts keep loaded for this kernel: asked for with the first link of a run, ended when the kernel needs it no more."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace

from distmagic.connection.connections import Connections
from distmagic.connection.link import Link
from distmagic.connection.parallel import in_parallel
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError
from distmagic.planning import plan as planning
from distmagic.remote.wire.protocol import EndTemplates, Templates
from distmagic.request.access import Access
from distmagic.request.hosts import Host
from distmagic.request.spec import JobSpec
from distmagic.transports.asking import Asker

_SOON_S = 3.0  # to connect to a host that only has to be told to end something


class WarmHosts:
    """The hosts that were asked to keep something loaded, for this `kernel`, which is its name there."""

    def __init__(self, connections: Connections) -> None:
        self.kernel = secrets.token_hex(6)
        self._connections = connections
        self._asked: dict[Host, Access] = {}

    def first_link(
        self, host: Host, access: Access, asker: Asker, spec: JobSpec | None
    ) -> Link:
        """Return a link for a run that is to come, or for a request, which has no `spec`.

        The host begins to load what the run needs.
        """
        link = self._connections.take_idle(host, access, asker)
        link.warm = None
        if spec is not None:
            link.warm = planning.warming(spec, access, host, link.facts, self.kernel)
        if link.warm is not None:
            link.kept = link.warm
            self._asked[host] = access
            # No answer: where that can't be, the job starts without it.
            link.send(link.warm)
        return link

    def end(self, held: Collection[Host]) -> tuple[str, ...]:
        """End what hosts keep loaded; return the names of those that can't be reached.

        A node of a scheduler is asked only as long as it is among those `held`.
        """
        told = self._connections.end_templates()
        asked, self._asked = self._asked, {}  # a run may begin on another thread
        rest = []
        for host in asked:
            if host.name not in told and (not host.allocation or host in held):
                rest.append(host)

        with closing(NotebookAsker(can_ask=False)) as asker:

            def is_ended(host: Host) -> bool:
                access = replace(asked[host], connect_timeout_s=_SOON_S)
                try:
                    link = self._connections.link(host, access, asker)
                    link.query(EndTemplates(owner=self.kernel), Templates)
                    link.finish()
                except DistmagicError:
                    return False
                return True

            are_ended = in_parallel(is_ended, rest)
        names = []
        for host, has_ended in zip(rest, are_ended, strict=True):
            if not has_ended:
                names.append(host.name)
        return tuple(sorted(names))

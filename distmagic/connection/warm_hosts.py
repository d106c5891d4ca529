"""Warm processes on hosts for this kernel: requested with a run's first link, ended when no longer
needed.
"""

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

_SOON_S = 3.0  # time limit to connect to a host only to end something


class WarmHosts:
    """The hosts that were asked to keep a process warm for the kernel named `kernel`."""

    def __init__(self, connections: Connections) -> None:
        self.kernel = secrets.token_hex(6)
        self._connections = connections
        self._asked: dict[Host, Access] = {}

    def first_link(
        self, host: Host, access: Access, asker: Asker, spec: JobSpec | None
    ) -> Link:
        """Return a link for a coming run, or for a request, which has no `spec`.

        The host starts to load torch and the packages that the run needs.
        """
        link = self._connections.take_idle(host, access, asker)
        link.warm = None
        if spec is not None:
            link.warm = planning.warming(spec, access, host, link.facts, self.kernel)
        if link.warm is not None:
            link.kept = link.warm
            self._asked[host] = access
            # No answer is expected: if it fails, the job starts without it.
            link.send(link.warm)
        return link

    def end(self, held: Collection[Host]) -> tuple[str, ...]:
        """End the warm processes on hosts; return the names of the unreachable hosts.

        A scheduler's node is contacted only while it is in `held`.
        """
        told = self._connections.end_templates()
        asked, self._asked = self._asked, {}  # a run may start on another thread
        rest = [
            host
            for host in asked
            if host.name not in told and (not host.allocation or host in held)
        ]
        silent: list[str] = []
        with closing(NotebookAsker(can_ask=False)) as asker:

            def end(host: Host) -> None:
                access = replace(asked[host], connect_timeout_s=_SOON_S)
                try:
                    link = self._connections.link(host, access, asker)
                    link.query(EndTemplates(owner=self.kernel), Templates)
                    link.finish()
                except DistmagicError:
                    silent.append(host.name)

            in_parallel(end, rest)
        return tuple(sorted(silent))

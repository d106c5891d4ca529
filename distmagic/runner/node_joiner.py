"""Adds a host to a running elastic job: sends it the payload, registers it at the lead, and
prepares its start message.

    the lead's own start message, the host's facts  --start_messages.join_message-->  StartNode

The notebook that started the job has that message and the payload; any other notebook gets them
from the first host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from distmagic.connection.link import Link
from distmagic.connection.requests import blob_requests, host_requests, job_requests
from distmagic.errors import ProtocolError, UsageError
from distmagic.payload import blobs
from distmagic.payload.blobs import LocalBlob
from distmagic.planning import preflight, start_messages
from distmagic.planning.devices import missing_at_join
from distmagic.planning.plan import Reached
from distmagic.remote.contact import blob_receiver
from distmagic.remote.system import facts
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Blob, StartNode


class NodeJoiner:
    """Adds hosts to one job.

    `open_lead` opens a conversation with its first host, several at a time if needed. `begun` and
    `payload` are set in the notebook that started the job; any other one gets them from the first
    host. `is_text`: the job is known to contain no byte code, so any Python version will do.
    """

    def __init__(
        self,
        job: str,
        open_lead: Callable[[], Link],
        begun: StartNode | None = None,
        payload: Sequence[LocalBlob] = (),
        *,
        is_text: bool = False,
    ) -> None:
        self.job = job
        self._open_lead = open_lead
        self._begun = begun
        self._is_text = is_text
        self._payload = {local.blob.sha256: local for local in payload}

    def admit(self, link: Link, request_id: str) -> StartNode:
        """Send a host the payload, make the lead register it as a node, and return the message that
        starts that node.

        The lead sends an event with this `request_id` to all notebooks that follow the job. Raises
        `UsageError` if the job accepts no host, or not this one now, and `HostError` if the host
        doesn't fit.
        """
        if any(one.job == self.job for one in link.facts.running):
            raise UsageError(
                f"{link.host.name} can't join job {self.job}: it already runs a node of this job."
            )
        if not self._is_text:  # false for a job that another notebook has started
            preflight.check_python(
                link.host.name, link.python, sys.version_info[:3], link.facts.executable
            )
        preflight.check(link.host.name, link.facts, facts.torch_version())
        with closing(self._open_lead()) as lead:
            preflight.check_among(
                (lead.host.name, link.host.name), (lead.facts, link.facts)
            )
            self._begun = self._begun or job_requests.get_start(lead, self.job)
        blob_requests.deliver(link, self._lacking(link, self._begun))
        assert self._begun.membership is not None
        devices = self._begun.terms.devices
        if devices:
            others = host_requests.claim_devices(link, self.job, devices)
            if others:
                raise missing_at_join(link.host.name, others)
        route = host_requests.route_to(link, self._begun.membership.lead_address)
        with closing(self._open_lead()) as lead:
            hosts = job_requests.add_node(lead, self.job, link.host.name, request_id)
        job_requests.sweep(link, self.job)  # ends what a killed agent has left
        reached = Reached(host=link.host, facts=link.facts, route=route)
        return start_messages.join_message(
            self._begun, hosts, reached, local_cwd=str(Path.cwd())
        )

    def _lacking(self, link: Link, begun: StartNode) -> tuple[LocalBlob, ...]:
        """Return the part of the payload that a host lacks, as files on this machine."""
        assert begun.join_template is not None
        names = (begun.call, begun.code, *begun.side_files)
        sizes = begun.join_template.sizes
        payload = [
            Blob(sha256=name, size_bytes=size_bytes)
            for name, size_bytes in zip(names, sizes, strict=True)
        ]
        link.send(protocol.CheckBlobs(blobs=tuple(payload)))
        lacking = link.answer(protocol.MissingBlobs).sha256
        return tuple(self._here(blob) for blob in payload if blob.sha256 in lacking)

    def _here(self, blob: Blob) -> LocalBlob:
        """Return a blob on this machine; it is fetched from the lead's host if necessary."""
        known = self._payload.get(blob.sha256)
        if known is None:
            known = LocalBlob(blob=blob, path=blobs.folder() / blob.sha256)
            if not blob_receiver.is_whole(blob):
                with closing(self._open_lead()) as lead:
                    try:
                        fetch = partial(blob_requests.fetch_blob, lead, known.blob)
                        blobs.receive(known, fetch)
                    except OSError as error:
                        name = lead.host.name
                        raise ProtocolError(
                            f"{name}: the job's files could not be fetched from this host: {error}."
                        ) from None
            self._payload[blob.sha256] = known
        return known

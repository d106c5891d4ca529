"""Sends a payload to all hosts: small files directly to each, large files once and then from host
to host.

    what each host lacks  --routes-->  Routes: files sent directly, and chains of hosts    (pure)
    Routes                --Delivery-->  every host has all files

The first host of a chain has the blobs already, or receives them from this notebook over SSH. While
it receives them, it sends them to the second host, and so on. The hosts authenticate each other by
a one-time certificate, which they received over SSH. A host that can't get the blobs from its
predecessor requests them from the notebook; the hosts after it are not affected.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from distmagic.connection.certificate import one_time_secret
from distmagic.connection.link import Link
from distmagic.connection.parallel import begin_all, join_errors
from distmagic.connection.requests.blob_requests import deliver
from distmagic.errors import ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.frozen import frozen
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Blob

# Smaller payloads are sent directly: that takes no longer than setting up a chain.
SPREAD_BYTES = 8 << 20
# After a first failure, wait for other hosts that fail for the same reason.
_OTHERS_S = 1.0
_TELL_S = 0.1

T = TypeVar("T")
R = TypeVar("R")


@frozen
class Chain:
    """Blobs that are sent from host to host.

    `source` is the node that has them, None for the notebook.
    """

    blobs: tuple[Blob, ...]
    source: int | None
    takers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes that each receiving host gets."""
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Pairs (node, next node): each node sends the blobs to the next."""
        members = self.takers if self.source is None else (self.source, *self.takers)
        return tuple(pairwise(members))


@frozen
class Routes:
    """The blobs that the notebook sends directly, by node, and the chains, which run one after
    another.
    """

    straight: Mapping[int, tuple[Blob, ...]]
    chains: tuple[Chain, ...]


def routes(
    blobs: Sequence[Blob],
    lacking: Sequence[frozenset[str]],
    joins: Sequence[bool],
    spread_bytes: int,
) -> Routes:
    """Return how blobs get to nodes.

    `lacking` has SHA-256s by node; `joins` has for each node whether it may be in a chain. A chain
    is for blobs of at least `spread_bytes` together that the same nodes lack. It starts at a
    joining node that has the blobs, if there is one, and continues in the order of node ranks.
    """
    groups: dict[tuple[int | None, tuple[int, ...]], list[Blob]] = {}
    straight: defaultdict[int, list[Blob]] = defaultdict(list)
    for blob in blobs:
        takers = [node for node, names in enumerate(lacking) if blob.sha256 in names]
        joining = tuple(node for node in takers if joins[node])
        having = [node for node, may in enumerate(joins) if may and node not in takers]
        source = having[0] if having else None
        groups.setdefault((source, joining), []).append(blob)
        for node in takers:
            if not joins[node]:
                straight[node].append(blob)
    chains = []
    for (source, joining), found in groups.items():
        chain = Chain(blobs=tuple(found), source=source, takers=joining)
        if chain.links and chain.size_bytes >= spread_bytes:
            chains.append(chain)
        else:
            for node in joining:
                straight[node] += found
    by_node = {node: tuple(straight[node]) for node in sorted(straight)}
    return Routes(straight=by_node, chains=tuple(chains))


class Delivery:
    """The delivery of one payload.

    `run` blocks until every host has it; closing the links ends that. Threads call `tell(node,
    bytes, total_bytes)` with how many of a node's missing bytes have arrived: at the start, at the
    end, and 10 times a second. `note(node, text)` gets messages for the user.
    """

    def __init__(
        self, links: Sequence[Link], addresses: Sequence[str], files: Sequence[LocalBlob],
        tell: Callable[[int, int, int], object], note: Callable[[int, str], object],
    ) -> None:  # fmt: skip
        self._links = links
        self._addresses = addresses
        self._note = note
        self._files = {local.blob.sha256: local for local in files}
        self._meters = [_Meter(partial(tell, node)) for node in range(len(links))]

    def run(self) -> None:
        """Deliver to every host. Raises the error: a single one, or `HostErrors`."""
        # No server listens on the notebook machine.
        joins = [not link.host.is_local for link in self._links]
        nodes = range(len(self._links))
        blobs = tuple(local.blob for local in self._files.values())
        if sum(blob.size_bytes for blob in blobs) < SPREAD_BYTES or sum(joins) < 2:
            self._each(lambda node: self._straight(node, blobs), nodes)
            return
        lacking = self._each(lambda node: frozenset(self._lacking(node, blobs)), nodes)
        plan = routes(blobs, lacking, joins, SPREAD_BYTES)
        self._each(
            lambda node: self._straight(node, plan.straight[node]), tuple(plan.straight)
        )
        for chain in plan.chains:
            self._spread(chain)

    def _lacking(self, node: int, blobs: tuple[Blob, ...]) -> tuple[str, ...]:
        # This may be slow: the host reads all files.
        self._links[node].send(protocol.CheckBlobs(blobs=blobs))
        lacking = self._links[node].answer(protocol.MissingBlobs).sha256
        total_bytes = sum(blob.size_bytes for blob in blobs if blob.sha256 in lacking)
        self._meters[node].expect(total_bytes)
        return lacking

    def _straight(self, node: int, blobs: Sequence[Blob]) -> None:
        """Send a node directly the blobs that it lacks."""
        meter = self._meters[node]
        start = meter.size_bytes

        def tell(sent_bytes: int, total_bytes: int) -> None:
            if not meter.total_bytes:  # it was not asked before
                meter.expect(total_bytes)
            meter.reach(start + sent_bytes)

        files = tuple(self._files[blob.sha256] for blob in blobs)
        deliver(self._links[node], files, tell)
        # Another host may have put it into a shared home.
        meter.reach(start + sum(blob.size_bytes for blob in blobs))

    # ---- from host to host

    def _spread(self, chain: Chain) -> None:
        secret = one_time_secret()

        def serve(pair: tuple[int, int]) -> protocol.Serving:
            server, _ = pair
            request = protocol.ServeBlobs(
                blobs=chain.blobs,
                has_them=server == chain.source,
                address=self._addresses[server],
                secret=secret,
            )
            return self._links[server].query(request, protocol.Serving)

        served = self._each(serve, chain.links)
        # For each receiver, the host that sends to it, and its answer.
        before = {
            taker: (server, found)
            for (server, taker), found in zip(chain.links, served, strict=True)
        }

        def take(node: int) -> None:
            request = protocol.ReceiveBlobs(blobs=chain.blobs, secret=secret)
            name = ""
            if node in before:
                server, found = before[node]
                name = self._links[server].host.name
                address = self._addresses[server]
                request = replace(request, address=address, port=found.port)
                if not found.port:
                    text = f"its data came from the notebook and not from {name}, which can't serve: {found.why}"
                    self._note(node, text)
                    name = ""
            self._take(node, chain, name, request)

        self._each(take, chain.takers)

    def _take(
        self, node: int, chain: Chain, server: str, request: protocol.ReceiveBlobs
    ) -> None:
        """Make a node receive the blobs of a chain from the host `server`; send it directly what it
        requests.
        """
        link = self._links[node]
        meter = self._meters[node]
        start = end = meter.size_bytes
        at = {}  # for each blob, the node's byte count once it has all blobs before it
        for blob in chain.blobs:
            at[blob.sha256] = end
            end += blob.size_bytes
        link.send(request)
        while True:
            answer: object = link.answer(
                protocol.ReceivedBytes, protocol.NeedBlob, protocol.MissingBlobs
            )
            if isinstance(answer, protocol.MissingBlobs):
                meter.reach(start + chain.size_bytes)
                return
            if isinstance(answer, protocol.ReceivedBytes):
                meter.reach(start + min(answer.size_bytes, chain.size_bytes))
            if isinstance(answer, protocol.NeedBlob):
                if answer.sha256 not in at:
                    raise ProtocolError(
                        f"{link.host.name} requested a file that is not part of this run.",
                        "This is a bug, or a fault of the host. Run the cell again.",
                    )
                if server and answer.why:
                    self._note(
                        node,
                        f"its data came from the notebook and not from {server}: {answer.why}",
                    )
                    server = ""
                meter.reach(at[answer.sha256] + answer.offset)
                for size in link.pour(self._files[answer.sha256], answer.offset):
                    meter.reach(meter.size_bytes + size)

    def _each(self, act: Callable[[T], R], things: Sequence[T]) -> list[R]:
        """Call `act` on all things at the same time.

        Raises the first failures, without waiting for the other calls.
        """
        if not things:
            return []
        futures = begin_all("deliver", act, things)
        done, others = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            done |= wait(others, _OTHERS_S).done
            errors = [future.exception() for future in futures if future in done]
            raise join_errors([error for error in errors if error is not None])
        return [future.result() for future in futures]


@dataclass
class _Meter:
    """Counts how many of its missing bytes a node has received."""

    _tell: Callable[[int, int], object]
    _told_at: float = 0.0
    size_bytes: int = 0
    total_bytes: int = 0

    def expect(self, total_bytes: int) -> None:
        """Start: so many bytes are missing."""
        self.total_bytes = total_bytes
        self._say()

    def reach(self, size_bytes: int) -> None:
        """Set the count to so many bytes."""
        before = self.size_bytes
        self.size_bytes = min(max(before, size_bytes), self.total_bytes)
        is_last = before < self.size_bytes == self.total_bytes
        if is_last or time.monotonic() - self._told_at >= _TELL_S:
            self._say()

    def _say(self) -> None:
        self._told_at = time.monotonic()
        self._tell(self.size_bytes, self.total_bytes)

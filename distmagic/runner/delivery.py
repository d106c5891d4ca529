"""How a payload comes to all hosts: what is small from here to each, what is large once, and on from host to host.

    what each host lacks  --routes-->  Routes: what goes straight, and chains of hosts     (pure)
    Routes                --Delivery-->  every host has all

In a chain the first host has the blobs, or gets them from this notebook over SSH; it serves them, while they still
come, to the second one, and so on. The hosts know each other by a one-time certificate, which they were told over SSH.
A host that does not get the blobs from the one before it asks the notebook, and the hosts after it notice nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

from distmagic.connection.certificate import one_time_secret
from distmagic.connection.link import Link
from distmagic.connection.parallel import begin_all, join_errors
from distmagic.connection.requests.blob_requests import deliver
from distmagic.errors import ProtocolError
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import Blob

# Less than this goes straight: it takes no longer than to arrange a chain.
SPREAD_BYTES = 8 << 20
_OTHERS_S = 1.0  # after a first failure, for others that fail of the same cause
_TELL_S = 0.1

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Blobs that go from host to host. `source` is the node that has them, None for the notebook."""

    blobs: tuple[Blob, ...]
    source: int | None
    takers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What each taker gets."""
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Each node with the one that it serves, as (node, next node)."""
        members = self.takers if self.source is None else (self.source, *self.takers)
        return tuple(pairwise(members))


@dataclass(frozen=True, kw_only=True)
class Routes:
    """What goes straight from the notebook, by node, and the chains, one after the other."""

    straight: Mapping[int, tuple[Blob, ...]]
    chains: tuple[Chain, ...]


def routes(
    blobs: Sequence[Blob],
    lacking: Sequence[frozenset[str]],
    joins: Sequence[bool],
    spread_bytes: int,
) -> Routes:
    """Return how blobs get to nodes. `lacking` are SHA-256s by node; `joins` says of each node whether it may take part in chains.

    A chain is for blobs of `spread_bytes` or more together that the same nodes lack. It begins where the blobs are,
    if a node that joins has them, and goes on in the order of node ranks.
    """
    groups: dict[tuple[int | None, tuple[int, ...]], list[Blob]] = {}
    straight: defaultdict[int, list[Blob]] = defaultdict(list)
    for blob in blobs:
        takers = [node for node, names in enumerate(lacking) if blob.sha256 in names]
        joining = tuple(node for node in takers if joins[node])
        source = None
        for node, may_join in enumerate(joins):
            if may_join and node not in takers:
                source = node
                break
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
    """One payload on its way. `run` blocks until every host has it; closing the links ends that.

    `tell(node, bytes, total_bytes)` is called on threads with how much a node has of what it lacked: at first, in the end,
    and 10 times a second. `note(node, text)` is for what a user may want to know.
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
        """Bring it to every host. Raises what went wrong: one error, or `HostErrors`."""
        # Nothing listens on the notebook's own machine.
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
        # It may take its time: all files are read.
        self._links[node].send(protocol.CheckBlobs(blobs=blobs))
        lacking = self._links[node].answer(protocol.MissingBlobs).sha256
        total_bytes = sum(blob.size_bytes for blob in blobs if blob.sha256 in lacking)
        self._meters[node].expect(total_bytes)
        return lacking

    def _straight(self, node: int, blobs: Sequence[Blob]) -> None:
        """Send a node what it lacks of these."""
        meter = self._meters[node]
        start = meter.size_bytes

        def tell(sent_bytes: int, total_bytes: int) -> None:
            if not meter.total_bytes:  # it was not asked before
                meter.expect(total_bytes)
            meter.reach(start + sent_bytes)

        files = tuple(self._files[blob.sha256] for blob in blobs)
        deliver(self._links[node], files, tell)
        # It may have come into a home that is shared.
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

        before = {}  # by taker: the host that serves it, and where
        for (server, taker), found in zip(
            chain.links, self._each(serve, chain.links), strict=True
        ):
            before[taker] = (server, found)

        def take(node: int) -> None:
            server, found = before.get(node, (None, None))
            if server is None or found is None:
                self._take(
                    node,
                    chain,
                    "",
                    protocol.ReceiveBlobs(blobs=chain.blobs, secret=secret),
                )
                return
            address = self._addresses[server]
            name = self._links[server].host.name
            if not found.port:
                self._note(
                    node,
                    f"its data came from the notebook and not from {name}, which can't serve: {found.why}",
                )
            request = protocol.ReceiveBlobs(
                blobs=chain.blobs, address=address, port=found.port, secret=secret
            )
            self._take(node, chain, name if found.port else "", request)

        self._each(take, chain.takers)

    def _take(
        self, node: int, chain: Chain, server: str, request: protocol.ReceiveBlobs
    ) -> None:
        """Have a node take the blobs of a chain from the host `server`, and send it what it asks for itself."""
        link = self._links[node]
        meter = self._meters[node]
        start = end = meter.size_bytes
        at = {}  # how much the node has when it has all before this blob
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
                        f"{link.host.name} asked for bytes that nobody offered."
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
        """Act on all things at the same time; of failures the first ones are raised, without waiting for the others."""
        if not things:
            return []
        futures = begin_all("deliver", act, things)
        done, others = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            done |= wait(others, _OTHERS_S).done
            errors = [future.exception() for future in futures if future in done]
            raise join_errors([error for error in errors if error is not None])
        return [future.result() for future in futures]


class _Meter:
    """How much a node has of what it lacked."""

    def __init__(self, tell: Callable[[int, int], object]) -> None:
        self._tell = tell
        self._told_at = 0.0
        self.size_bytes = self.total_bytes = 0

    def expect(self, total_bytes: int) -> None:
        """Begin: so much is lacking."""
        self.total_bytes = total_bytes
        self._say()

    def reach(self, size_bytes: int) -> None:
        """Count up to so many bytes."""
        before = self.size_bytes
        self.size_bytes = min(max(before, size_bytes), self.total_bytes)
        is_last = before < self.size_bytes == self.total_bytes
        if is_last or time.monotonic() - self._told_at >= _TELL_S:
            self._say()

    def _say(self) -> None:
        self._told_at = time.monotonic()
        self._tell(self.size_bytes, self.total_bytes)

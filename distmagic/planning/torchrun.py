"""torchrun's flags, spelled in this one function for every transport and every exporter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How long a range of nodes waits for one more before it begins, when a node that is gone no longer counts, and how long
# the others wait for one that is lost in the middle of a meeting (torch's own values, 30 s, 15 s and 60 s, make every
# change of the world a pause of a minute).
_ELASTIC_CONF = (
    "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=15"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """One consistent set of rendezvous settings for all nodes. `address` and `port` are where node 0 listens."""

    backend: str
    address: str
    port: int
    rdzv_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int = 0


def flags(
    rdzv: Rendezvous, *, node_rank: int, nproc_per_node: int, local_addr: str
) -> tuple[str, ...]:
    """Return torchrun's flags for one node.

    `local_addr` is always given: without it a node announces whatever its own name resolves to. c10d is told who hosts
    the store (`is_host`), because it would find out by comparing names; it ignores `--node-rank`.
    """
    nnodes = str(rdzv.max_nodes)
    if rdzv.min_nodes != rdzv.max_nodes:
        nnodes = f"{rdzv.min_nodes}:{rdzv.max_nodes}"
    common = (
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc_per_node}",
        f"--max-restarts={rdzv.max_restarts}",
        f"--rdzv-backend={rdzv.backend}",
        f"--rdzv-id={rdzv.rdzv_id}",
        f"--local-addr={local_addr}",
    )
    if rdzv.backend == "static":
        return (
            *common,
            f"--node-rank={node_rank}",
            f"--master-addr={rdzv.address}",
            f"--master-port={rdzv.port}",
        )
    conf = f"is_host={1 if node_rank == 0 else 0}"
    if rdzv.min_nodes != rdzv.max_nodes:
        conf += f",{_ELASTIC_CONF}"
    address = f"[{rdzv.address}]" if ":" in rdzv.address else rdzv.address  # IPv6
    return (*common, f"--rdzv-endpoint={address}:{rdzv.port}", f"--rdzv-conf={conf}")


def joining(
    flags: Sequence[str], *, nproc_per_node: int, local_addr: str
) -> tuple[str, ...]:
    """Return the flags of a node that comes to an elastic job later; `flags` are its lead's."""
    joined = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name == "--nproc-per-node":
            value = str(nproc_per_node)
        elif name == "--local-addr":
            value = local_addr
        elif name == "--rdzv-conf":
            value = value.replace("is_host=1", "is_host=0")
        joined.append(name + equals + value)
    return tuple(joined)


def ranks_of_nodes(rdzv: Rendezvous, nproc: Sequence[int]) -> tuple[range, ...]:
    """Return the ranks that each node runs, `nproc` being how many; () where the nodes decide that among themselves.

    With the static backend torchrun numbers ranks in the order of node ranks (`_assign_worker_ranks` of torch's
    elastic/agent/server/api.py); c10d orders nodes by how they arrive.
    """
    if rdzv.backend != "static":
        return ()
    ranks = []
    first = 0
    for count in nproc:
        ranks.append(range(first, first + count))
        first += count
    return tuple(ranks)


def world_size(rdzv: Rendezvous, nproc: Sequence[int]) -> int:
    """Return how many ranks the nodes have together, `nproc` being how many each has; 0 where nodes may come and go."""
    return sum(nproc) if rdzv.min_nodes == rdzv.max_nodes else 0

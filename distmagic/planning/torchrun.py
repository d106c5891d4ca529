"""The flags of torchrun, spelled in one function for every transport and every exporter. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distmagic.remote.frozen import frozen

# How long a range of nodes waits for one more node before it starts, after which time a lost node
# no longer counts, and how long the others wait for one that is lost during a rendezvous. torch's
# defaults (30 s, 15 s and 60 s) make every change of the number of nodes a pause of a minute.
_ELASTIC_CONF = (
    "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=15"
)


@frozen
class Rendezvous:
    """Rendezvous settings, the same for all nodes. Node 0 listens at `address` and `port`."""

    backend: str
    address: str
    port: int
    rdzv_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int = 0


@frozen
class NodeWords:
    """The values of one node's flags as texts: an exported job has shell variables instead of some
    numbers.

    The nodes meet at `address` and `port`. An empty `local_addr` or `conf` is left out.
    """

    backend: str
    nnodes: str
    nproc_per_node: str
    node_rank: str
    rdzv_id: str
    address: str
    port: str
    max_restarts: int = 0
    local_addr: str = ""
    conf: str = ""


def spelled(words: NodeWords) -> tuple[str, ...]:
    """Return torchrun's flags for one node. c10d ignores `--node-rank`, so it is not given."""
    flags = [
        f"--nnodes={words.nnodes}",
        f"--nproc-per-node={words.nproc_per_node}",
        f"--max-restarts={words.max_restarts}",
        f"--rdzv-backend={words.backend}",
        f"--rdzv-id={words.rdzv_id}",
    ]
    if words.local_addr:
        flags.append(f"--local-addr={words.local_addr}")
    if words.backend == "static":
        flags.append(f"--node-rank={words.node_rank}")
        flags.append(f"--master-addr={words.address}")
        flags.append(f"--master-port={words.port}")
        return tuple(flags)
    address = f"[{words.address}]" if ":" in words.address else words.address  # IPv6
    flags.append(f"--rdzv-endpoint={address}:{words.port}")
    if words.conf:
        flags.append(f"--rdzv-conf={words.conf}")
    return tuple(flags)


def flags(
    rdzv: Rendezvous, *, node_rank: int, nproc_per_node: int, local_addr: str
) -> tuple[str, ...]:
    """Return torchrun's flags for one node of a run.

    `local_addr` is always given: without it a node announces the address to which its own hostname
    resolves. c10d gets `is_host`, because otherwise it compares host names to find out which node
    hosts the store.
    """
    nnodes = str(rdzv.max_nodes)
    conf = f"is_host={1 if node_rank == 0 else 0}"
    if rdzv.min_nodes != rdzv.max_nodes:
        nnodes = f"{rdzv.min_nodes}:{rdzv.max_nodes}"
        conf += f",{_ELASTIC_CONF}"
    return spelled(
        NodeWords(
            backend=rdzv.backend,
            nnodes=nnodes,
            nproc_per_node=str(nproc_per_node),
            node_rank=str(node_rank),
            rdzv_id=rdzv.rdzv_id,
            address=rdzv.address,
            port=str(rdzv.port),
            max_restarts=rdzv.max_restarts,
            local_addr=local_addr,
            conf=conf,
        )
    )


def joining(
    flags: Sequence[str], *, nproc_per_node: int, local_addr: str
) -> tuple[str, ...]:
    """Return the flags of a node that joins an elastic job later; `flags` are its lead's."""
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


def world_size(rdzv: Rendezvous, nproc: Sequence[int]) -> int:
    """Return the number of ranks of all nodes (`nproc` for each node); 0 if nodes may come
    and go.
    """
    return sum(nproc) if rdzv.min_nodes == rdzv.max_nodes else 0

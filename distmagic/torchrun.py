"""torchrun's flags, spelled in this one function for every transport and every exporter. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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


def flags(rdzv: Rendezvous, *, node_rank: int, nproc_per_node: int, local_addr: str) -> tuple[str, ...]:
    """Return torchrun's flags for one node.

    `local_addr` is always given: without it a node announces whatever its own name resolves to. c10d is told who hosts
    the store (`is_host`), because it would find out by comparing names; it ignores `--node-rank`.
    """
    nnodes = str(rdzv.max_nodes) if rdzv.min_nodes == rdzv.max_nodes else f"{rdzv.min_nodes}:{rdzv.max_nodes}"
    common = (
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc_per_node}",
        f"--max-restarts={rdzv.max_restarts}",
        f"--rdzv-backend={rdzv.backend}",
        f"--rdzv-id={rdzv.rdzv_id}",
        f"--local-addr={local_addr}",
    )
    if rdzv.backend == "static":
        return (*common, f"--node-rank={node_rank}", f"--master-addr={rdzv.address}", f"--master-port={rdzv.port}")
    is_host = 1 if node_rank == 0 else 0
    return (*common, f"--rdzv-endpoint={_join(rdzv.address, rdzv.port)}", f"--rdzv-conf=is_host={is_host}")


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

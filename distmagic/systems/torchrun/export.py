"""torchrun by hand: one command a host (static), or one for all of them (c10d). Pure."""

from __future__ import annotations

from distmagic.errors import UsageError
from distmagic.exports import parts
from distmagic.exports.job import ExportedJob, File, text_file
from distmagic.planning.torchrun import NodeWords
from distmagic.request.spec import split_endpoint

_PORT = 29500


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return a script for each host, and one for all.

    Raises `UsageError` without a rendezvous address.
    """
    scripts = []
    for rank in range(job.nodes):
        host = f", {job.hosts[rank][0]}" if rank < len(job.hosts) else ""
        lines = [f"# The command of node {rank} of {job.nodes}{host}."]
        scripts.append(text_file(f"node-{rank}.sh", _script(job, lines, rank)))
    lines = ["# The same command on every node: they number themselves as they come."]
    any_node = _script(job, lines, None)
    return (*scripts, text_file("any-node.sh", any_node), *parts.environment(job))


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    first = "`bash node-0.sh` on the first host"
    others = (
        f", up to `bash node-{job.nodes - 1}.sh` on the last" if job.nodes > 1 else ""
    )
    address, port = _meeting(job)
    return (
        f"Copy this folder to each host, then run on it: {first}{others}.",
        "Or run `bash any-node.sh` on all of them (c10d): the nodes number themselves, and ranks may be restarted.",
        f"The nodes meet at {address}, port {port}: every host must be able to dial it.",
    )


def _meeting(job: ExportedJob) -> tuple[str, int]:
    """Return the address and the port of the rendezvous."""
    port = job.spec.master_port or _PORT
    if job.spec.rdzv_endpoint:
        address, named = split_endpoint(job.spec.rdzv_endpoint)
        return address, named or port
    if job.nodes == 1:
        return "127.0.0.1", port
    if not job.hosts:
        raise UsageError(
            f"--export torchrun: {job.nodes} nodes need a place to meet.",
            "Name the hosts with --hosts gpu-a,gpu-b, or the first one with --rdzv-endpoint HOST:29500.",
        )
    return job.hosts[0][0], port


def _script(job: ExportedJob, lines: list[str], rank: int | None) -> str:
    """Return the script of one node; `rank` is None for the common script."""
    if job.request.setup:
        lines.append(job.request.setup)
    lines += parts.read_environment(job)
    lines += parts.enter(job)
    # The ranks of a node; None if the node must count its GPUs.
    nproc = None
    slots = [number for _, number in job.hosts]
    if rank is not None and rank < len(slots):
        nproc = slots[rank]
    elif len(set(slots)) == 1:
        nproc = slots[0]
    counting, ranks = parts.counted_ranks(job, nproc or job.nproc_per_node)
    lines += counting
    address, port = _meeting(job)
    words = NodeWords(
        backend="c10d" if rank is None else "static",
        nnodes=str(job.nodes),
        nproc_per_node=ranks,
        node_rank=str(rank or 0),
        rdzv_id=job.title,
        address=address,
        port=str(port),
    )
    lines += parts.torchrun_lines(job, words)
    return parts.script(['cd "$(dirname "$0")" || exit', *lines])

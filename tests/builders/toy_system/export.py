"""A script that starts torchrun on every toy."""

from distmagic.exports import parts
from distmagic.exports.job import text_file
from distmagic.planning.torchrun import NodeWords


def files(job):
    words = NodeWords(
        backend=job.backend, nnodes=str(job.nodes), nproc_per_node="1", node_rank="0", rdzv_id=job.title,
        address="toy-0", port="29500", max_restarts=job.spec.max_restarts,
    )  # fmt: skip
    return (text_file("toy.sh", parts.script(parts.torchrun_lines(job, words))),)


def readme(job):
    return (f"`toy shelve --nodes {job.nodes} toy.sh` starts it.",)

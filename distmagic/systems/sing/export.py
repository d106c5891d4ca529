"""SING Cloud: an image whose entry point starts on every node.

It reads the platform's variables. Pure.

    SING_RANK                            the number of a node, 0 being the first
    SING_WORLD_SIZE                      the number of nodes
    SING_MASTER_ADDR                     the first node's name; by default made from the next two:
    SING_JOB_NAME, SING_HOSTNAME_SUFFIX  node i is ${SING_JOB_NAME}-i.${SING_HOSTNAME_SUFFIX}
    SING_HOST_ADDR                       a node's own name or address

Secrets of `--env` are not in the image: they must be set as variables of the job; `secrets.env`
lists them.
"""

from __future__ import annotations

from distmagic.errors import UsageError
from distmagic.exports import parts, quoting
from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.exports.quoting import variable
from distmagic.payload.sizes import plural
from distmagic.planning.torchrun import NodeWords

_AT = "/job"
_PORT = 29500
_ENTRY = '''"""The entry point of every node, as the platform starts it by itself: becomes node.sh."""

import os

os.chdir(os.path.dirname(os.path.abspath(__file__)))
os.execvp("bash", ["bash", "node.sh"])
'''


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return SING Cloud's own files for a job."""
    if job.python.startswith("~"):
        raise UsageError(
            f"--python {job.python}: in an image no shell expands ~.",
            "Give the path that the interpreter has in the image, or leave it out.",
        )
    lines = [
        "# One image for all nodes. It has what the setup and the files of program/ have; secrets of --env are not in it.",
        f"FROM {job.request.image}",
        f"WORKDIR {_AT}",
    ]
    if job.request.setup:
        lines.append(f"RUN {quoting.dockerfile(('bash', '-c', job.request.setup))}")
    lines += [
        f"COPY dist.py node.sh {_AT}/",
        f"COPY {PROGRAM}/ {_AT}/{PROGRAM}/",
        f"ENTRYPOINT {quoting.dockerfile((job.python or 'python', 'dist.py'))}",
    ]
    return (
        text_file("Dockerfile", parts.script(lines, head="")),
        text_file("dist.py", _ENTRY, is_for_all=True),
        text_file("node.sh", _node(job), is_for_all=True),
        *_secrets(job),
    )


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    where = ", and give it the variables of `secrets.env`" if job.secrets else ""
    count = plural(job.nodes, "node")
    return (
        f"Build and push the image: `docker build -t REGISTRY/{job.title} . && docker push REGISTRY/{job.title}`.",
        f"Start it as a job on {count}{where}. Its entry point is `python dist.py` on every node; any number of nodes will do.",
        (
            "SING_RANK is this node's number, SING_WORLD_SIZE how many there are, SING_HOST_ADDR this node's address; the first "
            "one is SING_MASTER_ADDR, or `${SING_JOB_NAME}-0.${SING_HOSTNAME_SUFFIX}`."
        ),
    )


def _node(job: ExportedJob) -> str:
    needed = ["SING_RANK", "SING_WORLD_SIZE"]
    if job.backend == "c10d":
        needed.append("SING_HOST_ADDR")
    lines = [
        "# What each node runs: torchrun, which starts its ranks.",
        parts.require(needed, "SING Cloud"),
        *parts.numbers("SING_RANK", "SING_WORLD_SIZE"),
        parts.below("SING_RANK", "$SING_WORLD_SIZE"),
        "MASTER_ADDR=${SING_MASTER_ADDR:-127.0.0.1}",
        (
            '[ "$SING_WORLD_SIZE" -eq 1 ] || [ -n "$SING_MASTER_ADDR" ] || MASTER_ADDR='
            '"${SING_JOB_NAME:?is not set, nor SING_MASTER_ADDR}-0.${SING_HOSTNAME_SUFFIX:?is not set, nor SING_MASTER_ADDR}"'
        ),
        *parts.exports(job.variables),
        *parts.wait_for_master(),
    ]
    counting, ranks = parts.counted_ranks(job, job.nproc_per_node)
    words = NodeWords(
        backend=job.backend,
        nnodes=variable("SING_WORLD_SIZE"),
        nproc_per_node=ranks,
        node_rank=variable("SING_RANK"),
        rdzv_id=job.title,
        address=variable("MASTER_ADDR"),
        port=str(job.spec.master_port or _PORT),
    )
    command = parts.torchrun_lines(job, words, '"$SING_HOST_ADDR"')
    return parts.script([*lines, *counting, *parts.enter(job), *command])


def _secrets(job: ExportedJob) -> tuple[File, ...]:
    """Return the file with a line for each secret, in the format of docker's `--env-file`.

    Raises `UsageError`.
    """
    lines = []
    for name, value in job.secrets:
        if "\n" in value or "\r" in value:
            raise UsageError(
                f"--env {name}: it is a secret with a line break, and a file of variables has one line for each.",
                "Give it another form, such as base64.",
            )
        lines.append(f"{name}={value}")
    text = parts.script(lines, head="")
    return (text_file("secrets.env", text, is_private=True),) if lines else ()

"""SkyPilot: a task with the static rendezvous, and one with c10d. Pure.

The task reads the number of nodes and GPUs from SkyPilot's variables, so `sky launch --num-nodes 4
--gpus L4:4` needs no edit. Variables and secrets are the task's `envs` and `secrets`, which
SkyPilot sets on every node.
"""

from __future__ import annotations

from collections.abc import Sequence

from distmagic.errors import UsageError
from distmagic.exports import parts, quoting
from distmagic.exports.job import ExportedJob, File, text_file
from distmagic.exports.quoting import variable
from distmagic.planning.torchrun import NodeWords

_PORT = 8008  # of SkyPilot's own examples
_VARIABLES = (
    "SKYPILOT_NODE_IPS",
    "SKYPILOT_NUM_NODES",
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_TASK_ID",
)
_COUNT_ADDRESSES = (
    'COUNT=$(echo "$SKYPILOT_NODE_IPS" | grep -c .); [ "$COUNT" -eq "$SKYPILOT_NUM_NODES" ] || '
    '{ echo "SKYPILOT_NUM_NODES is $SKYPILOT_NUM_NODES, and the number of addresses in SKYPILOT_NODE_IPS is $COUNT" >&2; exit 1; }'
)


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return both tasks. The files are private if they contain secrets."""
    is_private = bool(job.secrets)
    return (
        text_file("task.yaml", _task(job, "static"), is_private=is_private),
        text_file("task-c10d.yaml", _task(job, "c10d"), is_private=is_private),
    )


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    return (
        f"Launch it in this folder: `sky launch -c {job.title} task.yaml`; see it with `sky logs {job.title}`, end it with `sky down {job.title}`.",
        "`task.yaml` has the static rendezvous, `task-c10d.yaml` c10d, with which ranks may be restarted on several nodes.",
        "Set its size on the command line; no line changes: `sky launch --num-nodes 4 --gpus L4:4 task.yaml`.",
    )


def _task(job: ExportedJob, backend: str) -> str:
    setup = job.request.setup or _install(job)
    return (
        f"# Torchrun on every node, {backend} rendezvous. Launch it in its own folder.\n"
        f"name: {quoting.yaml(job.title)}\n"
        "workdir: .\n"
        f"num_nodes: {job.nodes}\n"
        f"{_resources(job)}"
        f"{_mapping('envs', job.variables)}"
        f"{_mapping('secrets', job.secrets)}"
        f"setup:{quoting.yaml_block(setup)}"
        f"run:{quoting.yaml_block(_run(job, backend))}"
    )


def _install(job: ExportedJob) -> str:
    """Return the command that installs torch on a machine without it."""
    python = quoting.bash(parts.python_of(job))
    return f"{python} -c 'import torch' 2>/dev/null || {python} -m pip install torch"


def _resources(job: ExportedJob) -> str:
    request, gpus = job.request, job.request.gpus
    lines = []
    if gpus is not None and gpus.count:
        if not gpus.kind:
            raise UsageError(
                f"--gpus-per-node {gpus.count}: SkyPilot needs their type.",
                f"Write --gpus-per-node L4:{gpus.count}; sky gpus list shows all kinds.",
            )
        kind = f"{gpus.kind}:{gpus.count}"
        lines.append(f"  accelerators: {quoting.yaml(kind)}\n")
    if request.cpus:
        lines.append(f'  cpus: "{request.cpus}+"\n')
    if request.memory_gib:
        lines.append(f'  memory: "{request.memory_gib}+"\n')
    return "resources:\n" + "".join(lines) if lines else ""


def _mapping(key: str, pairs: Sequence[tuple[str, str]]) -> str:
    lines = [
        f"  {quoting.yaml(name)}: {quoting.yaml(value)}\n" for name, value in pairs
    ]
    return f"{key}:\n" + "".join(lines) if lines else ""


def _run(job: ExportedJob, backend: str) -> str:
    lines = [
        parts.require(_VARIABLES, "SkyPilot"),
        *parts.numbers("SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"),
        parts.below("SKYPILOT_NODE_RANK", "$SKYPILOT_NUM_NODES"),
        _COUNT_ADDRESSES,
        "# SkyPilot names the nodes by their addresses, a line each, the head first.",
        'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
    ]
    ranks = str(job.spec.nproc_per_node or "")
    if not ranks:
        lines.append(
            "RANKS=$((SKYPILOT_NUM_GPUS_PER_NODE > 0 ? SKYPILOT_NUM_GPUS_PER_NODE : 1))"
        )
        ranks = variable("RANKS")
    words = NodeWords(
        backend=backend,
        nnodes=variable("SKYPILOT_NUM_NODES"),
        nproc_per_node=ranks,
        node_rank=variable("SKYPILOT_NODE_RANK"),
        rdzv_id=variable("SKYPILOT_TASK_ID"),
        address=variable("MASTER_ADDR"),
        port=str(job.spec.master_port or _PORT),
    )
    own = '$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")'
    lines += [*parts.enter(job), *parts.torchrun_lines(job, words, own)]
    return "\n".join(lines)

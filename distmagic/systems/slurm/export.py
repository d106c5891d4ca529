"""Writes two sbatch files for a job. Pure.

In `job.sbatch` Slurm starts one task for each node, and torchrun starts the ranks in it. In
`ranks.sbatch` Slurm starts one task for each rank, without torchrun.

The scripts read the number of nodes and tasks from Slurm's variables, so `sbatch --nodes 4
job.sbatch` needs no other edit. The batch script runs on the first node, which has the first tasks:
its hostname is the rendezvous address.
"""

from __future__ import annotations

from distmagic.exports import parts, quoting
from distmagic.exports.job import ExportedJob, File, text_file
from distmagic.exports.quoting import variable
from distmagic.payload.sizes import plural
from distmagic.planning.torchrun import NodeWords

_NODE, _RANK = "node.sh", "rank.sh"
_OF_A_TASK = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
)


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return Slurm's own files for a job."""
    ranks = parts.ranks_of_node(job)
    return (
        text_file("job.sbatch", _sbatch(job, ranks, tasks=1, starts=_NODE)),
        text_file(_NODE, _node(job, ranks)),
        text_file("ranks.sbatch", _sbatch(job, ranks, tasks=ranks, starts=_RANK)),
        text_file(_RANK, _rank(job)),
        *parts.environment(job),
    )


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    return (
        f"Submit it in this folder, which all nodes must see: `sbatch job.sbatch`; it prints to `{job.title}-JOB.out`.",
        "`job.sbatch` starts `node.sh` on each node, where torchrun starts the ranks; `ranks.sbatch` starts `rank.sh` for each rank.",
        "Options on the command line win over those in the files: `sbatch --nodes 4 --time 1:00:00 job.sbatch`.",
    )


def _sbatch(job: ExportedJob, ranks: int, *, tasks: int, starts: str) -> str:
    own = [
        ("job-name", job.title),
        ("output", "%x-%j.out"),
        ("nodes", str(job.nodes)),
        ("ntasks-per-node", str(tasks)),
    ]
    step = ["srun", "--kill-on-bad-exit=1"]
    for name, value in job.request.options:
        if name != "cpus-per-task":
            own.append((name, value))
    if job.request.cpus:  # for the node, whose tasks share them
        cpus = str(max(1, job.request.cpus // tasks))
        own.append(("cpus-per-task", cpus))
        # Since 22.05 srun does not inherit it from sbatch.
        step.append(f"--cpus-per-task={cpus}")
    what = (
        "rank"
        if starts == _RANK
        else f"node, in which torchrun starts {plural(ranks, 'rank')}"
    )
    lines = [
        f"# One task a {what}. Submit it in its own folder.",
        *(quoting.directive(name, value) for name, value in own),
        "",
        f'[ -f {starts} ] || {{ echo "{starts} is missing: run sbatch in the folder of this file" >&2; exit 2; }}',
        "export MASTER_ADDR=$(hostname)  # this script runs on the first node",
        f"export MASTER_PORT={job.spec.master_port or '$((20000 + SLURM_JOB_ID % 10000))'}",
        *parts.read_environment(job),
    ]
    if job.request.setup:
        lines.append(job.request.setup)
    return parts.script([*lines, quoting.bash_line((*step, "bash", starts))])


def _node(job: ExportedJob, ranks: int) -> str:
    words = NodeWords(
        backend=job.backend,
        nnodes=variable("SLURM_NNODES"),
        nproc_per_node=str(ranks),
        node_rank=variable("SLURM_NODEID"),
        rdzv_id=variable("SLURM_JOB_ID"),
        address=variable("MASTER_ADDR"),
        port=variable("MASTER_PORT"),
    )
    lines = [
        "# What each node runs: torchrun, which starts its ranks.",
        parts.require(("MASTER_ADDR", "MASTER_PORT"), "job.sbatch"),
        parts.require(("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID"), "Slurm"),
        parts.below("SLURM_NODEID", "$SLURM_NNODES"),
        *parts.enter(job),
    ]
    return parts.script([*lines, *parts.torchrun_lines(job, words, "$(hostname)")])


def _rank(job: ExportedJob) -> str:
    command = (parts.python_of(job), "-u", *job.program.words)
    return parts.script(
        [
            "# What each task runs, where a task is a rank: the variables that torchrun would set, from Slurm's.",
            parts.require(("MASTER_ADDR", "MASTER_PORT"), "ranks.sbatch"),
            parts.require(_OF_A_TASK, "Slurm"),
            parts.below("SLURM_PROCID", "$SLURM_NTASKS", "tasks"),
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID",
            "export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE",
            "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
            *parts.enter(job),
            f"exec {quoting.bash_line(command)}",
        ]
    )

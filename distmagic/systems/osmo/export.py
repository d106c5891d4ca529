"""NVIDIA OSMO: a workflow whose tasks start torchrun, and one whose tasks start numbered ranks.

Pure.

One group has a master, which leads it, and workers. OSMO processes a workflow as a Jinja template
before it parses the YAML. So all content of the user is in base64, and the only braces in the
workflow are OSMO's own, `{{host:master}}` and `{{output}}`. OSMO sets no variables inside a task,
so the workflow sets those that the scripts need.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.exports import parts, quoting
from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.exports.quoting import variable
from distmagic.planning.torchrun import NodeWords
from distmagic.systems.osmo import start_ranks

AT = "/tmp/distmagic"  # noqa: S108 - where the files of a task lie, in a container of its own
_TEMPLATE = re.compile(r"\{[{%#]")  # OSMO processes the workflow with Jinja
_NODE, _RANKS, _START = "node.sh", "ranks.sh", "start_ranks.py"
_PORT = 29500
_LARGEST = 1 << 20  # a task's file is a Kubernetes secret, which has this limit
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "OUTPUT_DIR")


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return both workflows, and their scripts as separate files."""
    node = text_file(_NODE, _node(job))
    lines = _begin(job, "--size ranks from --offset, in a world of --world_size")
    begin = quoting.bash_line((parts.python_of(job), f"{AT}/{_START}"))
    ranks = text_file(
        _RANKS,
        parts.script(
            [*lines, f'exec {begin} "$@" -- {quoting.bash_line(job.program.words)}']
        ),
    )
    start = File(path=_START, data=Path(start_ranks.__file__).read_bytes())
    count = parts.ranks_of_node(job)
    numbered = []
    for place in range(job.nodes):
        sizes = (
            f"--size={count}",
            f"--offset={place * count}",
            f"--world_size={job.nodes * count}",
        )
        numbered.append(("bash", f"{AT}/{_RANKS}", *sizes))
    secrets = [
        File(path=f"secrets/{name}", data=value.encode(), is_private=True)
        for name, value in job.secrets
    ]
    # Both workflows carry the program: they are as private as its files.
    is_private = any(
        file.is_private or not file.mode & 0o004 for file in job.program.files
    )
    by_ranks = _workflow(job, [ranks, start], numbered)
    return (
        text_file("workflow.yaml", workflow(job), is_private=is_private),
        text_file("workflow-ranks.yaml", by_ranks, is_private=is_private),
        node,
        ranks,
        start,
        *secrets,
    )


def workflow(job: ExportedJob) -> str:
    """Return the workflow whose tasks start torchrun, or the program's own launcher."""
    for file in job.program.files:
        if len(file.data) > _LARGEST:
            raise UsageError(
                f"{file.path} has {len(file.data):,} bytes, and a workflow of OSMO carries files of {_LARGEST:,} at most.",
                "Put it into the image (--image), or load it inside the function.",
            )
    node = text_file(_NODE, _node(job))
    return _workflow(job, [node], [("bash", f"{AT}/{_NODE}")] * job.nodes)


def names(nodes: int) -> tuple[str, ...]:
    """Return the names of the tasks for this number of nodes."""
    return ("master", *(f"worker-{place}" for place in range(1, nodes)))


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    first = ""
    if job.secrets:
        given = " ".join(f"{name}=secrets/{name}" for name, _ in job.secrets)
        first = f"Once: `osmo credential set {_credential(job)} --type GENERIC --payload-file {given}`. Then s"
    return (
        f"{first or 'S'}ubmit it: `osmo workflow submit workflow.yaml`; see it with `osmo workflow query ID` and `osmo workflow logs ID`.",
        "`workflow.yaml` has torchrun in each task; `workflow-ranks.yaml` starts --size ranks a task, from --offset, in a world of --world_size.",
        "Both carry `program/` and the scripts next to them as base64: change the cell and export again. Ranks start in the task's output folder.",
    )


def _credential(job: ExportedJob) -> str:
    return f"{job.title}-secrets"


def _workflow(
    job: ExportedJob, scripts: Sequence[File], commands: Sequence[Sequence[str]]
) -> str:
    text = (
        "# Submit it with: osmo workflow submit FILE\n"
        "version: 2\n"
        "workflow:\n"
        f"  name: {quoting.yaml(job.title)}\n"
        f"{_resources(job)}"
        "  groups:\n"
        "  - name: ranks\n"
        "    ignoreNonleadStatus: false  # any rank that fails ends all\n"
        "    tasks:\n"
    )
    for place, command in enumerate(commands):
        text += _task(job, place, command)
        text += (
            "      files: &files\n" + _inline(job, scripts)
            if place == 0
            else "      files: *files\n"
        )
    return text


def _resources(job: ExportedJob) -> str:
    request = job.request
    lines = []
    if request.gpus is not None:
        lines.append(f"      gpu: {request.gpus.count}\n")
        if request.gpus.kind:
            lines.append(f"      platform: {quoting.yaml(request.gpus.kind)}\n")
    if request.cpus:
        lines.append(f"      cpu: {request.cpus}\n")
    if request.memory_gib:
        lines.append(f"      memory: {request.memory_gib}Gi\n")
    return "  resources:\n    default:\n" + "".join(lines) if lines else ""


def _task(job: ExportedJob, place: int, command: Sequence[str]) -> str:
    program, *args = command
    shown = ", ".join(quoting.yaml(arg) for arg in args)
    lines = [
        f"    - name: {names(job.nodes)[place]}",
        *(["      lead: true"] if place == 0 else []),
        f"      image: {quoting.yaml(job.request.image)}",
        f"      command: [{quoting.yaml(program)}]",
        f"      args: [{shown}]",
        "      environment:",
        '        MASTER_ADDR: "{{host:master}}"',
        f'        MASTER_PORT: "{job.spec.master_port or _PORT}"',
        f'        NODE_RANK: "{place}"',
        '        OUTPUT_DIR: "{{output}}"',
        # For a script or notebook of distmagic that runs inside the tasks: systems/osmo/inside.py.
        '        DISTMAGIC_WORKFLOW: "{{workflow_id}}"',
        '        DISTMAGIC_MASTER_ADDR: "{{host:master}}"',
        f'        DISTMAGIC_NNODES: "{job.nodes}"',
        f'        DISTMAGIC_NODE_RANK: "{place}"',
    ]
    if job.secrets:
        lines += ["      credentials:", f"        {quoting.yaml(_credential(job))}:"]
        for secret, _ in job.secrets:
            lines.append(f"          {quoting.yaml(secret)}: {quoting.yaml(secret)}")
    results = job.request.results
    if results and place == 0:
        is_url = "://" in results
        kind = "url: " if is_url else "dataset:\n          name: "
        lines += ["      outputs:", f"      - {kind}{quoting.yaml(results)}"]
    return "".join(f"{line}\n" for line in lines)


def _inline(job: ExportedJob, scripts: Sequence[File]) -> str:
    program = [(f"{PROGRAM}/{file.path}", file.data) for file in job.program.files]
    own = [(file.path, file.data) for file in scripts]
    text = ""
    for path, data in [*own, *program]:
        if _TEMPLATE.search(path):
            raise UsageError(
                f"{path}: OSMO would read its name as a template.",
                "Rename the file, or leave it out by .distmagicignore.",
            )
        text += (
            f"      - path: {quoting.yaml(f'{AT}/{path}')}\n"
            "        base64: true\n"
            f"        contents: {quoting.yaml(base64.b64encode(data).decode())}\n"
        )
    return text


def _begin(job: ExportedJob, what: str) -> list[str]:
    """Return the first lines of a task's script: variables, the master's name, and the start folder
    of ranks.
    """
    lines = [
        f"# What each task runs: {what}.",
        parts.require(_VARIABLES, "the workflow"),
        parts.below("NODE_RANK", str(job.nodes)),
        *parts.exports(job.variables),
    ]
    if job.request.setup:
        lines.append(job.request.setup)
    lines += ["", *parts.wait_for_master()]
    if job.program.words:
        lines += [
            "",
            "# What ranks write is kept: they begin in a copy of the program where the task's output is.",
            f'cp -R {AT}/{PROGRAM} "$OUTPUT_DIR" && cd "$OUTPUT_DIR" || exit',
            *parts.enter(job),
        ]
    return lines


def _node(job: ExportedJob) -> str:
    lines = _begin(job, "torchrun, which starts its ranks")
    words = NodeWords(
        backend=job.backend,
        nnodes=str(job.nodes),
        nproc_per_node=str(parts.ranks_of_node(job)),
        node_rank=variable("NODE_RANK"),
        rdzv_id=job.title,
        address=variable("MASTER_ADDR"),
        port=variable("MASTER_PORT"),
    )
    # A pod of a dual-stack cluster has two addresses.
    own = "$(hostname -i | cut -d' ' -f1)"
    return parts.script([*lines, *parts.torchrun_lines(job, words, own)])

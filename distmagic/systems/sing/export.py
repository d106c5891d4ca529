"""SING Cloud: an image, whose entry point starts on every node, and what the platform's variables are. Pure.

The entry point is the same for every job; what differs is in `settings.json` beside it. Secrets of `--env` are not in
the image: they are variables of the job, for which `secrets.env` has the lines.
"""

from __future__ import annotations

import json
import posixpath
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.exports import parts, quoting
from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.exports.quoting import variable
from distmagic.planning import torchrun
from distmagic.planning.torchrun import NodeWords
from distmagic.systems.sing import sing_entry

_AT = "/job"
_PORT = 29500


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
        f"COPY dist.py settings.json {_AT}/",
        f"COPY {PROGRAM}/ {_AT}/{PROGRAM}/",
        f"ENTRYPOINT {quoting.dockerfile((job.python or 'python', 'dist.py'))}",
    ]
    return (
        text_file("Dockerfile", "".join(f"{line}\n" for line in lines)),
        File(
            path="dist.py",
            data=Path(sing_entry.__file__).read_bytes(),
            is_for_all=True,
        ),
        text_file("settings.json", _settings(job), is_for_all=True),
        *_secrets(job),
    )


def readme(job: ExportedJob) -> tuple[str, ...]:
    """Return the paragraphs of the folder's README."""
    where = ", and give it the variables of `secrets.env`" if job.secrets else ""
    count = f"{job.nodes} node{'s' if job.nodes > 1 else ''}"
    variables = (
        "SING_RANK is this node's number, SING_WORLD_SIZE how many there are, SING_HOST_ADDR this node's address; the first "
        "one is SING_MASTER_ADDR, or `${SING_JOB_NAME}-0.${SING_HOSTNAME_SUFFIX}`."
    )
    return (
        f"Build and push the image: `docker build -t REGISTRY/{job.title} . && docker push REGISTRY/{job.title}`.",
        f"Start it as a job on {count}{where}. Its entry point is `python dist.py` on every node; any number of nodes will do.",
        variables,
    )


def _settings(job: ExportedJob) -> str:
    """Return what the entry point reads. A word of the command is a list: texts, and between them names of what it knows."""
    ranks = job.nproc_per_node
    words = NodeWords(
        backend=job.backend,
        nnodes=variable("NODES"),
        nproc_per_node=variable("RANKS"),
        node_rank=variable("NODE"),
        rdzv_id=job.title,
        address=variable("MASTER"),
        port=str(job.spec.master_port or _PORT),
    )
    command = [
        *parts.launcher(job),
        *torchrun.spelled(parts.asked(job, words, "ADDRESS")),
        *job.program.words,
    ]
    shown = ",\n".join(f"  {json.dumps(quoting.pieces(word))}" for word in command)
    others = {
        "nproc_per_node": None if ranks is None else str(ranks),
        "directory": posixpath.join(PROGRAM, job.program.inside).rstrip("/"),
        "imports": [f"{PROGRAM}/{path}" for path in job.program.imports],
        "environment": dict(job.variables),
    }
    lines = [f' "command": [\n{shown}\n ]']
    lines += [
        f" {json.dumps(key)}: {json.dumps(value)}" for key, value in others.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _secrets(job: ExportedJob) -> tuple[File, ...]:
    """Return the file with a line for each secret, as `--env-file` of docker takes it. Raises `UsageError`."""
    lines = []
    for name, value in job.secrets:
        if "\n" in value or "\r" in value:
            raise UsageError(
                f"--env {name}: it is a secret with a line break, and a file of variables has one line for each.",
                "Give it another form, such as base64.",
            )
        lines.append(f"{name}={value}\n")
    text = "".join(lines)
    return (text_file("secrets.env", text, is_private=True),) if lines else ()

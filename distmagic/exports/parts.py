"""Lines that the files of several systems share: variables, torchrun's command, the start directory
of ranks. Pure.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import replace

from distmagic.errors import UsageError
from distmagic.exports import quoting
from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.planning import torchrun
from distmagic.planning.torchrun import NodeWords
from distmagic.request.flag_values import Pairs
from distmagic.request.hosts import Slots

ENVIRONMENT = "environment.sh"
_WAIT_S = 300
# How a node without a scheduler counts its GPUs: one rank for each GPU, or one.
_COUNT = "import torch; print(torch.cuda.device_count() or 1)"


def environment(job: ExportedJob) -> tuple[File, ...]:
    """Return the file with all variables of the user, which the other scripts read; nothing without
    variables.
    """
    if not job.spec.variables:
        return ()
    lines = [
        "# The variables of every rank. Only its owner may read this file: it may hold secrets.",
        *exports(job.spec.variables),
    ]
    return (text_file(ENVIRONMENT, script(lines, head=""), is_private=True),)


def read_environment(job: ExportedJob) -> list[str]:
    """Return the bash line that reads the file of `environment`; none without variables."""
    return [f". ./{ENVIRONMENT}"] if job.spec.variables else []


def exports(pairs: Pairs) -> list[str]:
    """Return a line of bash for each variable."""
    return [f"export {name}={quoting.bash(value)}" for name, value in pairs]


def require(names: Iterable[str], giver: str) -> str:
    """Return the bash line that ends a script with an error about the first missing variable.

    `giver` should set them.
    """
    checks = [f'"${{{name}:?is not set: {giver} sets it}}"' for name in names]
    return f": {' '.join(checks)}"


def below(name: str, limit: str, of: str = "nodes") -> str:
    """Return the bash line that ends a script unless a variable is a number below `limit`, which
    may be a variable.
    """
    return f'[ "${name}" -ge 0 ] && [ "${name}" -lt "{limit}" ] || {{ echo "{name} is ${name}, of {limit} {of}" >&2; exit 1; }}'


def numbers(*names: str) -> list[str]:
    """Return one bash line for each variable, which ends a script unless it is an integer."""
    return [
        f'case ${name} in *[!0-9]*) echo "{name} is ${name}, which is not a number" >&2; exit 1 ;; esac'
        for name in names
    ]


def wait_for_master() -> list[str]:
    """Return the bash lines that wait until the first node's name resolves, some seconds after a
    node has started.
    """
    return [
        "# The first node's name may be known some seconds after this node has started.",
        f"for _ in $(seq {_WAIT_S}); do",
        '    getent ahosts "$MASTER_ADDR" >/dev/null && break',
        "    sleep 1",
        "done",
        f'getent ahosts "$MASTER_ADDR" >/dev/null || {{ echo "$MASTER_ADDR is not known after {_WAIT_S} s" >&2; exit 1; }}',
    ]


def counted_ranks(job: ExportedJob, ranks: Slots | None) -> tuple[list[str], str]:
    """Return the number of ranks of a node, and the preceding line that counts its GPUs if no
    number is given.
    """
    if ranks is not None:
        return [], str(ranks)
    count = quoting.bash_line((python_of(job), "-c", _COUNT))
    return [f"RANKS=$({count})  # one a GPU, or one"], quoting.variable("RANKS")


def script(lines: Iterable[str], head: str = "#!/bin/bash\n") -> str:
    """Return the text of a script of bash."""
    return head + "".join(f"{line}\n" for line in lines)


def enter(job: ExportedJob) -> list[str]:
    """Return the lines that change from the exported folder to the start directory of ranks."""
    lines = []
    if job.program.imports:
        paths = [
            f'"$PWD"/{PROGRAM}/{quoting.bash(path)}' for path in job.program.imports
        ]
        lines.append(
            f"export PYTHONPATH={':'.join(paths)}${{PYTHONPATH:+:$PYTHONPATH}}"
        )
    where = posixpath.join(PROGRAM, job.program.inside).rstrip("/")
    lines.append(f"cd {quoting.bash(where)} || exit")
    return lines


def python_of(job: ExportedJob) -> str:
    """Return the interpreter of the ranks, and of their launcher."""
    path = job.python or "python3"
    # A leading `~/` is the home of the node on which it runs.
    return quoting.variable("HOME") + path[1:] if path.startswith("~/") else path


def torchrun_lines(job: ExportedJob, words: NodeWords, own: str = "") -> list[str]:
    """Return torchrun's command as lines of bash, one for each flag.

    The user's rendezvous ID and restarts are added. `own` is bash for the address that a node
    announces with c10d, "" if the system has none; node 0 then has the store.
    """
    is_c10d = words.backend == "c10d"
    # With the static backend, nodes that restart their ranks never meet again.
    can_restart = is_c10d or job.nodes == 1
    words = replace(
        words,
        rdzv_id=job.spec.rdzv_id or words.rdzv_id,
        max_restarts=job.spec.max_restarts if can_restart else 0,
    )
    lines = []
    if is_c10d and own:
        rank = quoting.pieces(words.node_rank)[1]
        lines = [f"NODE_ADDR={own}", f"IS_HOST=$(({rank} == 0))"]
        words = replace(
            words,
            local_addr=quoting.variable("NODE_ADDR"),
            conf=f"is_host={quoting.variable('IS_HOST')}",
        )
    command = [
        quoting.bash_line(("exec", python_of(job), *job.program.launcher)),
        *(f"    {quoting.bash(flag)}" for flag in torchrun.spelled(words)),
        f"    {quoting.bash_line(job.program.words)}",
    ]
    # Each line except the last continues.
    return [*lines, *(f"{line} \\" for line in command[:-1]), command[-1]]


def ranks_of_node(job: ExportedJob) -> int:
    """Return the number of ranks of each node, if it must be a number.

    Raises `UsageError` for gpu, cpu and auto.
    """
    nproc = job.nproc_per_node
    if nproc is None:
        return 1
    if isinstance(nproc, str):
        raise UsageError(
            f"--nproc-per-node {nproc}: {job.request.system} needs the number of ranks beforehand.",
            "Write a number.",
        )
    return nproc

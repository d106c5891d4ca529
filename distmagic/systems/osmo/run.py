"""`--on osmo`: a run as a workflow of OSMO, followed by its log.

    the payload, as files of the workflow   -> osmo workflow submit
    output of tasks (remote/contact/task.py) -> osmo workflow logs -> events -> the view of any run
    an interrupt                            -> osmo workflow cancel

This module makes the workflow's content, and rejects unsupported flags. workflow.py submits and
follows it.
"""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from distmagic.errors import Cancelled, DistmagicError, UsageError
from distmagic.exports import parts
from distmagic.exports.job import PROGRAM, ExportedJob, ExportedProgram, File
from distmagic.names import owner, work_dir
from distmagic.outcome.run import Run
from distmagic.payload import bundle
from distmagic.payload.pack import Payload
from distmagic.payload.work_files import with_tree
from distmagic.planning.plan import terms_of
from distmagic.planning.start_messages import listed, with_files
from distmagic.remote.contact.task import START
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms, StartNode
from distmagic.render.screen import Screen
from distmagic.request.flags import Request
from distmagic.state.events import Planned
from distmagic.systems.osmo import export as workflows
from distmagic.systems.osmo import osmo
from distmagic.systems.osmo.workflow import WorkflowRun

_ZIP = "distmagic.zip"
_OTHER_FLAGS = {
    "detach": (
        "this notebook follows the workflow",
        "Submit a workflow without a notebook: --export osmo DIR.",
    ),
    "hang_timeout_s": (
        "the notebook can't ask the ranks where they wait",
        "Leave the flag out.",
    ),
    "fetch": (
        "the notebook can't reach the files of the containers",
        "Name a storage for the files: --results URL.",
    ),
    "devices": (
        "OSMO chooses the GPUs of each task",
        "Write their number: --gpus-per-node N.",
    ),
    "cwd": ("a new container has no such directory", "Send files: --sync DIR."),
}


def check(request: Request) -> None:
    """Raise `UsageError` for flags that a run on OSMO does not support, and if the program `osmo`
    is missing.
    """
    osmo.check()
    for name, (why, hint) in _OTHER_FLAGS.items():
        if getattr(request.spec, name):
            flag = name.removesuffix("_s").replace("_", "-")
            raise UsageError(f"--{flag} does not work with --on osmo: {why}.", hint)
    assert request.workflow is not None
    results = request.workflow.results
    if results and "://" not in results:
        raise UsageError(
            f"--results {results}: since June 2026 OSMO has no datasets for results.",
            "Write the URL of a storage: --results s3://bucket/folder.",
        )
    if any(host for host, _ in request.access.pythons):
        raise UsageError(
            "--python HOST=PATH names a host, and OSMO chooses the hosts.",
            "Write --python PATH.",
        )
    if request.spec.is_elastic:
        raise UsageError(
            "--nnodes MIN:MAX: a workflow of OSMO has as many tasks as it is submitted with.",
            "Write --nodes N.",
        )


def run(
    request: Request, payload: Payload, screen: Screen, variable: str = "run"
) -> Run:
    """Run a payload as a workflow, and return its `Run`. `variable` as for `Session.launch`.

    Raises `UsageError` and `Unreachable` if it can't be submitted; else the errors of any run, with
    its `Run`. Results that can't be downloaded do not fail the run.
    """
    payload = with_tree(payload, request.spec.sync, Path.cwd())
    terms = terms_of(
        request.spec,
        lease_s=request.access.lease_s,
        owner=owner(),
        call=payload.title,
    )
    job = _job(request, payload, terms)
    text, tasks = workflows.workflow(job), workflows.names(job.nodes)
    planned = Planned(
        addresses=(),
        terms=terms,
        world_size=parts.ranks_of_node(job) * job.nodes,
    )
    workflow = WorkflowRun(text, tasks, planned, screen, variable)
    left = workflow.run()
    if job.request.results:
        _fetch(left, job.request.results, Path(f"{workflow.workflow_id}-results"))
    return left


def _fetch(run: Run, url: str, folder: Path) -> None:
    """Download what a run has left in its storage. A failure does not fail the run, and is printed.

    An interrupt raises `Cancelled` with the run.
    """
    by_hand = shlex.join(("osmo", "data", "download", url, str(folder)))
    try:
        osmo.fetch(url, folder)
    except KeyboardInterrupt:
        run.unfetched += (url,)
        interrupted = Cancelled(
            "The run was over, and the download of its results was interrupted.",
            f"To download them: {by_hand}",
        )
        interrupted.run = run
        raise interrupted from None
    except (DistmagicError, OSError) as error:
        run.unfetched += (url,)
        text = f"--results {url}: {error}\nTo download it: {by_hand}"
    else:
        text = f"fetched {url} to {folder}"
    print(text, file=sys.stderr)  # noqa: T201 - lines for people


def _job(request: Request, payload: Payload, terms: JobTerms) -> ExportedJob:
    """Return the workflow's job: its tasks start a `StartNode`, with its blobs and the bundle."""
    assert request.workflow is not None
    spec = request.spec
    name = spec.name or (Path(payload.name).stem if payload.name else "cell")
    program = ExportedProgram(files=(), words=())
    job = ExportedJob(
        name=name,
        program=program,
        spec=replace(spec, rdzv_id=spec.rdzv_id or name),
        request=request.workflow,
        python=request.access.python_of("") or "",
    )
    if job.secrets:
        names = ", ".join(secret for secret, _ in job.secrets)
        raise UsageError(
            f"--env {names}: everyone who sees the workflow could read the secret.",
            "Use --export osmo DIR: its README describes how OSMO gets the secret. Or read the secret inside the function.",
        )
    start = protocol.encode(_start(job, payload, terms))
    files = [
        File(path=START, data=start),
        File(path=_ZIP, data=bundle.build().path.read_bytes()),
    ]
    for blob in dict.fromkeys(payload.blobs):
        files.append(File(path=blob.blob.sha256, data=blob.path.read_bytes()))
    at = f"{workflows.AT}/{PROGRAM}"
    launcher = ("-u", f"{at}/{_ZIP}", "task", at)
    return replace(job, program=replace(program, files=tuple(files), launcher=launcher))


def _start(job: ExportedJob, payload: Payload, terms: JobTerms) -> StartNode:
    """Return the message that starts every node; a task fills in its own number and addresses."""
    work = with_files(replace(work_dir(job.spec, payload), is_fresh=True), payload)
    return StartNode(
        job=time.strftime("%m%d-%H%M%S-") + secrets.token_hex(4),
        node_rank=0,
        torchrun=(),
        env={},
        defaults={"OMP_NUM_THREADS": "1"},
        cwd="",
        call=payload.call.blob.sha256,
        code=payload.code.blob.sha256,
        side_files=tuple(local.blob.sha256 for local in payload.blobs[2:]),
        endpoint="",
        hosts=workflows.names(job.nodes),
        lead=False,
        terms=replace(listed(terms), min_nodes=job.nodes),
        work=work,
    )

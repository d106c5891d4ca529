"""distmagic: a notebook cell trains on several hosts under torchrun, with every rank's progress live.

The way of the data. Each arrow is a function, each noun a frozen dataclass; nothing flows back.

    the cell's line   --request/flags.parse_line-->        Request: a JobSpec (what; no host in it) and an Access
    --hosts, settings --request/config.choose_hosts-->     Hosts
    --on slurm        --systems/slurm/allocation-->        Hosts that a scheduler gives
    --on sky          --systems/skypilot/cluster-->        Hosts of a cluster of SkyPilot
    the cell          --request/cell.parse_cell-->         statements for the notebook, and one call for every rank
    the call          --payload/pack.pack_call-->          Payload: files that travel
    Payload, --sync   --payload/work_files.with_tree-->    Payload: also the files that hosts find in their working directory
    Hosts             --connection/first_links-->            a Link to each host, and its Facts
    Facts             --planning/preflight-->              errors that name the host and the cure
    all of these      --planning/plan.make_plan-->         Plan: what every host starts; its JobTerms travel along
    Plan, Payload     --runner/start-->                    agents that run, and links to them
    links             --runner/event_queue-->              Event, Event, ...
    Events            --state/fold-->                      RunState: all that is known of a run
    RunState          --state/decide-->                    go on, or stop and why; runner/run_loop acts on it
    RunState          --render-->                          text and HTML; screens/ puts them where the user looks
    the last RunState --state/verdict-->                   an error, or none; outcome/ is the Run that is left
    --on osmo         --systems/osmo/run-->                no hosts: a workflow, whose log becomes Events
    --export          --session/exporting, systems/*/export-->  no run: a folder that starts the same job on a cluster

The packages, from the top floor down. None imports from one above it; `tests/unit/test_layers.py` has the same table and
checks it. Each package's own `__init__` says what happens there, what never happens there, and in which order to read it.

    cli.py         a terminal's commands, which are those of the notebook: `distmagic run train.py`
    notebook/      what a user types in IPython: `%%distributed`, `%distributed`, the Tab key
    api.py         the same from plain Python: `distmagic.run`
    playground/    throw-away SSH hosts on this machine
    staying/       ranks that stay, and one cell after the other on them
    sweeps/        one function with all combinations of some arguments: runs side by side, and a queue
    session/       one kernel's hosts and jobs
    systems/       systems that give hosts, run a job, or start an exported one: a folder each, and none imports another
    screens/       puts a run where a user looks: notebook, terminal, log
    outcome/       what is left of a run: results, logs, files, metrics
    runner/        one run from its start to its end; all threads of a run
    inside/        the nodes of a job that all run the same notebook or script find each other
    connection/    links to hosts: opened, kept idle, used again
    connection/requests/   what one host is asked over a link: each function a request and its answer
    transports/    starts a process on a host and holds its pipes, nothing else; transports/ssh/ through paramiko
    tracking/      metrics go to TensorBoard, Weights & Biases or MLflow
    comparison/    several runs side by side, pure
    diagnosis/     the doctor's judgement: what is wrong with hosts, and between them, pure
    render/        a RunState as text and HTML, pure
    state/         events become a RunState, and what follows from it, pure
    failures/      errors of torch, GPUs and the network in words; the call in which ranks part; pure
    exports/       what all exported jobs share: program, folder, lines of bash; pure, but for the one module that writes it
    exports/on_nodes/  scripts that travel in that folder
    planning/      from facts to the plan of what each host starts, pure
    notebook_place.py  where a notebook runs its cells, for `distmagic.run`
    names.py       under which names hosts know this process
    payload/       a call becomes files
    request/       what is asked for: hosts, options, the cell; pure, but for a hostfile and what is installed
    errors.py, sanitize.py    what all of these use
    help/          the manual, for people; `%distributed help TOPIC` shows it

On the hosts, with Python's standard library alone, `remote/`, which travels there as one zip:

    remote/keeper/    starts contacts on a node of a scheduler; travels as text, before the zip
    remote/contact/   answers a notebook over one SSH channel, receives and serves blobs, keeps templates
    remote/agent/     one node's job: starts torchrun, gathers what ranks report, ends every process
    remote/engine/    torchrun, by exec or forked from a template, and the ranks that it starts
    remote/rank/      one rank: calls the user's function, reports its progress
    remote/training/  what torch does in a rank: its process groups, its steps
    remote/checkup/   what may be wrong with a host, and which hosts it can dial, for the doctor
    remote/gang/      which nodes of a job are alive, known by heartbeats between the hosts
    remote/system/    what Linux shows: processes, memory, hardware, sockets, log-out
    remote/values/    values in files: pickles, tensors, large side files
    remote/records/   what is kept on a host: directories, journals, logs, the list of jobs
    remote/wire/      the messages between both halves: one frozen dataclass a message, one JSON line each

This file travels too, with `remote/` and nothing else, so that `import distmagic` works on a rank: it imports only
what is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.api import run as run
    from distmagic.api import sweep as sweep
    from distmagic.comparison.compare import compare as compare
    from distmagic.outcome.run import Run as Run
    from distmagic.remote.rank import checkpoint as checkpoint
    from distmagic.remote.rank.report import report as report
    from distmagic.remote.rank.report import track as track
    from distmagic.remote.rank.show import show as show

__version__ = "0.1.0"

_ERRORS = (
    "AllocationEnded",
    "AuthenticationError",
    "Cancelled",
    "ConnectionLost",
    "DistmagicError",
    "HostError",
    "HostErrors",
    "HostKeyError",
    "Hung",
    "NoResult",
    "NodeLost",
    "PayloadError",
    "PayloadTooLarge",
    "PreflightError",
    "ProtocolError",
    "RendezvousFailed",
    "RunError",
    "TimedOut",
    "Unreachable",
    "UsageError",
    "WireError",
    "WorkerFailed",
)
_HOMES = {
    "report": "distmagic.remote.rank.report",
    "track": "distmagic.remote.rank.report",
    "show": "distmagic.remote.rank.show",
    "run": "distmagic.api",
    "sweep": "distmagic.api",
    "compare": "distmagic.comparison.compare",
    "Run": "distmagic.outcome.run",
    "checkpoint": "distmagic.remote.rank.checkpoint",
    **dict.fromkeys(_ERRORS, "distmagic.errors"),
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # the names of one table


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distmagic' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name == "checkpoint" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)  # what the Tab key offers


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext distmagic`: register `%%distributed` and `%distributed`."""
    from distmagic.notebook.magic import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext distmagic`: take them back, and end connections and playground."""
    from distmagic.notebook.magic import unload_ipython_extension as unload

    unload(shell)

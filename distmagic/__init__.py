"""distmagic: a notebook cell trains on several hosts under torchrun, and shows every rank live.

How data flows: each arrow is a function, and each noun is a frozen dataclass. No step changes the
result of an earlier one.

    the cell's line   --request/flags.parse_line-->     Request: JobSpec (what to run) and
                                                        Access (how to reach hosts)
    --hosts, settings --request/config.choose_hosts-->  Hosts
    --on slurm        --systems/slurm/allocation-->     Hosts that a scheduler gives
    --on sky          --systems/skypilot/cluster-->     Hosts of a cluster of SkyPilot
    the cell          --request/cells/cell.parse_cell--> statements for the notebook, and
                                                        one call for every rank
    the call          --payload/pack.pack_call-->       Payload: files that travel
    Payload, --sync   --payload/work_files.with_tree--> Payload: also files for the working
                                                        directory on hosts
    Hosts             --connection/first_links-->       a Link to each host, and its Facts
    Facts             --planning/preflight-->           errors that name the host and the cure
    all of these      --planning/plan.make_plan-->      Plan: what every host starts; its
                                                        JobTerms travel along
    Plan, Payload     --runner/start-->                 agents that run, and links to them
    links             --runner/event_queue-->           Event, Event, ...
    Events            --state/fold-->                   RunState: everything known about a run
    RunState          --state/decide-->                 continue, or stop with a reason;
                                                        runner/run_loop acts on it
    RunState          --render-->                       text and HTML; screens/ shows them
    the last RunState --state/verdict-->                an error, or none; outcome/ makes the
                                                        Run that the user keeps
    --on osmo         --systems/osmo/run-->             no hosts: a workflow, whose log
                                                        becomes Events
    --export          --session/exporting-->            no run: a Job, of which
                                                        systems/*/export makes a folder that
                                                        starts it on a cluster

The packages, from the top layer down. No package imports from a layer above it;
`tests/unit/test_layers.py` checks this against the same table. Each package's `__init__` describes
what the package does, what it never does, and in which order to read it.

    cli.py         the notebook's commands in a terminal: `distmagic run train.py`
    notebook/      what a user types in IPython: `%%distributed`, `%distributed`, the Tab key
    api.py         the same for plain Python: `distmagic.run`
    playground/    throw-away SSH hosts on this machine
    staying/       ranks that stay alive between cells, and the cells that run on them
    sweeps/        a run for each combination of some arguments, side by side, the rest in a queue
    session/       the connections, hosts and jobs of one kernel
    systems/       Slurm, SkyPilot, OSMO, SING, torchrun: a folder each, and none imports another
    screens/       shows a run in a notebook, a terminal or a log
    outcome/       a finished run as the user gets it: results, logs, files, metrics
    runner/        one run from start to end; all threads of a run
    inside/        lets nodes that all run the same notebook or script find each other
    connection/    links to hosts: opened, kept idle, used again
    connection/requests/   requests to one host over a link, each with its answer
    transports/    starts a process on a host and holds its pipes; transports/ssh/ uses paramiko
    tracking/      sends metrics to TensorBoard, Weights & Biases or MLflow
    comparison/    compares several runs, pure
    diagnosis/     finds faults of hosts and of their network, for `%distributed doctor`, pure
    render/        turns a RunState into text and HTML, pure
    state/         folds events into a RunState, and decides what to do next, pure
    failures/      explains errors of torch, GPUs and the network, and calls that diverge, pure
    exports/       what all exports share: program, folder, lines of bash; pure, except folder.py
    exports/on_nodes/  scripts that are copied into that folder
    planning/      plans what each host starts, from facts about the hosts, pure
    notebook_place.py  the hosts on which a notebook runs its cells, for `distmagic.run`
    names.py       the names by which hosts identify this process
    payload/       turns a call into files to send
    request/       parses the user's request: hosts, options; pure, but reads hostfiles
    request/cells/ parses the cell, and finds what it does in the notebook alone; pure
    errors.py, sanitize.py    used by all of these
    help/          the user manual; `%distributed help TOPIC` shows it

`remote/` runs on the hosts. It needs only Python's standard library, and is sent to each host as
one zip:

    remote/keeper/    starts contacts on a scheduler's node; sent as text, before the zip
    remote/contact/   answers a notebook over one SSH channel, transfers blobs, keeps torch loaded
    remote/agent/     one node's job: starts torchrun, gathers what ranks report, ends every process
    remote/engine/    starts torchrun and its ranks, by exec or by a fork of a process with torch
    remote/rank/      one rank: calls the user's function, reports its progress
    remote/training/  watches torch in a rank: its process groups, its training steps
    remote/checkup/   examines a host for the doctor, and which other hosts it can connect to
    remote/gang/      detects lost nodes, by heartbeats between the hosts
    remote/system/    reads from Linux: processes, memory, hardware, sockets, log-out
    remote/values/    values in files: pickles, tensors, large side files
    remote/values/reductions/  how each kind of object is pickled
    remote/records/   what is stored on a host: directories, journals, logs, the list of jobs
    remote/wire/      the messages between notebook and hosts: frozen dataclasses, lines of JSON

This file is sent with `remote/`, so that `import distmagic` works on a rank. The other packages are
missing on hosts, so this file imports each name only when it is first used.
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
    found = module if name == "checkpoint" else getattr(module, name)
    globals()[name] = found  # `distmagic.report` is looked up at each step
    return found


def __dir__() -> list[str]:
    return sorted(__all__)  # for tab completion


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext distmagic`: register `%%distributed` and `%distributed`."""
    from distmagic.notebook.magic import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext distmagic`: unregister the magics; close all connections and the playground."""
    from distmagic.notebook.magic import unload_ipython_extension as unload

    unload(shell)

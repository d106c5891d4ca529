"""distmagic: a notebook cell trains on several hosts under torchrun, with every rank's progress live.

Where each thing happens, in the direction of the data. Each arrow is a function, each noun a frozen dataclass;
nothing flows back.

    the cell's line   --flags.parse_line-->    Request: a JobSpec (what; no host in it) and an Access (spec.py)
    --hosts, settings --config.choose_hosts--> Hosts (hosts.py)
    the cell          --cell.parse_cell-->     statements for the notebook, and one call for every rank
    the call          --pack.pack_call-->      Payload: the pickled call, and the modules and sources that it needs
    Hosts             --reach, link-->         Facts of each host (remote/system/facts.py), all hosts at once
    Facts             --diagnose-->            errors that name the host and the cure
    all of these      --plan.make_plan-->      Plan: what every host starts. torchrun.py alone spells torchrun's flags
    Plan              --launch.Launch-->       Event, Event, ... : one thread a host listens, and connects again
    Events            --fold.fold-->           RunState (state.py): what a user sees changes in fold*.py alone
    the way there     --opening.Opening-->     the same RunState, from the first moment: hosts reached, sent to, started
    RunState          --drive.decide-->        go on, or stop and why; drive.py is the loop around it
    RunState          --hangs.is_hung-->       whether no rank advances; hang_response.py asks where they are then
    RunState          --render-->              text and HTML; screens/ puts them on notebook, terminal or log
    the last RunState --verdict.verdict-->     an error (errors.py), or none; outcome.py is the Run that is left

In an elastic job a host may come (back) later: elastic_join.py tries those that are lost, node_joiner.py brings one in, as the
node that the lead counts it as (remote/gang/elastic_members.py). The lead's event `NodeAdded` tells all who follow the job.

On this side of the wire: magic.py (the cell), commands.py (`%distributed`) and completion.py are the user's side in
IPython, api.py is the same from plain Python. session.py puts the steps above in order, housekeeping.py is what
is asked of hosts apart from a run, backend.py is where the magics meet the rest. prepare.py asks the hosts what the
plan needs to know, start_messages.py is what a node is told at its start, event_queue.py where its events wait for `fold`; rollback.py
ends what had started where another host could not, or was lost.
prompts.py asks for passwords. playground.py starts throw-away SSH hosts to try all this on.
blobs.py and bundle.py are the files that are sent, local_modules.py finds the user's own modules among them.
delivery.py brings them to the hosts: what is large leaves the notebook once, with a one-time certificate
(certificate.py) by which the hosts that hand it on know each other.

In between: `transports/` can start one process on a host and hold its pipes, nothing else: on this machine, through
paramiko, or through the system's `ssh`. link.py is the conversation with one host over such a process; limits.py bounds
what a host may say, job_requests.py asks one host about a job, sanitize.py takes out what a terminal would obey,
network_errors.py says which host could not reach which.

On the host: `remote/`, which travels there and needs Python, and torch where torchrun starts. boot.py comes first and
unpacks; contact.py answers the notebook, blob_receiver.py takes files, blob_server.py hands them on to the next host; agent.py
runs one job on one host: it starts torchrun (engine.py), has rank_table.py gather what the ranks say into a journal, and
ends every process when told so or when its lease (lease.py) runs out, or when channel.py finds that another host
failed or fell silent (gang.py decides, datagrams.py seals); socket_peer.py lets only this user's processes speak to it,
memory.py knows whom the kernel killed for want of memory; stacks.py has a rank tell where it is at a signal,
stack_dump.py asks all ranks of a node; worker.py is one rank and calls the user's function; report.py and bars.py are
the rank's progress; protocol.py is the wire, JSON lines, the same file on both ends. Between runs template.py keeps
torch loaded (template_client.py finds it, the notebook's idle_links.py renews it); agents are forked from it, torchrun from them, ranks
from rank_fork_server.py, made fresh by forking.py.

This file travels too, with `remote/` and nothing else, so that `import distmagic` works on a rank: it imports only
what is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.api import run as run
    from distmagic.remote.rank import checkpoint as checkpoint
    from distmagic.remote.rank.report import report as report
    from distmagic.remote.rank.report import track as track
    from distmagic.runner.outcome import Run as Run

__version__ = "0.1.0"

_ERRORS = (
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
    "SpecError",
    "TimedOut",
    "Unreachable",
    "WireError",
    "WorkerFailed",
)
_HOMES = {
    "report": "distmagic.remote.rank.report",
    "track": "distmagic.remote.rank.report",
    "run": "distmagic.api",
    "Run": "distmagic.runner.outcome",
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

"""Notes for the user that are no failures: notices of hosts, results that are not kept, ranks that
worked alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from distmagic.failures import detailed_logs
from distmagic.render.text_width import one_line, plain
from distmagic.state.explanation import listed
from distmagic.state.model import RunState, WorkerState
from distmagic.state.standstill import IDLE_S, IDLE_SHARE, idle_hosts


def notes(state: RunState) -> tuple[str, ...]:
    """Return all notes, one line each, newest last."""
    # The notices; one from several hosts only once: `gpu-a, gpu-b: text`.
    hosts = {node.host for node in state.nodes}
    table: dict[str, list[str]] = {}  # text: its hosts
    for notice in state.notices:
        host, colon, text = notice.partition(": ")
        if not colon or host not in hosts:
            table.setdefault(notice, [])
            continue
        givers = table.setdefault(text, [])
        if host not in givers:
            givers.append(host)
    lines = []
    for text, givers in table.items():
        names = detailed_logs.some_of(givers, 3)
        lines.append(one_line(f"{names}: {text}" if givers else text))
    return (
        *lines,
        *_idle(state),
        *_logged(state),
        *_results_not_kept(state),
        *_lone_ranks(state),
    )


def _idle(state: RunState) -> Iterator[str]:
    """Yield a line for unused GPUs."""
    idle = idle_hosts(state)
    if idle:
        yield one_line(
            f"{', '.join(idle)}: the GPUs of this run are under {IDLE_SHARE:.0%} for more than {IDLE_S / 60:.0f} minutes; "
            f"%distributed stop {state.job} frees them"
        )


def _logged(state: RunState) -> Iterator[str]:
    """Yield what detailed logs show of the network: how hosts connect, and what is wrong."""
    hosts = [node.host for node in state.nodes]
    summary = detailed_logs.summary(state.logged, hosts)
    faults: tuple[str, ...] = ()
    if state.phase != "done":
        faults = detailed_logs.faults(state.logged, hosts, state.host_names)
    yield from map(one_line, filter(None, (summary, *faults)))


def _results_not_kept(state: RunState) -> Iterator[str]:
    """Yield which results of returned ranks are missing; equal texts of several ranks only once."""
    table: dict[str, list[WorkerState]] = {}
    for worker in state.workers.values():
        ended = worker.ended
        if ended is not None and ended.outcome == "returned" and ended.meaning:
            table.setdefault(ended.meaning, []).append(worker)
    for meaning, workers in table.items():
        ranks = sorted(worker.rank for worker in workers)
        who = (
            f"{plain(workers[0].label)} has"
            if len(ranks) == 1
            else f"each of the ranks {listed(ranks)} has"
        )
        yield one_line(f"{who} returned, but {meaning}")


def _lone_ranks(state: RunState) -> Iterator[str]:
    """Yield a sentence for a successful run of several ranks in which no rank communicated with
    another.

    That looks like success, although each rank may have trained its own model.
    """
    ends = [worker.ended for worker in state.workers.values()]
    if state.phase != "done" or len(ends) < 2:
        return
    uses = {"" if ended is None else ended.group_use for ended in ends}
    if uses == {"none"}:
        yield (
            f"no rank was in a process group: the {len(ends)} ranks each worked on their own. If they are to train together, "
            "call torch.distributed.init_process_group, or make the Accelerator or Trainer, in what the ranks run"
        )
    elif uses <= {"none", "unused"}:
        yield (
            f"no rank made a collective call, though there was a process group: the {len(ends)} ranks each worked on "
            "their own. If they are to train together, wrap the model, in DistributedDataParallel for example"
        )

"""Makes a run's exception from its last state, or None for success. Pure.

`_verdict` has the precedence of causes. The functions below it write the message for each cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from distmagic import sanitize
from distmagic.errors import (
    Cancelled,
    Hung,
    NodeLost,
    RendezvousFailed,
    RunError,
    TimedOut,
    WorkerFailed,
)
from distmagic.failures import detailed_logs, failure_kind, network_errors
from distmagic.remote.system import exit_codes, memory
from distmagic.state.events import NEVER_BEGAN
from distmagic.state.explanation import stacks_text
from distmagic.state.hangs import explain_failed_call, explain_last
from distmagic.state.model import NodeState, RunState, WorkerState
from distmagic.state.phases import meaning_of

_TAKEN = ("EADDRINUSE", "address already in use", "Address already in use")
_LAST_LINES = 12
INTERRUPTED_WHEN_OVER = "Interrupted when the run was over: every rank had ended well."


def verdict(state: RunState) -> RunError | None:
    """Return the exception of a finished run; None if it succeeded.

    It is about the rank that failed first: the others were stopped because of it.
    """
    error = _verdict(state)
    survivors = [
        f"{what} on {node.host}" for node in state.nodes for what in node.survivors
    ]
    if error is not None and survivors:
        hint = (
            f"{error.hint}\nThese processes did not end, even after SIGKILL: {'; '.join(survivors)}. "
            "A process in state D waits for a disk or a device.\n"
            "On its host, with its pid: ps -o pid,stat,wchan,cmd -p PID"
        )
        error.hint = sanitize.lines(hint.strip())
    hosts = [node.host for node in state.nodes]
    logged = detailed_logs.faults(state.logged, hosts, state.host_names)
    if error is not None and logged:
        new = [words for words in logged if words not in error.hint]
        error.hint = sanitize.lines("\n".join([*new, error.hint]).strip())
    return error


def may_be_of_hosts(state: RunState, error: RunError | None) -> bool:
    """Whether the cause of an error may be the network, or a host that differs from the others."""
    if isinstance(error, (RendezvousFailed, Hung)):
        return True
    if not isinstance(error, WorkerFailed) or state.first_failure is None:
        return False
    words = _connection(state, state.workers[state.first_failure])
    return bool(words) and not network_errors.is_of_a_peer(words)


def _verdict(state: RunState) -> RunError | None:
    if state.abandoned:
        return (
            Cancelled(state.abandoned) if state.stopping else RunError(state.abandoned)
        )
    # Before failures of ranks: an elastic job that loses a node kills its ranks in order to restart
    # them.
    if state.is_elastic and state.is_lost:
        return _node_lost(state)
    # Before the reason of a stop: a failure is why the others were stopped. The exception is a
    # failed rank that torchrun would have restarted, if the user or a time limit had not ended the
    # run.
    could_restart = state.terms.may_restart and state.stopping in (
        "interrupted",
        "terminated",
        "timeout",
        "hung",
    )
    if state.first_failure is not None and not could_restart:
        worker = state.workers[state.first_failure]
        node = state.nodes[worker.node_rank]
        was_killed = worker.ended is not None and worker.ended.outcome == "signalled"
        if was_killed and _was_ended_by_its_agent(node):
            return _ended_by_its_agent(node)
        return _worker_failed(state, worker)
    # Before a loss: a node that does not confirm its end only counts as lost after the run was
    # stopped.
    if (stopped := _stopped(state)) is not None:
        return stopped
    if state.is_lost:
        return _node_lost(state)
    return _broken(state)


def _stopped(state: RunState) -> RunError | None:
    if state.stopping in ("interrupted", "terminated"):
        return _interrupted(state)
    if state.stopping == "hung":
        where, hint, stacks = _stood_still(state)
        if where:
            hint += " Allow more time with a longer --hang-timeout."
        else:
            where = "No host reported where its ranks were."
        what = f"The run was stopped by --hang-timeout. {where}"
        return Hung(what, _joined(hint, _lost_hint(state)), stacks)
    if state.stopping == "timeout":
        where, hint, stacks = _stood_still(state)
        what = "The run was stopped: its --timeout ran out."
        if not where:
            return TimedOut(what, "Allow more time, or none: leave --timeout out.")
        return TimedOut(f"{what} {where}", _joined(hint, _lost_hint(state)), stacks)
    if state.stopping == "gang":
        lead = state.nodes[0].host
        members = state.nodes[1:]
        silent = ", ".join(node.host for node in members if node.gang == "silent")
        silent = silent or "the other hosts"
        return RendezvousFailed(
            f"The job can't be detached: {silent} and {lead} don't hear each other by UDP, so that neither would notice "
            "the other's end.",
            "Let UDP through between the hosts at the port of the rendezvous (--master-port names one), or run it without --detach.",
        )
    if not state.lost and any(node.stopping == "lost" for node in state.essential):
        # The error of a run whose hosts were all up, but received no heartbeats of each other.
        lead = state.nodes[0].host
        cut_off = [
            node.host
            for node in state.nodes[1:]
            if node.gang == "lost" or node.node_rank == state.culprit
        ]
        candidates = cut_off or [node.host for node in state.nodes]
        others = ", ".join(dict.fromkeys(name for name in candidates if name != lead))
        return NodeLost(
            f"{others} and {lead} no longer receive each other's heartbeats, though both reach this notebook; the run was stopped.",
            "Look at the network between them: UDP at the port of the rendezvous (--master-port names one) must pass all the time.",
        )
    return _unreached(state) if state.stopping == "rendezvous" else None


def _interrupted(state: RunState) -> Cancelled:
    # An agent that is stopped when its torchrun has already ended still gives "done" as its reason.
    if all(node.code == 0 and node.reason == "done" for node in state.essential):
        if state.cell:
            return Cancelled(
                "The cell was interrupted. Its ranks stay, with all names."
            )
        return Cancelled(INTERRUPTED_WHEN_OVER)
    where_they_were, _, _ = _stood_still(state)
    hint = _joined(where_they_were, _lost_hint(state))
    what = "every rank on every host was stopped"
    if any(why != NEVER_BEGAN for why in state.lost.values()):
        what = "every rank that could be reached was stopped"
    if any(node.survivors for node in state.nodes):
        what = "some of its processes did not end"
    return Cancelled(f"The run was interrupted; {what}.", hint)


def _joined(*lines: str) -> str:
    """Return the non-empty lines as one text."""
    return "\n".join(line for line in lines if line)


def _stood_still(state: RunState) -> tuple[str, str, str]:
    """Return where ranks stood still before a stop, what to do, and their stacks; "" each if
    unknown.
    """
    explanation, dump = explain_last(state), state.last_dump
    # Replayed events have lost their order in time; a run that hung had stood still in any case.
    is_unknown = state.before_s and state.stopping != "hung"
    if explanation is None or dump is None or is_unknown:
        return "", "", ""
    stood_s = dump.at_s - state.advanced_at_s
    where = f"No rank had advanced for {stood_s:.0f} s before that. Where they were: {explanation.sentence}."
    written = f"The whole output of a rank: {state.variable}.logs(rank)."
    return where, _joined(explanation.advice, written), stacks_text(explanation)


def _broken(state: RunState) -> RunError | None:
    culprit = state.culprit
    if state.stopping == "failed" and culprit is not None and culprit in state.lost:
        return _failed_unseen(state, state.nodes[culprit])
    if state.failed_node is not None:
        failed = state.nodes[state.failed_node]
        has_any_begun = bool(state.at_work)  # before that, no node is too late
        if failed in state.essential or not has_any_begun:
            return _engine_failed(state, failed)
    broken = [
        node
        for node in state.essential
        if node.code not in (0, None) or not meaning_of(node.reason).is_explained
    ]
    if broken:
        broken.sort(key=lambda node: node.node_rank != state.culprit)
        return _engine_failed(state, broken[0])
    if state.phase == "done":
        return None
    # Success is not confirmed, and no cause is known.
    silent = ", ".join(node.host for node in state.nodes if node.code is None)
    what = (
        f"{silent} did not report how torchrun ended"
        if silent
        else f"it was stopped ({state.stopping})"
    )
    return RunError(
        f"The run did not end well: {what}.",
        f"See agent.log under ~/.distmagic/jobs/{state.job} on that host.",
    )


def _failed_unseen(state: RunState, node: NodeState) -> RunError:
    """Return the error for a node that failed and stopped the others, after this notebook had lost
    it.
    """
    for worker in state.workers.values():
        is_there = worker.node_rank == node.node_rank
        if is_there and worker.ended is not None and worker.ended.failure is not None:
            return _worker_failed(state, worker)
    why = state.lost[node.node_rank].rstrip(".")
    return RunError(
        f"{node.host} failed, and the other hosts were stopped. The cause is unknown: the notebook had lost {node.host} before ({why}).",
        f"When {node.host} answers again, this command may show the cause: %distributed attach {state.job}",
    )


def _worker_failed(state: RunState, worker: WorkerState) -> WorkerFailed:
    ended = worker.ended
    assert ended is not None
    where = f"Its whole output: {state.variable}.logs({worker.rank}), on {worker.host} under ~/.distmagic/jobs/{state.job}."
    for node_rank, why in state.lost.items():
        where = f"{state.nodes[node_rank].host} was lost too, which may be the cause: {why}\n{where}"
    parted = explain_failed_call(state)
    text = _exception(worker)
    asserted = failure_kind.assertion_in_words(text, _stderr(state, worker.rank))
    # NCCL's watchdog aborts the process, without an exception.
    said = text or "\n".join(_stderr(state, worker.rank)[-_LAST_LINES:])
    cure = failure_kind.cure_in_words(said, worker.host, stays=bool(state.cell))
    where = _joined(parted, _connection(state, worker), asserted, cure, where)
    failure = ended.failure
    if failure is not None:
        said, *more = failure.message.strip().splitlines() or [""]
        if more:  # the traceback above it ends with the whole message
            said = f"{said} ..." if failure.traceback else failure.message
        what = f"{worker.label} raised {failure.type}: {said}".removesuffix(": ")
        if ended.meaning:
            where = f"One of its child processes was killed: {ended.meaning}.\n{where}"
        return WorkerFailed(what, where, failure.traceback)
    how = _how(ended.code, ended.meaning)
    has_cause = memory.REACHED in ended.meaning or memory.HOST_WIDE in ended.meaning
    if exit_codes.is_kill(ended.code) and not has_cause:
        often = f"Often the host or its container has run out of memory: see dmesg on {worker.host}."
        where = _joined(often, where)
    return WorkerFailed(
        f"{worker.label} {how}.", _with_last_lines(state, worker.rank, where)
    )


def _connection(state: RunState, worker: WorkerState) -> str:
    """Return the host that this rank could not reach, if that made it fail."""
    return network_errors.in_words(
        _exception(worker),
        _stderr(state, worker.rank),
        worker.host,
        state.host_names,
    )


def _exception(worker: WorkerState) -> str:
    failure = worker.ended.failure if worker.ended is not None else None
    return "" if failure is None else f"{failure.type}: {failure.message}"


def _stderr(state: RunState, rank: int) -> list[str]:
    return [
        line.text
        for line in state.lines
        if line.rank == rank and line.stream == "stderr" and line.text.strip()
    ]


def _how(code: int, meaning: str) -> str:
    """Return how a process ended, in words."""
    how = (
        f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
    )
    return f"{how} ({meaning})" if meaning else how


def _failed_afterwards(state: RunState, worker: WorkerState) -> WorkerFailed:
    """Return the error of a rank whose function returned, but whose process then failed: atexit,
    native libraries.
    """
    assert worker.exit is not None
    how = _how(worker.exit.code, exit_codes.meaning_of(worker.exit.code))
    run = state.variable
    hint = f"Its result is kept: {run}.results[{worker.rank}]. Its whole output: {run}.logs({worker.rank})."
    return WorkerFailed(
        f"{worker.label} returned, but its process {how} while it shut down.",
        _with_last_lines(state, worker.rank, hint),
    )


def _with_last_lines(state: RunState, rank: int, hint: str) -> str:
    lines = _stderr(state, rank)
    return f"Last output:\n{_indented(lines)}\n{hint}" if lines else hint


def _indented(lines: Sequence[str]) -> str:
    """Return the last of these lines, indented for a hint."""
    return "\n".join(f"    {line}" for line in lines[-_LAST_LINES:])


def _unreached(state: RunState) -> RendezvousFailed:
    lead = state.nodes[0].host
    parts = [
        f"{state.nodes[node].host} can't dial {lead} at {why}"
        for node, why in sorted(state.unreached.items())
    ]
    return RendezvousFailed(
        f"The nodes can't meet: {'; '.join(parts)}.",
        f"Open that port on {lead} for the other hosts, or name an open one with --master-port; if they reach {lead} "
        "at another address, name it with --rdzv-endpoint ADDRESS:PORT.",
    )


def _node_lost(state: RunState) -> NodeLost:
    parts = [
        f"{state.nodes[node].host}: {why}" for node, why in sorted(state.lost.items())
    ]
    what = f"A host was lost, and the others were stopped. {'; '.join(parts)}"
    return NodeLost(what, _lost_hint(state))


def _lost_hint(state: RunState) -> str:
    left = []
    for node_rank, why in state.lost.items():
        node = state.nodes[node_rank]
        if why != NEVER_BEGAN and node.phase not in ("clear", "gone"):
            left.append(node)
    names = ", ".join(dict.fromkeys(node.host for node in left))
    if not names:
        return ""
    when = (
        "when no heartbeat of the other hosts arrives"
        if any(node.gang for node in left)
        else "when its lease runs out"
    )
    return f"What still runs on {names} ends by itself {when}."


def _was_ended_by_its_agent(node: NodeState) -> bool:
    """Whether the agent ended its ranks for its own reason: the lease expired, or another notebook
    stopped it.
    """
    meaning = meaning_of(node.reason)
    return not (meaning.is_wish or meaning.is_explained)


def _ended_by_its_agent(node: NodeState) -> RunError:
    if node.reason == "idle":
        return TimedOut(
            "The ranks have ended: no cell ran on them for the time of --stay-idle."
        )
    if node.reason == "stopped":
        return RunError(
            "The job was stopped, by %distributed stop or from another notebook."
        )
    why = node.reason
    if why == "lease":
        why = "this notebook did not renew its lease"
    return RunError(f"{node.host} ended its ranks: {why}.")


def _engine_failed(state: RunState, node: NodeState) -> RunError:
    """Return the error of a node whose torchrun failed or was ended, while no failed rank is known.

    The most specific cause is used, in this order: the agent's own error, a port in use, a rank
    whose process failed after its end. Next come a rank that failed because it lost a peer, and the
    last lines of torchrun.
    """
    if _was_ended_by_its_agent(node):
        return _ended_by_its_agent(node)
    label = f"torchrun {node.host}"
    lines = [
        line.text for line in state.lines if line.rank == -1 and line.label == label
    ]
    if any(word in line for line in lines for word in _TAKEN):
        return RendezvousFailed(
            f"{node.host}: the port of the rendezvous is taken on that host.",
            "It was free when it was chosen, and another process has taken it since. Run it again: then another one is chosen."
            if state.chose_port
            else "Name another one with --master-port or --rdzv-endpoint, or none: then a free one is chosen for each run.",
        )
    for worker in state.workers.values():
        if worker.node_rank == node.node_rank and failure_kind.has_failed_afterwards(
            worker.ended, worker.exit
        ):
            return _failed_afterwards(state, worker)
    for worker in state.workers.values():
        if worker.ended is not None and worker.ended.failure is not None:
            # In an elastic job: it may only have lost a peer.
            return _worker_failed(state, worker)
    hint = ""
    if state.lost and state.is_elastic:
        lost = ", ".join(dict.fromkeys(state.nodes[lost].host for lost in state.lost))
        hint = f"Before that {lost} was lost; each loss of a host uses up one of --max-restarts {state.terms.max_restarts}.\n"
    if lines:
        hint += f"Its last lines:\n{_indented(lines)}\nAll of it: {state.variable}.logs(-1)."
    else:
        hint += f"Its output, if there is any: {state.variable}.logs(-1)."
    code = node.code or 0
    how = _how(code, exit_codes.meaning_of(code))
    return RunError(
        f"torchrun on {node.host} {how} before any rank reported an error.", hint
    )

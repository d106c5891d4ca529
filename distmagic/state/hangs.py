"""Where the ranks of a run are that hangs: ranks with equal stacks form a group, the unusual groups
come first.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distmagic.failures.calls import Parting, parting
from distmagic.remote.wire.protocol import Frame, Stacks
from distmagic.state.explanation import Explanation, StackGroup
from distmagic.state.model import RunState, StackDump

# What a blocking call waits for, by the start of its file's name. The first match counts.
_COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/distributed.py")
_WAITS = (
    ("torch/utils/data/", "for its DataLoader"),
    ("queue.py", "in queue.{}"),
    ("multiprocessing/queues.py", "in a queue's {}"),
    ("multiprocessing/", "for another process"),
    ("subprocess.py", "for a child process"),
    ("concurrent/futures/", "for a future"),
    ("asyncio/", "in its event loop"),
    ("threading.py", "for another thread"),
    ("socket.py", "for the network"),
    ("ssl.py", "for the network"),
    ("selectors.py", "for the network"),
)
# Wrappers of torch around each collective.
_WRAPPERS = ("wrapper", "inner", "decorator")


def unanswered(state: RunState, dump: StackDump | None) -> tuple[int, ...]:
    """Return the nodes without answers of all their ranks.

    A node whose ranks have all ended need not answer.
    """
    missing = {
        worker.node_rank for worker in state.workers.values() if worker.phase != "done"
    }
    if dump is not None:
        missing -= set(dump.nodes)
    return tuple(sorted(missing))


def explain_last(state: RunState) -> Explanation | None:
    """Return where the ranks are, by the last request for stacks; None if a rank has advanced
    since.
    """
    dump = state.last_dump
    if dump is None or dump.at_s < state.advanced_at_s:
        return None
    found = explain_dump(state, dump)
    return found if found.groups or found.unanswered else None


def explain_failed_call(state: RunState) -> str:
    """Explain a run in which a collective call failed: the call at which ranks diverged, and what
    to do; "" if unknown.

    A rank that is behind may only have lost another one, like the others: it is named only if it
    ended successfully.
    """
    answers, left = [], []
    for worker in state.workers.values():
        if worker.left is not None and worker.phase == "done":
            left.append(worker.left)
        elif worker.left is not None:
            answers.append((worker.host, worker.left))
    found = explain(answers, left=left)
    parted = found.parting
    if parted is None or not any(side.waiting for side in parted.sides):
        return ""
    if parted.kind == "different":
        sentence = found.sentence
        return f"{sentence[:1].upper()}{sentence[1:]}. {found.advice}"
    have_ended = {one.rank for one in left}.issuperset(parted.missing)
    return found.advice if parted.missing and have_ended else ""


def explain_dump(state: RunState, dump: StackDump) -> Explanation:
    """Return where the ranks were, according to their answers."""
    answers = [
        (state.workers[rank].host, stacks)
        for rank, stacks in dump.stacks.items()
        if rank in state.workers
    ]
    hosts = [state.nodes[node].host for node in unanswered(state, dump)]
    done = [one for one in state.workers.values() if one.phase == "done"]
    left = [one.left for one in done if one.left is not None]
    return explain(answers, hosts, left)


def explain(
    answers: Sequence[tuple[str, Stacks]],
    unanswered: Sequence[str] = (),
    left: Sequence[Stacks] = (),
) -> Explanation:
    """Group the answers of ranks, each with its host's name.

    `left` has the calls of ranks that ended successfully.
    """
    parted = parting([*(stacks for _, stacks in answers), *left])
    table: dict[object, list[tuple[str, Stacks]]] = {}
    for host, stacks in sorted(answers, key=lambda answer: answer[1].rank):
        table.setdefault(_key(stacks), []).append((host, stacks))

    # Unusual groups first: ranks that don't answer, then ranks outside of the call in which the
    # others wait, then smaller groups.
    def oddness(group: StackGroup) -> tuple[bool, bool, int, int]:
        return (
            bool(group.threads),
            group.in_collective,
            len(group.ranks),
            group.ranks[0],
        )

    found = [_waiting(_group(members), parted) for members in table.values()]
    return Explanation(
        groups=tuple(sorted(found, key=oddness)),
        unanswered=tuple(unanswered),
        parting=parted,
    )


def _waiting(group: StackGroup, parted: Parting | None) -> StackGroup:
    """Return the group with the call for which its ranks wait, if only their recorded calls show
    it: NCCL's return before they are over.
    """
    is_known = group.in_collective or not group.threads or group.verb == "waits"
    if is_known or parted is None or parted.kind != "behind":
        return group
    side = parted.sides[0]
    if not set(side.waiting).issuperset(group.ranks):
        return group
    place = side.place(group.ranks)
    called = f"{side.call}, called at {place}" if place else side.call
    return replace(group, awaits=called, in_collective=True)


# ---- one rank


def _key(stacks: Stacks) -> object:
    """Return a key that is equal for ranks at the same place: the frames of the user's code, and
    the collective call.

    Frames inside that call do not count: of two ranks in the same call, one may just be reading its
    clock.
    """
    if not stacks.threads:
        return stacks.silence
    frames = stacks.threads[0].frames
    own = tuple(
        (frame.file, frame.line, frame.function) for frame in frames if frame.mine
    )
    return own, _doing(frames)


def _group(members: Sequence[tuple[str, Stacks]]) -> StackGroup:
    labels = {
        stacks.rank: f"rank {stacks.rank} ({host}, local_rank {stacks.local_rank})"
        for host, stacks in members
    }
    _, first = members[0]
    if not first.threads:
        doing = f"answer: {first.silence}"
        return StackGroup(labels=labels, verb="doesn't", doing=doing, place="")
    frames = first.threads[0].frames
    verb, doing, in_collective = _doing(frames)
    return StackGroup(
        labels=labels,
        verb=verb,
        doing=doing,
        place=_place(frames),
        in_collective=in_collective,
        threads=first.threads,
    )


def _doing(frames: Sequence[Frame]) -> tuple[str, str, bool]:
    """Return what a main thread does, as a verb and other words, and whether it is in a collective
    call.
    """
    last = -1  # the innermost frame of the user's own code
    for index, frame in enumerate(frames):
        if frame.mine:
            last = index
    called = frames[last + 1 :]
    call = _collective(called)
    if call:
        return "waits", f"in {call}", True
    for frame in called:
        for start, words in _WAITS:
            if frame.file.startswith(start):
                return "waits", words.format(frame.function), False
    if not frames:
        return "runs", "no Python code", False
    if called and last >= 0:
        innermost = called[-1]
        return "is", f"in {innermost.function} of {innermost.file}, called", False
    name = frames[-1].function
    return "is", "" if name == "<module>" else f"in {name}", False


def _collective(called: Sequence[Frame]) -> str:
    """Return the outermost well-named collective call among these frames, "" if there is none."""
    found = [
        frame
        for frame in called
        if frame.file.startswith(_COLLECTIVES) and frame.function not in _WRAPPERS
    ]
    if not found:
        return ""
    outermost = found[0].file
    if outermost == "torch/nn/parallel/distributed.py":
        return "DistributedDataParallel"
    for frame in found:
        if not frame.function.startswith("_"):
            return frame.function
    return outermost.rpartition("/")[2].removesuffix(".py")


def _place(frames: Sequence[Frame]) -> str:
    """Return the place in the user's code; if the stack has none, the innermost place."""
    if not frames:
        return ""
    mine = [frame for frame in frames if frame.mine] or frames
    return f"at {mine[-1].file}, line {mine[-1].line}"

"""Where the ranks of a run are that hangs: ranks with equal stacks form a group, the unusual groups
come first.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmagic.failures.calls import Parting, Side, parting
from distmagic.payload.sizes import plural
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.clipping import ranges
from distmagic.remote.wire.protocol import Frame, Stacks, Thread
from distmagic.state.model import RunState, StackDump

SHOWN_GROUPS = 8  # groups whose stacks are shown
_LIST_AT_MOST = 12  # ranks that are listed one by one; longer lists become ranges

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
_STORE = "torch/distributed/rendezvous.py"
_JOINS = ("torch/multiprocessing/spawn.py", "multiprocessing/process.py")
# Wrappers of torch around each collective.
_WRAPPERS = ("wrapper", "inner", "decorator")


@frozen
class StackGroup:
    """Ranks at the same place."""

    ranks: tuple[int, ...]
    labels: tuple[str, ...]  # their names
    # what they do, for one rank and for several: ("waits in all_reduce", "wait in all_reduce")
    doing: tuple[str, str]
    place: str  # where they are
    in_collective: bool = False
    waits: bool = False  # its stack shows that it waits, such as for its DataLoader
    awaits: str = ""  # the collective call that only the record of its calls shows
    threads: tuple[Thread, ...] = ()  # () if the ranks don't answer


@frozen
class Explanation:
    """Where all ranks are."""

    groups: tuple[StackGroup, ...]  # the unusual groups come first
    unanswered: tuple[str, ...] = ()  # the hosts that did not answer
    # the collective call at which ranks diverge, if their recorded calls show one
    parting: Parting | None = None

    @property
    def sentence(self) -> str:
        """One sentence: `rank 2 (gpu-b, local_rank 0) is in load_batch at ...; ranks 0, 1, 3 wait
        in all_reduce at ...`.

        If ranks made different calls: `rank 1 (...) calls broadcast [4] at ... where ranks 0, 2
        call all_reduce [4] at ...`.
        """
        world = None
        if not self.unanswered:
            world = sum(len(group.ranks) for group in self.groups)
        if self.parting is not None and self.parting.kind == "different":
            parts = [self._different_calls(self.parting)]
        else:
            parts = _sentences(self.groups, world)
        parts += [
            f"{host} did not report where its ranks are" for host in self.unanswered
        ]
        return "; ".join(parts)

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that all others wait for; none if neither calls nor stacks show it."""
        if self.parting is not None and self.parting.missing:
            return frozenset(self.parting.missing)
        first, *others = self.groups or (None,)
        others_wait = bool(others) and all(group.in_collective for group in others)
        if first is None or self.unanswered or first.in_collective or not others_wait:
            return frozenset()
        return frozenset(first.ranks)

    @property
    def standing_out(self) -> Mapping[int, str]:
        """The ranks to look at first, each with a reason."""
        if self.parting is None or self.parting.kind != "different":
            return dict.fromkeys(self.awaited, "the others wait for it")
        most, *others = self.parting.sides
        found = {}
        for side in others:
            if len(side.ranks) < len(most.ranks):
                found.update(dict.fromkeys(side.ranks, "makes another call"))
        return found

    @property
    def advice(self) -> str:
        """What the user should check first; "" if the stacks don't show it."""
        if not self.groups or self.unanswered:
            return ""
        first, *others = self.groups
        if all(_is_in(group, _STORE) for group in self.groups):
            return (
                "They reach no store at MASTER_ADDR and MASTER_PORT. Leave both as torchrun has set them, and let "
                "init_process_group take rank and world_size from RANK and WORLD_SIZE."
            )
        if all(_is_in(group, *_JOINS) for group in self.groups):
            return (
                "They wait for processes that the program has started itself, as by mp.spawn. torchrun has started all "
                "ranks already, and process groups of other processes don't come about. Have each rank call the function "
                'itself, instead of mp.spawn: train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).'
            )
        are_together = all(group.in_collective for group in self.groups)
        if self.parting is not None and (
            are_together or self.parting.kind != "together"
        ):
            return self._advice_by_calls(self.parting)
        if self.awaited:
            them = "it" if len(first.ranks) == 1 else "them"
            return f"Look at {_names(first, None)} first: the others wait for {them}."
        if not are_together:
            return ""
        if others:
            return "They wait in different calls: every rank has to make the same collective calls, in the same order."
        return (
            "All wait in the same call, so its data does not arrive. Look at the network between the hosts (%distributed doctor), and whether "
            "all ranks make this call equally often, with the same shapes."
        )

    def _different_calls(self, parted: Parting) -> str:
        most, *others = parted.sides
        parts = ", ".join(self._side(side) for side in others)
        return (
            f"{parts} where {self._side(most)} (call {parted.number} of {parted.group})"
        )

    def _side(self, side: Side) -> str:
        """Return `rank 1 (gpu-b, local_rank 0) calls broadcast [4] at Cell In[3], line 18`."""
        is_one = len(side.ranks) == 1
        verb = ("calls" if is_one else "call") if side.waiting else "called"
        words = [self._who(side.ranks), verb, side.call]
        place = side.place(side.ranks)
        if place:
            return " ".join([*words, f"at {place}"])
        for group in self.groups:
            # A rank that has left this call is somewhere else.
            if side.waiting and group.in_collective and side.ranks[0] in group.ranks:
                words.append(group.place)
        return " ".join(words)

    def _who(self, ranks: Sequence[int]) -> str:
        if len(ranks) > 1:
            return f"ranks {listed(ranks)}"
        for group in self.groups:
            if ranks[0] in group.ranks:
                return group.labels[group.ranks.index(ranks[0])]
        return f"rank {ranks[0]}"

    def _advice_by_calls(self, parted: Parting) -> str:
        if parted.kind == "different":
            return "Every rank has to make the same collective calls, with the same sizes, in the same order."
        side = parted.sides[0]
        call = f"call {parted.number} of {parted.group}, {side.call}"
        if parted.kind == "together":
            return f"Each rank waits in {call}, so its data does not arrive. Look at the network between the hosts: %distributed doctor."
        if all(parted.missing[0] not in group.ranks for group in self.groups):
            return f"{self._who(parted.missing).capitalize()} ended without {call}, in which the others wait."
        them = "it" if len(parted.missing) == 1 else "them"
        return f"Look at {self._who(parted.missing)} first: the others wait for {them} in {call}."


def _is_in(group: StackGroup, *files: str) -> bool:
    """Whether the ranks of a group are inside a function of one of these files."""
    frames = group.threads[0].frames if group.threads else ()
    return any(frame.file in files for frame in frames)


def dump_of(state: RunState, request_id: str) -> StackDump | None:
    """Return the answers to a request; None if there are none yet."""
    for dump in state.stack_dumps:
        if dump.request_id == request_id:
            return dump
    return None


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
    if not state.stack_dumps or state.stack_dumps[-1].at_s < state.advanced_at_s:
        return None
    found = explain_dump(state, state.stack_dumps[-1])
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
    is_known = group.in_collective or not group.threads or group.waits
    if is_known or parted is None or parted.kind != "behind":
        return group
    side = parted.sides[0]
    if not set(side.waiting).issuperset(group.ranks):
        return group
    place = side.place(group.ranks)
    called = f"{side.call}, called at {place}" if place else side.call
    return replace(group, awaits=called, in_collective=True)


def _sentences(groups: Sequence[StackGroup], world: int | None) -> list[str]:
    """Return a sentence for each group, and one for all groups that await the same call."""
    found = [sentence_of(group, world) for group in groups if not group.awaits]
    for called in dict.fromkeys(group.awaits for group in groups if group.awaits):
        same = [group for group in groups if group.awaits == called]
        labels = {
            rank: label
            for group in same
            for rank, label in zip(group.ranks, group.labels, strict=True)
        }
        is_one = len(labels) == 1
        verb = "waits" if is_one else "wait"
        place = f", and {'is' if is_one else 'are'} {same[0].place}"
        ranks = tuple(sorted(labels))
        merged = replace(
            same[0],
            ranks=ranks,
            labels=tuple(labels[rank] for rank in ranks),
            doing=(f"{verb} for {called}", f"{verb} for {called}"),
            place="",
        )
        has_one_place = len(same) == 1 and not called.endswith(same[0].place)
        found.append(sentence_of(merged, world) + (place if has_one_place else ""))
    return found


def sentence_of(group: StackGroup, world: int | None) -> str:
    """Return `ranks 0, 1, 3 wait in all_reduce at Cell In[3], line 14`.

    `world` is the number of ranks, if known.
    """
    one, several = group.doing
    doing = one if len(group.ranks) == 1 else several
    parts = (_names(group, world), doing, group.place)
    return " ".join(part for part in parts if part)


def _names(group: StackGroup, world: int | None) -> str:
    if len(group.ranks) == 1:
        return group.labels[0]
    if len(group.ranks) == world:
        return "both ranks" if world == 2 else f"all {world} ranks"
    return f"ranks {listed(group.ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """Return `0, 1, 3`; for many ranks `0-6, 8-15`."""
    if len(ranks) <= _LIST_AT_MOST:
        return ", ".join(map(str, ranks))
    words = ranges(ranks)
    if len(words) > _LIST_AT_MOST:
        words[_LIST_AT_MOST:] = ["..."]
    return ", ".join(words)


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
    ranks = tuple(stacks.rank for _, stacks in members)
    labels = [
        f"rank {stacks.rank} ({host}, local_rank {stacks.local_rank})"
        for host, stacks in members
    ]
    _, first = members[0]
    frames = first.threads[0].frames if first.threads else ()
    doing, in_collective = _doing(frames)
    waits = doing[0].startswith("waits")
    if not first.threads:
        why = first.silence
        doing = (f"doesn't answer: {why}", f"don't answer: {why}")
    return StackGroup(
        ranks=ranks,
        labels=tuple(labels),
        doing=doing,
        place=_place(frames),
        in_collective=in_collective,
        waits=waits,
        threads=first.threads,
    )


def _doing(frames: Sequence[Frame]) -> tuple[tuple[str, str], bool]:
    """Return what a main thread does, worded for one rank and for several, and whether it is in a
    collective call.
    """
    last = -1  # the innermost frame of the user's own code
    for index, frame in enumerate(frames):
        if frame.mine:
            last = index
    called = frames[last + 1 :]
    call = _collective(called)
    if call:
        return (f"waits in {call}", f"wait in {call}"), True
    for frame in called:
        for start, words in _WAITS:
            if frame.file.startswith(start):
                what = words.format(frame.function)
                return (f"waits {what}", f"wait {what}"), False
    if not frames:
        return ("runs no Python code", "run no Python code"), False
    if called and last >= 0:
        innermost = called[-1]
        where = f" in {innermost.function} of {innermost.file}, called"
    else:
        name = frames[-1].function
        where = "" if name == "<module>" else f" in {name}"
    return (f"is{where}", f"are{where}"), False


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


# ---- stacks


def stacks_text(explanation: Explanation) -> str:
    """Return the stacks in the style of a traceback, innermost frames last, each below its
    ranks.
    """
    parts = []
    for group in explanation.groups[:SHOWN_GROUPS]:
        head = sentence_of(group, None)
        if group.threads:
            head += ":"
        parts.append("\n".join([head, *stack_lines(group)]))
    more = len(explanation.groups) - SHOWN_GROUPS
    if more > 0:
        parts.append(f"ranks are at {plural(more, 'more place')}")
    return "\n\n".join(parts)


def stack_lines(group: StackGroup) -> list[str]:
    """Return the stack of one group: the main thread, and other threads that run the user's
    code.
    """
    lines: list[str] = []
    for index, thread in enumerate(group.threads):
        if index:
            lines.append("  another thread:")
        for frame in thread.frames:
            lines.append(f"  {frame.file}, line {frame.line}, in {frame.function}")
            if frame.text:
                lines.append(f"    {frame.text}")
    return lines

"""Describes where the ranks of a run that hangs are: groups of ranks, sentences, advice, stacks.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmagic.failures.calls import Parting, Side
from distmagic.payload.sizes import plural
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.clipping import ranges
from distmagic.remote.wire.protocol import Thread

SHOWN_GROUPS = 8  # groups whose stacks are shown
_LIST_AT_MOST = 12  # ranks that are listed one by one; longer lists become ranges
_STORE = "torch/distributed/rendezvous.py"
_JOINS = ("torch/multiprocessing/spawn.py", "multiprocessing/process.py")
# The verbs of `StackGroup`, for one rank and for several.
_SEVERAL = {"waits": "wait", "is": "are", "runs": "run", "doesn't": "don't"}


@frozen
class StackGroup:
    """Ranks at the same place."""

    labels: Mapping[int, str]  # their names, by rank
    # what one of them does: "waits" "in all_reduce"
    verb: str
    doing: str
    place: str  # where they are
    in_collective: bool = False
    awaits: str = ""  # the collective call that only the record of its calls shows
    threads: tuple[Thread, ...] = ()  # () if the ranks don't answer

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks."""
        return tuple(self.labels)


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
            if ranks[0] in group.labels:
                return group.labels[ranks[0]]
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


def _sentences(groups: Sequence[StackGroup], world: int | None) -> list[str]:
    """Return a sentence for each group, and one for all groups that await the same call."""
    found = [sentence_of(group, world) for group in groups if not group.awaits]
    for called in dict.fromkeys(group.awaits for group in groups if group.awaits):
        same = [group for group in groups if group.awaits == called]
        labels: dict[int, str] = {}
        for group in same:
            labels.update(group.labels)
        merged = replace(
            same[0],
            labels=dict(sorted(labels.items())),
            verb="waits",
            doing=f"for {called}",
            place="",
        )
        words = sentence_of(merged, world)
        if len(same) == 1 and not called.endswith(same[0].place):
            words += f", and {_verb(merged, 'is')} {same[0].place}"
        found.append(words)
    return found


def sentence_of(group: StackGroup, world: int | None) -> str:
    """Return `ranks 0, 1, 3 wait in all_reduce at Cell In[3], line 14`.

    `world` is the number of ranks, if known.
    """
    verb = _verb(group, group.verb)
    parts = (_names(group, world), verb, group.doing, group.place)
    return " ".join(part for part in parts if part)


def _verb(group: StackGroup, verb: str) -> str:
    return verb if len(group.labels) == 1 else _SEVERAL[verb]


def _names(group: StackGroup, world: int | None) -> str:
    if len(group.labels) == 1:
        return next(iter(group.labels.values()))
    if len(group.labels) == world:
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
    lines = []
    for index, thread in enumerate(group.threads):
        if index:
            lines.append("  another thread:")
        for frame in thread.frames:
            lines.append(f"  {frame.file}, line {frame.line}, in {frame.function}")
            if frame.text:
                lines.append(f"    {frame.text}")
    return lines

"""Whether the process groups of ranks that stay are of use for the next cell, by what each rank reports of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.remote.wire import protocol


def notice(ends: Mapping[int, protocol.CellEnded]) -> str:
    """Return why the groups are made anew before the next cell, and what holds the old ones; "" where all are in step.

    `ends` has of each rank of the session how its last cell ended.
    """
    why = _why(ends)
    if not why:
        return ""
    text = f"{why} Before the next cell the group is created again for all ranks."
    held = sorted({name for end in ends.values() for name in end.holders})
    if held:
        hold, them = ("holds", "it") if len(held) == 1 else ("hold", "them")
        text += f" {', '.join(held)} {hold} the old one: make {them} again."
    return text


def outdated(ends: Mapping[int, protocol.CellEnded]) -> str:
    """Return what holds a process group that is no more, where a rank has failed; "" for nothing."""
    held = sorted({name for end in ends.values() for name in end.outdated})
    if not held:
        return ""
    hold, them = ("holds", "it") if len(held) == 1 else ("hold", "them")
    return (
        f"{', '.join(held)} {hold} a process group that has ended: make {them} again."
    )


def _why(ends: Mapping[int, protocol.CellEnded]) -> str:
    if any(end.is_broken for end in ends.values()):
        return "A process group was broken, so that its ranks need not wait."
    by_name: dict[str, dict[int, protocol.GroupCalls]] = {}
    for rank in sorted(ends):
        for group in ends[rank].groups:
            by_name.setdefault(group.name, {})[rank] = group
    for members in by_name.values():
        first, *_ = members.values()
        if len(members) < min(first.size, len(ends)):
            return "Some ranks have ended a process group that others still have."
        most = max(one.calls for one in members.values())
        fewest = min(one.calls for one in members.values())
        if most > fewest:
            ahead = [rank for rank, one in members.items() if one.calls == most]
            word = "Rank" if len(ahead) == 1 else "Ranks"
            has = "has" if len(ahead) == 1 else "have"
            calls = "one call" if most - fewest == 1 else f"{most - fewest} calls"
            last = members[ahead[0]].last
            name = f" ({last})" if last else ""
            ranks = ", ".join(map(str, ahead[:8]))
            return f"{word} {ranks} {has} made {calls} more than others in a process group{name}."
    return ""

"""Whether the process groups of ranks that stay are of use for the next cell, by what each rank reports of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges


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
        text += f" Make what holds the old one again: {', '.join(held)}."
    return text


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
            return "Some ranks destroyed a process group that others still have."
        most = max(one.calls for one in members.values())
        ahead = [rank for rank, one in members.items() if one.calls == most]
        if len(ahead) < len(members):
            last = members[ahead[0]].last
            name = f" (last call: {last})" if last else ""
            ranks = ",".join(ranges(ahead))
            return f"Some ranks have made more calls in a process group than others: {ranks}{name}."
    return ""

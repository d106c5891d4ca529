"""Whether the next cell can use the process groups of ranks that stay, by what each rank reports
about them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from distmagic.remote.wire import protocol
from distmagic.remote.wire.clipping import ranges


def notice(ends: Mapping[int, protocol.CellEnded]) -> str:
    """Return why the process groups are made again before the next cell, and which variables hold
    the old ones; "" if they are fine.

    `ends` has for each rank of the session the message with which its last cell ended.
    """
    why = _why(ends)
    if not why:
        return ""
    text = f"{why} Before the next cell the group is created again for all ranks."
    held = sorted({name for end in ends.values() for name in end.holders})
    if held:
        text += f" Create again what uses the old group: {', '.join(held)}."
    return text


def _why(ends: Mapping[int, protocol.CellEnded]) -> str:
    if any(end.is_broken for end in ends.values()):
        return "A process group was aborted, to free ranks that waited in it."
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
            noun = "rank" if len(ahead) == 1 else "ranks"
            ranks = ",".join(ranges(ahead))
            return f"Some ranks have made more calls in a process group than others: {noun} {ranks}{name}."
    return ""

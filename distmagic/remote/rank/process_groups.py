"""Notes whether this rank was in a process group, and used it: ranks that were in none have each worked alone.

A process group counts its operations: gloo all of them, NCCL its collectives. That count is gone with the group. So the
functions of torch that end groups are replaced by ones that look at the groups first; those that are left at the end of
the rank are looked at then. torch is not imported for that: until the user's code does, nothing is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from distmagic.remote.rank import import_hooks
from distmagic.remote.wire.vocabulary import GroupUse

_C10D = "torch.distributed.distributed_c10d"
_ENDING = ("destroy_process_group", "_abort_process_group")


class _Notes:
    """What is known so far."""

    use: GroupUse = "none"


_notes = _Notes()


def install() -> None:
    """Begin to take notes in this process."""
    import_hooks.when_imported(_C10D, _patch)


def use() -> GroupUse:
    """Return what became of this rank's process groups: whether there was one, and whether it was used."""
    _look(sys.modules.get(_C10D))
    return _notes.use


def _patch(c10d: ModuleType) -> None:
    # It has the functions under the same names.
    package = sys.modules.get("torch.distributed")
    for name in _ENDING:
        original = getattr(c10d, name, None)
        if original is None:
            continue
        ending = _looking_first(original, c10d)
        for module in (c10d, package):
            if getattr(module, name, None) is original:
                setattr(module, name, ending)


def _looking_first(
    original: Callable[..., Any], c10d: ModuleType
) -> Callable[..., Any]:
    @functools.wraps(original)
    def ending(*args: Any, **kwargs: Any) -> Any:
        _look(c10d)
        return original(*args, **kwargs)

    return ending


def _look(c10d: Any) -> None:
    """Take a note of the process groups that there are now."""
    if c10d is None or _notes.use == "used":
        return
    try:
        groups = list(c10d._world.pg_map)  # noqa: SLF001
        if groups:
            _notes.use = "used" if any(map(_has_been_used, groups)) else "unused"
    except Exception:  # noqa: BLE001 - of a torch that keeps its groups elsewhere nothing is known
        _notes.use = "used"


def _has_been_used(group: Any) -> bool:
    """Whether a group of several ranks has done anything. Raises RuntimeError for a backend that does not count."""
    if group.size() < 2:
        return False
    counts = []
    for device in group._device_types:  # noqa: SLF001
        counts.append(group._get_backend(device)._get_sequence_number_for_group())  # noqa: SLF001
    return any(counts)

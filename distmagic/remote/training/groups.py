"""Notes whether this rank was in a process group, and used it; keeps a group while a model may use it; has ranks meet.

Ranks that were in no group have each worked alone. A process group counts its operations: gloo all of them, NCCL its
collectives. That count is gone with the group. So the functions of torch that end groups are replaced by ones that look
at the groups first; those that are left at the end of the rank are looked at then. torch is not imported for that: until
the user's code does, nothing is replaced.

A group of gloo that a model under DistributedDataParallel holds is kept when it is ended, until the model is gone. Else
the model is the last to hold it. When the function returns, the model then waits for gloo's threads and does not release
the interpreter, for which such a thread may wait, to let go of its last tensor. Seen with torch 2.13 on busy machines, in
up to 1 of 10 pairs of ranks. Where a Python object is the last to hold a group, torch releases the interpreter first.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from distmagic.remote.training import import_hooks
from distmagic.remote.wire.vocabulary import GroupUse

_C10D = "torch.distributed.distributed_c10d"
_ENDING = ("destroy_process_group", "_abort_process_group")
_PARALLEL = "torch.nn.parallel.distributed"


class _Notes:
    """What is known so far, the groups that are kept, and torchrun's variables; none of these in a forked child."""

    use: GroupUse = "none"
    given: Mapping[str, str] = {}
    kept: tuple[Any, ...] = ()
    watches_forks = False


_notes = _Notes()


def install() -> None:
    """Begin to take notes in this process, whose variables are still those of torchrun."""
    _notes.given = dict(os.environ)
    import_hooks.when_imported(_C10D, _patch)
    if not _notes.watches_forks:
        _notes.watches_forks = True
        os.register_at_fork(after_in_child=_leave_to_parent)


def use() -> GroupUse:
    """Return what became of this rank's process groups: whether there was one, and whether it was used."""
    _look(sys.modules.get(_C10D))
    return _notes.use


def let_go() -> None:
    """Let go of the groups that were kept for models which are gone by now."""
    _notes.kept = _with_a_model(_notes.kept)


def _patch(c10d: Any) -> None:
    # It has the functions under the same names.
    if hasattr(c10d, "rendezvous"):
        c10d.rendezvous = _at_the_runs_store(c10d.rendezvous)
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
        _keep(c10d)
        return original(*args, **kwargs)

    return ending


def _at_the_runs_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `rendezvous`, which goes to the store of the run where another one is named for all its ranks."""

    @functools.wraps(original)
    def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **more: Any) -> Any:
        given, now = _notes.given, os.environ
        place = [given.get("MASTER_ADDR"), given.get("MASTER_PORT")]
        parts = urlsplit(str(url))
        asked = (
            [*parts.netloc.rsplit(":", 1)]
            if parts.scheme == "tcp"
            else [now.get("MASTER_ADDR"), now.get("MASTER_PORT")]
        )
        is_of_all_ranks = [
            now.get("RANK") if rank == -1 else str(rank),
            now.get("WORLD_SIZE") if world_size == -1 else str(world_size),
        ] == [given.get("RANK"), given.get("WORLD_SIZE")]
        uses_store = now.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        has_own_ranks = parts.scheme not in ("env", "tcp") or "rank=" in parts.query
        if has_own_ranks or asked == place or not is_of_all_ranks or not uses_store:
            return original(url, rank, world_size, **more)
        if given["RANK"] == "0":
            sys.stderr.write(
                f"distmagic: the program names {':'.join(map(str, asked))} for its process group. Under torchrun no rank "
                f"listens there. The ranks meet at {':'.join(map(str, place))}, as torchrun has set MASTER_ADDR and "
                "MASTER_PORT: leave both as they are.\n"
            )
        now.update(MASTER_ADDR=given["MASTER_ADDR"], MASTER_PORT=given["MASTER_PORT"])
        return original("env://", rank, world_size, **more)

    return rendezvous


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


def _keep(c10d: Any) -> None:
    """Keep the groups of gloo that models hold; let go of those whose models are gone."""
    try:
        groups = list(c10d._world.pg_map)  # noqa: SLF001
    except AttributeError:  # a torch that keeps its groups elsewhere
        return
    new = [one for one in groups if one not in _notes.kept and _is_gloo(one)]
    _notes.kept = _with_a_model((*_notes.kept, *new))


def _is_gloo(group: Any) -> bool:
    try:
        devices = group._device_types  # noqa: SLF001
        return any(group._get_backend(device).name() == "gloo" for device in devices)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a backend that can't be asked is another one
        return False


def _with_a_model(groups: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those groups that models under DistributedDataParallel hold, each beside its reducer."""
    if not groups:
        return ()
    model = getattr(sys.modules.get(_PARALLEL), "DistributedDataParallel", ())
    held = []
    for holder in gc.get_referrers(*groups):
        # Before Python 3.13 it is the dict of the model's variables that holds them, later the model itself.
        variables = vars(holder) if issubclass(type(holder), model) else holder
        if type(variables) is dict and "reducer" in variables:
            held.append(variables.get("process_group"))
    return tuple(group for group in groups if any(group is one for one in held))


def _leave_to_parent() -> None:
    """Never let go of the groups in a forked child: that would wait for threads which only the parent has."""
    _notes.given = {}  # the child is no rank
    if not _notes.kept:
        return
    import ctypes  # as torch has done

    for group in _notes.kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _notes.kept = ()


def _has_been_used(group: Any) -> bool:
    """Whether a group of several ranks has done anything. Raises RuntimeError for a backend that does not count."""
    if group.size() < 2:
        return False
    counts = []
    for device in group._device_types:  # noqa: SLF001
        counts.append(group._get_backend(device)._get_sequence_number_for_group())  # noqa: SLF001
    return any(counts)

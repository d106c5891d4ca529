"""Records the process groups of this rank: how they were made, and whether they were used; breaks
them and makes them again.

If a rank was in no group, it worked alone. A process group counts its operations: gloo all of them,
NCCL its collectives. That count is lost with the group. So torch's functions that end groups are
wrapped to read the counts first; remaining groups are read at the end of the rank. This does not
import torch: nothing is replaced before the user's code has imported it.

A gloo group that a model under DistributedDataParallel holds is kept alive after its end, until the
model is gone. Otherwise the model has the last reference. When the function returns, the model then
waits for gloo's threads without releasing the GIL. Such a thread may wait for the GIL to free its
last tensor. This deadlock was seen with torch 2.13 on busy machines, in up to 1 of 10 pairs of
ranks. If a Python object has the last reference, torch releases the GIL first.

A second `init_process_group` of a job would find the old addresses of ranks under the same keys of
the same store. gloo would connect to ranks that are gone. So every one except the first uses its
own key prefix in that store: `again/1`. On ranks that stay, the prefix has the number of the cell.
A rank whose cell ended before its `init_process_group` thus still uses the same prefixes as the
others.

Breaking a group ends a call that waits for other ranks. gloo's connections, which are the sockets
that appear while a group is made, are shut down. NCCL's communicators are aborted, all together.
Afterwards no group is usable, and all are made again. While a group is being made, ranks wait for
each other at the store: then that connection is shut down.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from distmagic.remote.training import (
    group_sockets,
    import_hooks,
    run_store,
    torch_groups,
)
from distmagic.remote.wire.parts import GroupCalls
from distmagic.remote.wire.vocabulary import GroupUse

_C10D = "torch.distributed.distributed_c10d"
_MESH = "torch.distributed.device_mesh"
_MAKING = "_new_process_group_helper"
_ENDING = ("destroy_process_group", "_abort_process_group")
_UNMATCHED = ("isend", "irecv", "monitored_barrier")
# Calls that wait for other ranks, and that gloo's recorder leaves out.
_UNRECORDED = ("send", "recv", "monitored_barrier")
# Modules of the classes whose objects hold groups.
_HOLDERS = (
    (_C10D, "ProcessGroup"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    (_MESH, "DeviceMesh"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)


class _Notes:
    """What is recorded so far, the groups that are kept, and torchrun's variables; empty in a
    forked child.
    """

    use: GroupUse = "none"
    given: dict[str, str] = {}  # noqa: RUF012 - a new one for each rank
    kept: tuple[Any, ...] = ()
    begins: Callable[[ModuleType], None] | None = None
    ends: Callable[[], None] = staticmethod(lambda: None)
    cell = 0  # the number of the cell, if this rank stays
    inits = 0  # calls of `init_process_group`: in this cell, or in total
    # Arguments of the last call.
    request: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    sockets: Mapping[int, str] = {}  # sockets of groups
    store_sockets: Mapping[int, str] = {}  # connections to the store of the groups
    # Sockets before a group is made.
    making: tuple[group_sockets.Sockets, int] | None = None
    members: Iterable[int] = ()  # ranks of the group that is being made
    is_broken = False
    # Calls of a group that other ranks don't make.
    unmatched: Counter[str] = Counter()  # noqa: RUF012 - there is one object
    # The unrecorded call that the main thread makes now, and its arguments.
    unrecorded: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None


_notes = _Notes()


def install(
    begins: Callable[[ModuleType], None] | None = None,
    ends: Callable[[], None] = lambda: None,
) -> None:
    """Start to record the process groups of this rank.

    Call it while `os.environ` still has torchrun's variables. `begins` is called once, before the
    first `init_process_group`, with torch's module `distributed_c10d`. `ends` is called each time
    before groups are destroyed or aborted.
    """
    _notes.given = dict(os.environ)
    _notes.begins, _notes.ends = begins, ends
    import_hooks.when_imported(_C10D, _patch)
    os.register_at_fork(after_in_child=_leave_to_parent)


def use() -> GroupUse:
    """Return this rank's use of process groups: whether there was one, and whether it was used."""
    _look(sys.modules.get(_C10D))
    return _notes.use


def let_go() -> None:
    """Release the groups that were kept for models which are gone by now."""
    _notes.kept = torch_groups.held_by_models(_notes.kept)


def begin_cell(number: int) -> None:
    """Record that this rank starts the cell `number`, and count its calls of `init_process_group`
    from 0 again.

    Both numbers are in the key prefix of a group. So all ranks must pass the same number, and make
    the same calls.
    """
    # Reading torch's records of each call would slow cells down. torch reads this at its first
    # call.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
    _notes.cell = number
    _notes.inits = 0
    _notes.unrecorded = None


def calls() -> tuple[GroupCalls, ...]:
    """Return the number of this rank's calls in each of its groups, and the name of its last
    collective call.

    Calls that only some ranks of a group make (`_UNMATCHED`) do not count.
    """
    c10d: Any = sys.modules.get(_C10D)
    last = torch_groups.last_calls() if c10d else {}
    found = []
    for group, name in getattr(getattr(c10d, "_world", None), "pg_names", {}).items():
        try:
            made = torch_groups.number_of_calls(group) - _notes.unmatched[name]
        except Exception:  # noqa: BLE001, S112 - a backend that does not count
            continue
        size = group.size()
        found.append(
            GroupCalls(name=name, size=size, calls=made, last=last.get(name, ""))
        )
    return tuple(found)


def is_broken() -> bool:
    """Whether this rank's groups were broken, and not made again since."""
    return _notes.is_broken


def members_of_new() -> Iterable[int]:
    """Return the ranks of the process group that this rank is making, with which it waits for the
    others; () for none.
    """
    return _notes.members


def unrecorded_call() -> tuple[str, int, list[int]] | None:
    """Return the `send`, `recv` or `monitored_barrier` that the main thread makes, how many bytes
    its connections have moved, and the ranks for which it waits; none for a `recv` from any rank.
    """
    call = _notes.unrecorded
    if call is None:
        return None
    original, args, kwargs = call
    c10d: Any = sys.modules[_C10D]
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    numbers = c10d._world.pg_group_ranks[given.get("group") or c10d.group.WORLD]  # noqa: SLF001
    name = original.__name__
    if name == "monitored_barrier":
        members = list(numbers)
    else:
        one = given.get("dst", given.get("src"))
        number = given.get("group_dst", given.get("group_src"))
        members = [rank for rank, of in numbers.items() if rank == one or of == number]
    return name, group_sockets.moved_bytes(_notes.sockets), members


def is_of_all(size: int) -> bool:
    """Whether a group of this size has all ranks of the run."""
    return str(size) == _notes.given.get("WORLD_SIZE")


def break_all() -> None:
    """Break all groups, so that a call in which this rank waits for others fails.

    Called on a separate thread.
    """
    making = _notes.making
    c10d: Any = sys.modules.get(_C10D)
    if making is not None:
        before, store_port = making
        waiting = {**_notes.store_sockets, **_new_since(before)}
        group_sockets.shut(waiting, store_port)
    if c10d is not None and c10d.is_initialized():
        _notes.is_broken = True
        group_sockets.shut(_notes.sockets)
        # Abort all communicators of NCCL in one call: one after the other could wait for each
        # other.
        nccl = getattr(c10d, "ProcessGroupNCCL", None)
        backends: list[Any] = []
        for group in list(c10d._world.pg_map):  # noqa: SLF001
            backends += [
                one
                for one in torch_groups.backends(group)
                if nccl and isinstance(one, nccl)
            ]
        if backends:
            backends[0]._group_start()  # noqa: SLF001
            for backend in backends:
                backend.abort()
            backends[0]._group_end()  # noqa: SLF001


def make_anew() -> None:
    """Make the default group again, with the arguments of the last `init_process_group`.

    All other groups are gone. All ranks call this at the same time, in one cell. Without an earlier
    group it does nothing.
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None or _notes.request is None:
        return
    if c10d.is_initialized():
        # Otherwise a call that only some ranks have begun makes them wait here forever.
        break_all()
        c10d.destroy_process_group()
    args, kwargs = _notes.request
    c10d.init_process_group(*args, **kwargs)


def holders(names: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names whose values hold groups, with their classes, such as `model
    (DistributedDataParallel)`.
    """
    kinds = []
    for module, kind in _HOLDERS:
        found = getattr(sys.modules.get(module), kind, None)
        kinds += [found] if isinstance(found, type) else []
    return tuple(
        f"{name} ({type(value).__name__})"
        for name, value in names.items()
        if not name.startswith("_") and issubclass(type(value), tuple(kinds))
    )


def _patch(c10d: Any) -> None:
    meet = partial(run_store.rendezvous, _notes.given, _next_prefix)
    users = (sys.modules.get("torch.distributed"), sys.modules.get(_MESH))
    # Only there: in ranks that start cold, torch.distributed copies the function after this.
    import_hooks.wrap(c10d, "rendezvous", meet)
    replacements: dict[str, Callable[..., Any]] = {
        _MAKING: _make_group,
        **dict.fromkeys(_ENDING, _end),
        **dict.fromkeys(_UNMATCHED, _call_alone),
        "init_process_group": _init_process_group,
    }
    for name, ours in replacements.items():
        import_hooks.wrap(c10d, name, ours, *users)
    for name in _UNRECORDED:
        import_hooks.wrap(c10d, name, _call_unrecorded, *users)


# ---- replacements: each is called with torch's own function, followed by that function's arguments


def _end(original: Any, *args: Any, **kwargs: Any) -> Any:
    c10d = sys.modules[_C10D]
    _look(c10d)
    _keep(c10d)
    _notes.ends()
    return original(*args, **kwargs)


def _init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the arguments of the group. In a later cell it may be made again."""
    c10d: Any = sys.modules[_C10D]
    if _notes.begins is not None:
        begins, _notes.begins = _notes.begins, None
        begins(c10d)
    if _notes.cell and c10d.is_initialized():
        before = _notes.request or ((), {})
        if not _notes.is_broken and _backend(args, kwargs) == _backend(*before):
            if _notes.given.get("RANK") == "0":
                sys.stderr.write(
                    "distmagic: the process group of an earlier cell stays: it is sound, and has this backend.\n"
                )
            return None
        if _notes.is_broken:
            c10d.destroy_process_group()
    if not c10d.is_initialized():
        # A failed call has used a prefix, and ranks that did not make it have not.
        c10d._world.group_count = 0  # noqa: SLF001
    _notes.request = args, dict(kwargs)
    sockets = group_sockets.current()
    _notes.making = sockets, _port(kwargs.get("store"), kwargs.get("init_method"))
    try:
        if _notes.cell and kwargs.get("store") is not None:
            kwargs["store"] = c10d.PrefixStore(_next_prefix(), kwargs["store"])
        made = original(*args, **kwargs)
    finally:
        _notes.making = None
        new = _new_since(sockets).items()
        own = _notes.sockets
        _notes.store_sockets = {fd: on for fd, on in new if own.get(fd) != on}
    _notes.is_broken = False
    _notes.unmatched.clear()
    return made


def _make_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make any group. The connections that appear meanwhile belong to the group."""
    outer = _notes.making
    before = group_sockets.current()
    store = next((one for one in args if hasattr(one, "set_timeout")), None)
    if outer is None:
        _notes.making = before, _port(store, None)
    size, _, members, *_ = args
    _notes.members = members or (range(size) if is_of_all(size) else ())
    try:
        made = original(*args, **kwargs)
    finally:
        _notes.making, _notes.members = outer, ()
    if torch_groups.is_gloo(made[0]):
        now = group_sockets.current()
        old = {fd: on for fd, on in _notes.sockets.items() if now.get(fd) == on}
        _notes.sockets = {**old, **_new_since(before)}
    return made


def _call_alone(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call that only some ranks of a group make, and record it as unmatched.

    gloo's counter of the group includes such calls, so `calls` subtracts them.
    """
    before = dict(_numbers())
    try:
        return original(*args, **kwargs)
    finally:
        for name, number in _numbers():
            _notes.unmatched[name] += number - before.get(name, 0)


def _call_unrecorded(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call that gloo's recorder leaves out, and note it meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return original(*args, **kwargs)
    try:
        _notes.unrecorded = original, args, kwargs
        return original(*args, **kwargs)
    finally:
        _notes.unrecorded = None


def _backend(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return str(args[0] if args else kwargs.get("backend")).lower()


def _next_prefix() -> str:
    """Return the key prefix of the next group in its store, "" for torch's own."""
    count = _notes.inits
    _notes.inits += 1
    if _notes.cell:
        return f"again/{_notes.cell}.{count}"
    return f"again/{count}" if count else ""


def _new_since(before: group_sockets.Sockets) -> group_sockets.Sockets:
    now = group_sockets.current()
    return {fd: target for fd, target in now.items() if before.get(fd) != target}


def _port(store: Any, url: Any) -> int:
    """Return the port of the store of the rendezvous, 0 if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if store is not None:
        return int(getattr(store, "port", 0))
    return urlsplit(str(url)).port or int(os.environ.get("MASTER_PORT", "0"))


def _numbers() -> Iterator[tuple[str, int]]:
    """Yield the name of each gloo group, and its number of calls."""
    c10d: Any = sys.modules[_C10D]
    for group, name in list(c10d._world.pg_names.items()):  # noqa: SLF001
        if torch_groups.is_gloo(group):
            yield name, torch_groups.number_of_calls(group)


def _look(c10d: Any) -> None:
    """Record whether this rank has a process group, and whether a group of several ranks was
    used.
    """
    if c10d is None or _notes.use == "used":
        return
    try:
        groups = list(c10d._world.pg_map)  # noqa: SLF001
        if groups:
            is_used = any(
                one.size() > 1 and torch_groups.number_of_calls(one) > 0
                for one in groups
            )
            _notes.use = "used" if is_used else "unused"
    except Exception:  # noqa: BLE001 - of a torch that keeps its groups elsewhere nothing is known
        _notes.use = "used"


def _keep(c10d: Any) -> None:
    """Keep references to gloo groups that models hold; release the groups whose models are gone."""
    try:
        groups = list(c10d._world.pg_map)  # noqa: SLF001
    except AttributeError:  # a torch that stores its groups elsewhere
        return
    new = [
        one for one in groups if one not in _notes.kept and torch_groups.is_gloo(one)
    ]
    _notes.kept = torch_groups.held_by_models((*_notes.kept, *new))


def _leave_to_parent() -> None:
    """Never release the groups in a forked child: that would wait for threads which only the parent
    has.
    """
    _notes.given.clear()  # the child is no rank
    _notes.begins = None
    if not _notes.kept:
        return
    import ctypes  # torch imports it too

    for group in _notes.kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _notes.kept = ()

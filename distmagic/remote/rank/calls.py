"""The collective calls of a rank, from torch's flight recorder: the calls it has made, and the one
in which it waits.

    the agent  --ask-->       an empty file next to the agent's sockets
    a rank     --answer-->    its calls and the stacks of its threads in that file, even while its
                              main thread waits
               --leave-->     the same without a request: after a failed call, when groups end, and
                              at its own end
    the file   --reply_of-->  Stacks, and the text of the stacks

The rank calls `answer`, which starts a thread that watches for requests. The agent calls `ask` and
`reply_of`.

If a rank sends more than another one expects, gloo aborts the process by an uncaught C++ exception
on its own thread. The C++ terminate handler is replaced, so that it writes the calls first.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from distmagic.remote.rank import stacks
from distmagic.remote.training.groups import calls as group_calls
from distmagic.remote.training.groups import (
    is_of_all,
    members_of_new,
    unrecorded_call,
)
from distmagic.remote.training.torch_groups import recorded
from distmagic.remote.wire.clipping import ranges
from distmagic.remote.wire.codec import BadLine, decode, encode
from distmagic.remote.wire.events import LEFT, Stacks
from distmagic.remote.wire.parts import CallRecord, Frame, GroupCalls, GroupRecord

_LOOK_S = 0.25
_KEPT = 50  # last calls of each group
_MAX_GROUPS = 16  # those with the latest calls
_MAX_CHARS = 200  # limit for the sizes of a call, and for the ranks of a group
_READ_BYTES = 1 << 20
# This rank, its file, and torch's groups, once it has any.
_known: list[tuple[int, Path, ModuleType]] = []


def _file_of(run_dir: Path, pid: int) -> Path:
    return run_dir / f"calls-{pid}"


# ---- in the rank


def answer(run_dir: Path, c10d: ModuleType) -> None:
    """Start a thread in this process that answers requests. If that fails, nothing is raised."""
    path = _file_of(run_dir, os.getpid())
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        path.write_bytes(b"-")  # means no request yet
        # Not from `threading`: the user's code may count and join its threads there.
        _thread.start_new_thread(_answer_always, (path, c10d))
        _known.append((os.getpid(), path, c10d))
        _before_abort()


def _answer_always(path: Path, c10d: ModuleType) -> None:
    place = str(path)
    while True:
        time.sleep(_LOOK_S)
        try:
            if os.stat(place).st_size == 0:
                _write(path, c10d)
        except OSError:
            continue  # a cleaner has removed the file, or the disk is full
        except Exception:  # noqa: BLE001 - a torch whose recorder is another one has nothing to say
            return


def leave(error: BaseException | None = None) -> None:
    """Write the calls of this rank for its agent: before its end or that of its groups, or after a
    failed call.
    """
    if error and not is_of_call(error):
        return
    frames = traceback.extract_tb(error.__traceback__) if error else []
    stack = "-\n"  # its current place means nothing
    if frames:
        lines = [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in reversed(frames)]  # fmt: skip
        stack = "\n".join(["Thread 0x0 (most recent call first):", *lines, ""])
    _leave(stack, has_failed=bool(frames))


def is_of_call(error: BaseException) -> bool:
    """Whether a call of a process group has raised this error."""
    frames = traceback.extract_tb(error.__traceback__)
    # Autograd's calls are those of DistributedDataParallel.
    of_torch = "/torch/(distributed|autograd)/"
    return bool(frames) and bool(re.search(of_torch, frames[-1].filename))


def waiting(
    absent: Mapping[int, Iterable[GroupCalls] | None], since_ns: int
) -> tuple[str, int, list[int]] | None:
    """Return the call since then in which this rank waits for some of these ranks, a number, and
    those ranks.

    An equal number later means that it still waits: the call's time, or the bytes that were
    transferred so far. An absent rank may still send what another one receives, or the reverse.

    `absent` are ranks that make no call now: None for one that does not run the cell, and the
    groups of one that has ended it, which may have made that call before. A group that it has
    ended, too, is not among them. A call of another thread of Python, such as one that saves a
    checkpoint, does not count: that thread of an absent rank still makes it.
    """
    counts = {
        rank: None if groups is None else {one.name: one.calls for one in groups}
        for rank, groups in absent.items()
    }
    made = [rank for rank in members_of_new() if rank in counts and not counts[rank]]
    if made:
        return "a new process group", 0, made
    own = {one.name: one.calls for one in group_calls()}
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world: Any = getattr(c10d, "_world", None)
    names = {name: group for group, name in getattr(world, "pg_names", {}).items()}
    # Members of a smaller world have other numbers.
    is_known = bool(names) and is_of_all(c10d.get_world_size())
    found = unrecorded_call() if is_known else None
    if found is not None:
        name, moved, members = found
        missing = [rank for rank in members if rank in counts]
        if missing:
            return name, moved, missing
    others = _other_threads()
    for one in recorded() if is_known else ():
        made_ns, name = one["time_created_ns"], one["process_group"][0]
        if name not in own or made_ns < since_ns or one["is_p2p"] or _is_over(one):
            continue
        if one.get("thread_id") in others:
            continue
        missing = [
            rank
            for rank in sorted(world.pg_group_ranks[names[name]])
            if rank in counts and _lacks(counts[rank], name, own[name])
        ]
        if missing:
            return one["profiling_name"].partition(":")[2], made_ns, missing
    return None


def _other_threads() -> set[str]:
    """Return the ids of Python's threads but the main one.

    One of autograd, which has only run Python, is none of them.
    """
    main = threading.main_thread()
    own = (one for one in threading.enumerate() if not one.name.startswith("Dummy-"))
    return {str(one.ident) for one in own if one is not main}


def _lacks(counts: Mapping[str, int] | None, name: str, calls: int) -> bool:
    return counts is None or counts.get(name, calls) < calls


def _leave(stack: str = "", *, has_failed: bool = True) -> None:
    for pid, path, c10d in _known:
        if os.getpid() == pid:  # not a child that the user's code has forked
            with contextlib.suppress(Exception):
                _write(path, c10d, LEFT, stack, has_failed=has_failed)


def _before_abort() -> None:
    """Make C++ write the calls before it aborts the process because of an exception, as long as
    Python runs.
    """
    import ctypes  # torch imports it too

    handler = ctypes.CFUNCTYPE(None)
    # The symbol of std::set_terminate in the library.
    change = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    change.restype, change.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def leave_and_abort() -> None:
        _leave()
        handler(plain)()

    ours = handler(leave_and_abort)
    plain = change(ctypes.cast(ours, ctypes.c_void_p))
    # This reference keeps it alive.
    atexit.register(lambda: (change(plain), ours))


def _write(
    path: Path,
    c10d: ModuleType,
    request_id: str = "",
    stack: str = "",
    *,
    has_failed: bool = True,
) -> None:
    """Write the calls, and `stack` instead of the real stacks.

    `has_failed`: a failed call counts as unfinished.
    """
    is_asked = not request_id
    calls = list(_groups(c10d, time.time_ns(), with_frames=is_asked))
    if calls and stack and has_failed:
        *before, last = calls[-1].calls
        made = (*before, replace(last, is_over=False))
        calls[-1] = replace(calls[-1], calls=made)
    if not calls and not has_failed:
        return  # its groups have ended before, and the file has its calls already
    rank, local_rank = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    line = Stacks(
        request_id=request_id, rank=rank, local_rank=local_rank, calls=tuple(calls)
    )
    # The main thread may leave the calls while the other one answers.
    new = path.with_name(f"{path.name}-{_thread.get_ident()}.new")
    with new.open("wb") as file:
        file.write(encode(line) + stack.encode())
        file.flush()
        if not stack:
            faulthandler.dump_traceback(file, all_threads=True)
    new.replace(path)


def _groups(
    c10d: Any, now_ns: int, *, with_frames: bool = False
) -> Iterable[GroupRecord]:
    """Yield the last calls of this rank in each group, without calls to single ranks, such as send
    and recv.
    """
    world = c10d._world  # noqa: SLF001
    names = {world.pg_names[group]: group for group in list(world.pg_names)}
    entries: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in recorded(with_frames=with_frames):
        backend, _, _ = one["profiling_name"].partition(":")
        name, description = one["process_group"]
        if name in names and not one["is_p2p"]:
            # Two backends of one group count separately.
            made = entries.setdefault((name, description, backend), [])
            if made and one["collective_seq_id"] < made[-1]["collective_seq_id"]:
                made.clear()  # from a group that has ended, and had the same name
            made.append(one)
    latest = sorted(entries.items(), key=lambda item: item[1][-1]["time_created_ns"])
    for (name, description, backend), made in latest[-_MAX_GROUPS:]:
        members = sorted(world.pg_group_ranks[names[name]])
        if len(members) == int(os.environ["WORLD_SIZE"]):
            members = []
        ranks = ",".join(ranges(members))
        if len(ranks) > _MAX_CHARS:
            continue
        waiting = [one["time_created_ns"] for one in made if not _is_over(one)]
        yield GroupRecord(
            name="" if description in ("default_pg", "undefined") else description,
            ranks=ranks,
            backend=backend,
            waits_s=max(0.0, (now_ns - waiting[0]) / 1e9) if waiting else 0.0,
            calls=tuple(_call(one) for one in made[-_KEPT:]),
        )


def _is_over(entry: dict[str, Any]) -> bool:
    # gloo only retires its calls; for NCCL the recorder notices the end itself.
    return bool(entry["retired"]) or entry["state"] == "completed"


def _call(entry: dict[str, Any]) -> CallRecord:
    sizes = ", ".join(map(str, entry["input_sizes"]))
    types = dict.fromkeys(entry.get("input_dtypes", ()))
    if sizes and list(types) != ["Float"]:
        sizes += f" {', '.join(types)}"
    return CallRecord(
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].partition(":")[2][:_MAX_CHARS],
        sizes=sizes[:_MAX_CHARS].rstrip(),
        is_over=_is_over(entry),
        frames=_caller(entry.get("frames", ())),
    )


def _caller(frames: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    """Return the innermost of these frames that is no library's."""
    for one in frames:
        file, line = str(one.get("filename", "<")), one.get("line")
        if stacks.is_users(file) and len(file) <= _MAX_CHARS and isinstance(line, int):
            name = str(one.get("name"))[:_MAX_CHARS]
            return (Frame(file=file, line=line, function=name),)
    return ()


# ---- in the agent


def ask(run_dir: Path, pid: int) -> bool:
    """Ask that process for its calls; return whether it has a thread that may answer."""
    try:
        os.truncate(_file_of(run_dir, pid), 0)
    except OSError:
        return False
    return True


def reply_of(run_dir: Path, pid: int) -> tuple[Stacks, str] | None:
    """Return the calls and the stack text that a process has written; None if it has written
    none.
    """
    try:
        with _file_of(run_dir, pid).open("rb") as file:
            line = file.readline(_READ_BYTES)
            text = file.read(_READ_BYTES)
        found = decode(line)[1]
    except (OSError, BadLine):
        return None
    return (
        (found, text.decode("ascii", "replace")) if isinstance(found, Stacks) else None
    )

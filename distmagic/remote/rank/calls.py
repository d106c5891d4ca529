"""The collective calls of a rank, as torch's flight recorder has them: which it has made, and in which it waits.

    the agent  --ask-->     an empty file beside the agent's sockets
    a rank     --answer-->  its calls and the stacks of its threads in that file, also while its main thread waits
    the file   --reply_of-->  GroupRecord, and the text of the stacks

`answer` is called in the rank, whose own thread looks for the question from then on. The others are called by the agent.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from distmagic.remote.wire.clipping import ranges
from distmagic.remote.wire.codec import BadLine, decode, encode
from distmagic.remote.wire.events import Stacks
from distmagic.remote.wire.parts import CallRecord, GroupRecord

_LOOK_S = 0.25
_KEPT = 50  # calls of each group, the last ones
_MAX_GROUPS = 16  # those with the latest calls
_MAX_CHARS = 200  # of the sizes of a call, of the ranks of a group
_READ_BYTES = 1 << 20
_OF_GLOO = "_dump_fr_trace_json"
# NCCL has a recorder of its own, in a torch that is built with it.
_RECORDERS = (_OF_GLOO, _OF_GLOO.replace("_fr_", "_nccl_"))


def _file_of(run_dir: Path, pid: int) -> Path:
    return run_dir / f"calls-{pid}"


# ---- in the rank


def answer(run_dir: Path, c10d: ModuleType) -> None:
    """Have a thread of this process answer from now on. Nothing is raised where that fails."""
    path = _file_of(run_dir, os.getpid())
    with contextlib.suppress(OSError, RuntimeError):
        path.write_bytes(b"-")  # nobody asks yet
        # Not of `threading`: the user's code counts and joins the threads that it has there.
        _thread.start_new_thread(_answer_always, (path, c10d))


def _answer_always(path: Path, c10d: ModuleType) -> None:
    place = str(path)
    while True:
        time.sleep(_LOOK_S)
        try:
            if os.stat(place).st_size == 0:
                calls = tuple(_groups(c10d, time.time_ns()))
                rank, local_rank = (
                    int(os.environ[name]) for name in ("RANK", "LOCAL_RANK")
                )
                line = Stacks(
                    request_id="", rank=rank, local_rank=local_rank, calls=calls
                )
                new = path.with_name(f"{path.name}.new")
                with new.open("wb") as file:
                    file.write(encode(line))
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                new.replace(path)
        except OSError:
            continue  # a cleaner has removed the file, or the disk is full
        except Exception:  # noqa: BLE001 - a torch whose recorder is another one has nothing to say
            return


def _groups(c10d: Any, now_ns: int) -> Iterable[GroupRecord]:
    """Yield the last calls of this rank in each group; those to single ranks, as send and recv, are left out."""
    world = c10d._world  # noqa: SLF001
    names = {world.pg_names[group]: group for group in list(world.pg_names)}
    entries: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in _recorded():
        backend, _, _ = one["profiling_name"].partition(":")
        name, description = one["process_group"]
        if name in names and not one["is_p2p"]:
            # Two backends of one group count for themselves.
            made = entries.setdefault((name, description, backend), [])
            if made and one["collective_seq_id"] < made[-1]["collective_seq_id"]:
                made.clear()  # of a group that has ended, and had this name
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


def _recorded() -> Iterable[dict[str, Any]]:
    module = sys.modules["torch._C._distributed_c10d"]
    for name in _RECORDERS:
        recorder = getattr(module, name, None)
        if recorder is not None:
            yield from json.loads(recorder(True, False)).get("entries", ())


def _is_over(entry: dict[str, Any]) -> bool:
    # gloo only retires its calls; of NCCL the recorder sees the end itself.
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
    )


# ---- in the agent


def ask(run_dir: Path, pid: int) -> bool:
    """Ask that process for its calls; return whether it has a thread that may answer."""
    try:
        os.truncate(_file_of(run_dir, pid), 0)
    except OSError:
        return False
    return True


def reply_of(run_dir: Path, pid: int) -> tuple[tuple[GroupRecord, ...], str] | None:
    """Return the calls of that process and the text of its stacks; None before it has answered."""
    try:
        with _file_of(run_dir, pid).open("rb") as file:
            line = file.readline(_READ_BYTES)
            text = file.read(_READ_BYTES)
        found = decode(line)[1]
    except (OSError, BadLine):
        return None
    if not isinstance(found, Stacks):
        return None
    return found.calls, text.decode("ascii", "replace")

"""Snapshots of a training that may be restarted on other hosts.

A snapshot is written atomically, and found on any host.

    from distmagic import checkpoint
    state = checkpoint.load("snapshot.pt")          # None the first time
    ...
    checkpoint.save({"model": model.state_dict(), "epoch": epoch}, "snapshot.pt", step=epoch)

The hosts need no shared home. Local rank 0 of every node writes, and `load` returns the newest
snapshot of all nodes. So a node that was away, or is new, continues where the others are. A
snapshot contains the name of its job. Once any node has a snapshot of the current job, those of
other jobs are ignored. A host that was away may have a file of another experiment with the same
name and a higher step.

For sharded states use `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from distmagic.remote.frozen import frozen
from distmagic.remote.records import places
from distmagic.remote.records.atomic_file import discard

_STEP = "distmagic_step"
_JOB = "distmagic_job"
_STATE = "state"
_ABANDONED_S = 600.0  # an unfinished file that was unchanged for so long is abandoned


@frozen
class Snapshot:
    """A rank's information about the snapshot on its host.

    `job` is the job that wrote it, "" if unknown.
    """

    step: int
    job: str
    host: str


def save(state: object, path: str | os.PathLike[str], *, step: int) -> None:
    """Write a snapshot of step `step` on this node, if this is its local rank 0; other ranks return
    at once.

    `state` is any object that `torch.save` can write; `load` returns it, and prefers the snapshot
    with the highest step. The file is written atomically, even if the host loses power. Raises
    OSError if it can't be written.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    import torch

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Homes may be shared, so the name contains the host; two nodes may run on one host, so it
    # contains the pid. Two containers may have both in common, so it also contains random digits.
    prefix = f".{target.name}.{os.uname().nodename}."
    with contextlib.suppress(OSError):
        _remove_abandoned(target.parent, prefix)
    aside = target.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with aside.open("wb") as file:
            noting = _NotingErrors(file)
            try:
                torch.save({_STEP: step, _JOB: _own_job(), _STATE: state}, noting)
            except RuntimeError as error:
                raise noting.error or error from None
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        discard(aside)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove unfinished files of ranks that were killed while writing: each is as large as the
    model.

    A rank in another container has no process that this rank can see, but its file keeps changing.
    """
    now = places.now_at(folder)
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):  # for example, another node has removed it
            age_s = now - path.stat().st_mtime
            is_gone = pid.isdecimal() and not os.path.exists(f"/proc/{pid}")
            if is_gone and age_s > _ABANDONED_S:
                path.unlink()


class _NotingErrors:
    """A file object for torch that keeps an OSError, because torch would raise a RuntimeError
    instead.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def load(path: str | os.PathLike[str]) -> Any:
    """Return the newest snapshot of all nodes, with tensors on the CPU; None if no node has one.

    Snapshots of other jobs count only if no node has one of this job. Rank 0 prints one line to
    stderr with the chosen snapshot. Every rank must call this, with several ranks after
    `init_process_group`. Without a process group each rank reads its own node's file. A file that
    is not a snapshot raises the error of `torch.load`.
    """
    import torch
    import torch.distributed as dist

    content: Any = None
    own = None
    # Not `exists`: a file that is temporarily unreadable must not count as missing.
    with contextlib.suppress(FileNotFoundError):
        content = torch.load(path, map_location="cpu", weights_only=True)
        own = Snapshot(
            step=content[_STEP], job=content.get(_JOB, ""), host=os.uname().nodename
        )
    has_group = dist.is_available() and dist.is_initialized()
    is_alone = not has_group or dist.get_world_size() == 1
    found: list[Snapshot | None] = [own]
    if not is_alone:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    source = newest(found, _own_job())
    if source is None:
        return None
    taken = found[source]
    assert taken is not None
    if is_alone or dist.get_rank() == 0:
        writer = "an unknown job"
        if taken.job:
            writer = "this job" if taken.job == _own_job() else f"job {taken.job}"
        sys.stderr.write(
            f"distmagic.checkpoint: {os.fspath(path)}: took step {taken.step}, from {taken.host}, written by {writer}\n"
        )
    for one in found:
        if one is None or (one.step, one.job) != (taken.step, taken.job):
            return _broadcast(source, content)
    return content[_STATE]  # all hosts have the same snapshot: nothing needs to be sent


def newest(found: Sequence[Snapshot | None], job: str) -> int | None:
    """Return the rank with the snapshot to use, given each rank's snapshot; None if no rank has
    one. Pure.
    """
    there = {rank: one for rank, one in enumerate(found) if one is not None}
    of_this_job = {rank: one for rank, one in there.items() if job and one.job == job}
    candidates = of_this_job or there
    return max(candidates, key=lambda rank: (there[rank].step, -rank), default=None)


def _own_job() -> str:
    return os.environ.get("DISTMAGIC_JOB", "")


def _broadcast(source: int, content: Any) -> Any:
    """Return the state of rank `source`, which sends it to all."""
    import torch
    import torch.distributed as dist

    box: list[bytes | None] = [None]
    if dist.get_rank() == source:
        buffer = io.BytesIO()
        torch.save(content[_STATE], buffer)
        box = [buffer.getvalue()]
    dist.broadcast_object_list(box, src=source)
    return torch.load(io.BytesIO(box[0] or b""), map_location="cpu", weights_only=True)

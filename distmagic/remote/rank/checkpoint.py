"""Snapshots of a training that may be restarted on other hosts: written whole or not at all, found on whichever host.

    from distmagic import checkpoint
    state = checkpoint.load("snapshot.pt")          # None the first time
    ...
    checkpoint.save({"model": model.state_dict(), "epoch": epoch}, "snapshot.pt", step=epoch)

The homes of the hosts need not be shared. Local rank 0 of every node writes, and `load` takes the newest snapshot of all
nodes, so that a node that was away, or is new, continues where the others are. A snapshot names the job that wrote it. As
soon as one node has a snapshot of the present job, those of other jobs don't count: a host that was away may have a
file of another experiment under the same name, with a higher step.

Sharded states are for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_STEP = "distmagic_step"
_JOB = "distmagic_job"
_STATE = "state"
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank knows of the snapshot on its host. `job` is the one that wrote it, "" if that is not known."""

    step: int
    job: str
    host: str


def save(state: object, path: str | os.PathLike[str], *, step: int) -> None:
    """Write a snapshot of step `step` on this node, if this is its local rank 0; other ranks return at once.

    `state` is what `torch.save` can write; `load` returns it, and prefers the snapshot with the highest step. The file appears whole or not at all, also when the host loses its power. Raises OSError where it can't be written.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    import torch

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Homes may be shared, so the host is in the name; two nodes may be on one host, so the pid is. Containers may have both
    # in common.
    prefix = f".{target.name}.{os.uname().nodename}."
    _remove_abandoned(target.parent, prefix)
    content = {_STEP: step, _JOB: _own_job(), _STATE: state}
    for tries_left in reversed(range(_TRIES)):
        aside = target.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with aside.open("wb") as file:
                _lock(file, fcntl.LOCK_EX)
                noting = _NotingErrors(file)
                try:
                    torch.save(content, noting)
                except RuntimeError as error:
                    raise noting.error or error from None
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except FileNotFoundError:
            # It was taken for abandoned before it was locked, or after that.
            if not tries_left or not target.parent.exists():
                raise
        else:
            return
        finally:
            aside.unlink(missing_ok=True)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the unfinished files of ranks that were killed while they wrote: each is as large as the model.

    The rank of another container has no such process here, but it holds the lock of what it writes.
    """
    for name in os.listdir(folder):
        pid = name.removeprefix(prefix).partition("-")[0]
        if (
            name.startswith(prefix)
            and pid.isdecimal()
            and not os.path.exists(f"/proc/{pid}")
        ):
            # It is being written, or another node on this host has just removed it.
            with contextlib.suppress(OSError), (folder / name).open("r+b") as file:
                _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / name).unlink()


class _NotingErrors:
    """A file as torch writes to it: torch makes a RuntimeError of its own of an OSError, which is kept here."""

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


def _lock(file: IO[bytes], how: int) -> None:
    """Lock a file, where its file system has locks. Raises BlockingIOError where another process has it locked."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError:
        return  # the process alone says then whether it is being written


def load(path: str | os.PathLike[str]) -> Any:
    """Return the newest snapshot of all nodes, with tensors on the CPU; None if no node has one.

    Snapshots of other jobs count only if no node has one of this job. One line on stderr of rank 0 names the one that was
    taken. Every rank must call this, after `init_process_group` if there are several; without a process group each rank
    reads its own node's file. A file that is not a snapshot raises the error of `torch.load`.
    """
    import torch
    import torch.distributed as dist

    content: Any = None
    own = None
    # Not `exists`: a file that can't be seen just now is no beginning from nothing.
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
    return content[_STATE]  # all hosts have the same: nothing has to be sent


def newest(found: Sequence[Snapshot | None], job: str) -> int | None:
    """Return the rank that has the snapshot to take, given what each rank has found; None where no rank has any. Pure."""
    candidates = {}
    of_this_job = {}
    for rank, snapshot in enumerate(found):
        if snapshot is not None:
            candidates[rank] = snapshot.step
            if job and snapshot.job == job:
                of_this_job[rank] = snapshot.step
    candidates = of_this_job or candidates
    return max(candidates, key=lambda rank: (candidates[rank], -rank), default=None)


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

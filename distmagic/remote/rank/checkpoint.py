"""Snapshots of a training that may be started again on other hosts: written whole or not at all, found wherever they are.

    from distmagic import checkpoint
    state = checkpoint.load("snapshot.pt")          # None the first time
    ...
    checkpoint.save({"model": model.state_dict(), "epoch": epoch}, "snapshot.pt", step=epoch)

Homes of hosts may be shared or not: local rank 0 of every node writes, and `load` takes the newest of all nodes, so that
a node that was away, or is new, goes on from where the others are. Sharded states are for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

_STEP = "distmagic_step"
_STATE = "state"


def save(state: object, path: str | os.PathLike[str], *, step: int) -> None:
    """Write a snapshot of step `step` on this node, if this is its local rank 0; other ranks return at once.

    The file appears whole or not at all, also when the host loses its power. Raises OSError where it can't be written.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    import torch

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")  # homes may be shared
    try:
        with aside.open("wb") as file:
            torch.save({_STEP: step, _STATE: state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Any:
    """Return the newest snapshot of all nodes, with tensors on the CPU; None where no node has one.

    Every rank must call it, after `init_process_group` where there is more than one; without a process group each rank
    reads its own node's file. Raises what `torch.load` raises for a file that is not a snapshot.
    """
    own = _read(Path(path))
    found = own if own is None else (own[_STEP], own[_STATE])
    return _newest(found)


def _read(path: Path) -> Any:
    import torch

    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def _newest(own: tuple[int, Any] | None) -> Any:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None if own is None else own[1]
    steps: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, None if own is None else own[0])
    known = [(step, -rank) for rank, step in enumerate(steps) if step is not None]
    if not known:
        return None
    newest, source = max(known)[0], -max(known)[1]
    if all(step == newest for step in steps):
        return own[1] if own is not None else None
    return _from(source, own)


def _from(source: int, own: tuple[int, Any] | None) -> Any:
    """Return the state of rank `source`, which sends it to all."""
    import torch
    import torch.distributed as dist

    box: list[bytes | None] = [None]
    if dist.get_rank() == source and own is not None:
        buffer = io.BytesIO()
        torch.save(own[1], buffer)
        box = [buffer.getvalue()]
    dist.broadcast_object_list(box, src=source)
    return torch.load(io.BytesIO(box[0] or b""), map_location="cpu", weights_only=True)

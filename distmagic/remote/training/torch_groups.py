"""Reads torch's process groups: their backends, how many calls were made in them, and which calls
torch's flight recorder has.

Nothing is changed, and torch is not imported.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_PARALLEL = "torch.nn.parallel.distributed"
_OF_GLOO = "_dump_fr_trace"
# NCCL has its own recorder, in a torch built with it.
_RECORDERS = (_OF_GLOO, _OF_GLOO.replace("_fr_", "_nccl_"))
# torch imports this before it returns stacks: 2,000 modules, unless there is an optimizer.
_FOR_STACKS = "torch._inductor"


def backends(group: Any) -> list[Any]:
    """Return the backends of a group, one of each kind."""
    devices = group._device_types  # noqa: SLF001
    found = [group._get_backend(device) for device in devices]  # noqa: SLF001
    return list({backend.name(): backend for backend in found}.values())


def is_gloo(group: Any) -> bool:
    """Whether a backend of a group is gloo."""
    try:
        return any(backend.name() == "gloo" for backend in backends(group))
    except Exception:  # noqa: BLE001 - a backend that can't be asked is another one
        return False


def number_of_calls(group: Any) -> int:
    """Return the number of calls in a group.

    Raises RuntimeError for a backend that does not count.
    """
    return sum(one._get_sequence_number_for_group() for one in backends(group))  # noqa: SLF001


def recorded(*, with_frames: bool = False) -> Iterable[dict[str, Any]]:
    """Yield the calls of this rank in torch's flight recorder; nothing if this torch has none.

    `with_frames`: each has its Python frames, if torch returns them without an import.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    with_frames = with_frames and hasattr(sys.modules.get(_FOR_STACKS), "compile")
    for name in _RECORDERS:
        if with_frames:
            # Another torch may have another recorder: then the calls have no frames.
            with suppress(Exception):
                dump = getattr(module, name)(True, True, False)
                yield from list(pickle.loads(dump).get("entries", ()))
                continue
        recorder = getattr(module, f"{name}_json", None)
        if recorder is not None:
            yield from json.loads(recorder(True, False)).get("entries", ())


def last_calls() -> dict[str, str]:
    """Return {group: this rank's last collective call in it} from torch's flight recorder.

    A group without a recorded call is left out. {} for a torch with another format of records.
    """
    found = {}
    try:
        for entry in recorded():
            if not entry["is_p2p"]:
                name = entry["process_group"][0]
                found[name] = entry["profiling_name"].rpartition(":")[2]
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        return {}  # a torch with another format of records; C++ raises RuntimeError
    return found


def held_by_models(groups: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the groups that models under DistributedDataParallel hold, each next to its
    reducer.
    """
    if not groups:
        return ()
    model = getattr(sys.modules.get(_PARALLEL), "DistributedDataParallel", ())
    held = []
    for holder in gc.get_referrers(*groups):
        # Before Python 3.13 the model's `__dict__` holds them, later the model itself.
        variables = vars(holder) if issubclass(type(holder), model) else holder
        if type(variables) is dict and "reducer" in variables:
            held.append(variables.get("process_group"))
    return tuple(group for group in groups if any(group is one for one in held))

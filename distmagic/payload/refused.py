"""Rejects picklable values that must not be sent: they are useless on hosts, or would mislead
ranks.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType

from distmagic.remote.values.unpicklable import NotToTravel

_NOTEBOOK_ONLY = ("IPython", "ipykernel", "ipywidgets", "tqdm")
_FRAMEWORKS = {
    "accelerate.accelerator.Accelerator": "an Accelerator",
    "accelerate.state.PartialState": "a PartialState of accelerate",
    "accelerate.state.AcceleratorState": "an AcceleratorState",
    "accelerate.optimizer.AcceleratedOptimizer": "an optimizer that an Accelerator has prepared",
    "accelerate.scheduler.AcceleratedScheduler": "a scheduler that an Accelerator has prepared",
    "accelerate.data_loader.DataLoaderShard": "a DataLoader that an Accelerator has prepared",
    "accelerate.data_loader.DataLoaderDispatcher": "a DataLoader that an Accelerator has prepared",
    "transformers.training_args.TrainingArguments": "a TrainingArguments",
    "transformers.trainer.Trainer": "a Trainer of transformers",
    "lightning.pytorch.trainer.trainer.Trainer": "a Trainer of Lightning",
    "pytorch_lightning.trainer.trainer.Trainer": "a Trainer of Lightning",
    "lightning.fabric.fabric.Fabric": "a Fabric of Lightning",
    "lightning_fabric.fabric.Fabric": "a Fabric of Lightning",
    "deepspeed.runtime.engine.DeepSpeedEngine": "a DeepSpeed engine",
    "torch.distributed.device_mesh.DeviceMesh": "a DeviceMesh",
    "torch.distributed.tensor.DTensor": "a DTensor",
    "torch.distributed.fsdp.FSDPModule": "a module that fully_shard has sharded",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": "a module that fully_shard has sharded",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "a FullyShardedDataParallel module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "a DistributedDataParallel module",
    "torch.utils.data.distributed.DistributedSampler": "a DistributedSampler",
}
"""Classes whose objects ask for rank and world size when they are made: module and name of the
class, and a name for such an object in a message.
"""


class MadeAlone(NotToTravel):
    """The object was made in the notebook, and has the notebook's rank and world size."""


def made_alone(name: str) -> str:
    """Return the display name of such a class, by its import name; "" for all others."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    for whole, what in _FRAMEWORKS.items():
        if whole.startswith(f"{package}.") and whole.endswith(f".{last}"):
            return what
    return ""


def refuse(value: object) -> None:
    """Raise `pickle.PicklingError` for an object that must not be sent; `MadeAlone` if ranks would
    work alone.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] in _NOTEBOOK_ONLY:
        raise pickle.PicklingError(f"{kind.__qualname__} lives in the notebook only")
    if kind is FunctionType and value.__module__ == "IPython.core.getipython":
        raise pickle.PicklingError("there is no IPython on a rank")
    if kind.__module__.startswith("distmagic.outcome."):
        raise pickle.PicklingError("a run belongs to the notebook")
    if isinstance(value, io.IOBase) and not isinstance(
        value, (io.BytesIO, io.StringIO)
    ):
        raise pickle.PicklingError("an open file can't travel")
    for cls in kind.__mro__:
        if what := _FRAMEWORKS.get(f"{cls.__module__}.{cls.__qualname__}"):
            raise MadeAlone(value, what)

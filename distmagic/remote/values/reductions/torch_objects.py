"""Objects of torch that it would not pickle, or not whole.

The memory of tensors and storages is in storages.py.

- A tensor of a call keeps its hooks, and an optimizer its hooks and attributes.
- A DistributedDataParallel module becomes the module in it, and a DataLoader loses its worker
  processes.
- A parametrized module is made again from its class before the parametrizations.
- `torch.finfo`, `torch.iinfo` and operators go by name.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

from distmagic.remote.values.reductions.python_objects import by_path


def reduced(obj: Any, stored: Any, *, has_hooks: bool) -> Any:
    """Return how to pickle an object of torch, as `__reduce__` does; NotImplemented for any other
    object.

    `stored` is how to pickle it by its memory, NotImplemented if it can't be. A result has no
    hooks: they may belong to its rank.
    """
    torch = sys.modules["torch"]
    if isinstance(obj, torch.Tensor):
        return _with_hooks(obj, stored) if has_hooks else stored
    optimizers = sys.modules.get("torch.optim.optimizer")
    if optimizers is not None and isinstance(obj, optimizers.Optimizer):
        return _optimizer(obj, optimizers.Optimizer) if has_hooks else NotImplemented
    return _of_other_kind(obj, torch) if stored is NotImplemented else stored


def _of_other_kind(obj: Any, torch: Any) -> Any:
    if type(obj) in (torch.finfo, torch.iinfo):
        return type(obj), (getattr(torch, obj.dtype),)
    if type(obj).__module__ == "torch._ops":
        return by_path(obj, f"torch:ops.{obj}")
    data = sys.modules.get("torch.utils.data.dataloader")
    if data is not None and isinstance(obj, data.DataLoader):
        return _without_workers(obj)
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None and isinstance(obj, ddp.DistributedDataParallel):
        return _same, (obj.module,)
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    is_module = parametrize is not None and isinstance(obj, torch.nn.Module)
    if is_module and parametrize.is_parametrized(obj):
        # torch refuses, because its class is made for this object alone.
        kind = parametrize.type_before_parametrizations(obj)
        state = vars(obj) | {"_compiled_call_impl": None}
        return object.__new__, (kind,), state, None, None, _parametrized
    return NotImplemented


def _with_hooks(tensor: Any, plain: Any) -> Any:
    """Add a tensor's hooks, which torch leaves out."""
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return plain
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
    if not any(hooks) or not _can_be_pickled(hooks):
        return plain
    make, args, *_ = tensor.__reduce_ex__(5) if plain is NotImplemented else plain
    return make, args, hooks, None, None, _set_hooks


def _optimizer(optimizer: Any, base: Any) -> Any:
    """Add an optimizer's attributes and hooks, which torch leaves out."""
    if type(optimizer).__getstate__ is not base.__getstate__:
        return NotImplemented
    make, args, state, *_ = optimizer.__reduce_ex__(5)
    more = {
        name: value
        for name, value in vars(optimizer).items()
        # In `step`, a scheduler notes that it was called. torch sets hooks that are missing.
        if name not in (*state, "step") and _can_be_pickled(value)
    }
    return make, args, more | state


def _can_be_pickled(value: object) -> bool:
    """Whether cloudpickle can pickle it: what can't, such as a tracker's hook or a fused
    optimizer's kernel, stays where it is.

    Each hook may refer to the whole model and its optimizers: they are left out of the trial.
    """
    import cloudpickle

    torch = sys.modules["torch"]
    large = torch.Tensor, torch.UntypedStorage, torch.optim.Optimizer

    class Trial(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            is_large = isinstance(obj, large)
            return (int, ()) if is_large else super().reducer_override(obj)

    try:
        Trial(io.BytesIO(), 5, buffer_callback=lambda _: None).dump(value)
    except Exception:  # noqa: BLE001 - whatever a user's object raises
        return False
    return True


def _without_workers(loader: Any) -> Any:
    """Leave out the iterator with the worker processes that a DataLoader with `persistent_workers`
    keeps.
    """
    if vars(loader).get("_iterator") is None:
        return NotImplemented
    make, args, state, *rest = loader.__reduce_ex__(5)
    if isinstance(state, dict):
        state = state | {"_iterator": None}
    return make, args, state, *rest


# Called by the pickle when it is loaded.


def _set_hooks(tensor: Any, hooks: Any) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks  # noqa: SLF001


def _parametrized(module: Any, state: Any) -> None:
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    vars(module).update(state)
    parametrize._inject_new_class(module)  # noqa: SLF001
    for name in module.parametrizations:
        parametrize._inject_property(module, name)  # noqa: SLF001


def _same(value: object) -> object:
    return value

"""Objects of torch that it would not pickle, or not whole.

The memory of tensors and storages is in storages.py.

- A tensor of a call keeps its hooks, and its gradient on request; an optimizer keeps its hooks and
  attributes.
- A parameter keeps its class.
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

from distmagic.remote.values.reductions.python_objects import (
    WEAK,
    by_path,
    reduced_weak,
)


def reduced(obj: Any, stored: Any, of_call: Any) -> Any:
    """Return how to pickle an object of torch, as `__reduce__` does; None for any other object.

    `stored` is how to pickle it by its memory, None if it can't be. `of_call` has the notes about a
    call (seen.py). It is None for a result, which has no hooks and gradients: they may belong to
    its rank.
    """
    torch = sys.modules["torch"]
    if isinstance(obj, torch.Tensor):
        return _tensor(obj, stored, of_call)
    if isinstance(obj, torch.optim.Optimizer):
        return _optimizer(obj) if of_call else None
    return stored or _of_other_kind(obj, torch)


def _of_other_kind(obj: Any, torch: Any) -> Any:
    if type(obj) in (torch.finfo, torch.iinfo):
        return type(obj), (getattr(torch, obj.dtype),)
    if type(obj).__module__ == "torch._ops":
        return by_path(obj, f"torch:ops.{obj}")
    if isinstance(obj, torch.utils.data.DataLoader):
        return _without_workers(obj)
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        return _same, (obj.module,)
    parametrize = torch.nn.utils.parametrize
    if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
        # torch refuses, because its class is made for this object alone.
        kind = parametrize.type_before_parametrizations(obj)
        state = vars(obj) | {"_compiled_call_impl": None}
        return object.__new__, (kind,), state, None, None, _parametrized
    return None


def _tensor(tensor: Any, plain: Any, of_call: Any) -> Any:
    """Add what torch leaves out: the class and attributes of a parameter, hooks, the gradient."""
    torch = sys.modules["torch"]
    kind, base, attributes = type(tensor), torch.nn.Parameter, {}
    is_own = kind.__reduce_ex__ is base.__reduce_ex__ and kind is not base
    # A sparse tensor has no storage, and so can't change its class.
    if is_own and tensor.layout == torch.strided:
        plain = _of_kind, (kind, tensor.data, tensor.requires_grad)
        attributes = vars(tensor)
    elif kind not in (torch.Tensor, base):
        return plain
    hooks, gradient = (None, None), None
    if of_call is not None:
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001
        if not any(hooks) or not _can_be_pickled(hooks):
            hooks = None, None
        # That of any other tensor is None, and to look at it warns.
        gradient = tensor.grad if tensor.is_leaf else None
        of_call.has_gradients |= gradient is not None
        gradient = gradient if of_call.takes_gradients else None
    if not attributes and not any(hooks) and gradient is None:
        return plain
    make, args, *_ = plain or tensor.__reduce_ex__(5)
    return make, args, (attributes, *hooks, gradient), None, None, _fill_tensor


def _optimizer(optimizer: Any) -> Any:
    """Add an optimizer's attributes and hooks, which torch leaves out."""
    usual = sys.modules["torch"].optim.Optimizer.__getstate__
    if type(optimizer).__getstate__ is not usual:
        return None
    make, args, state, *_ = optimizer.__reduce_ex__(5)
    more = {
        name: value
        for name, value in vars(optimizer).items()
        # In `step`, a scheduler notes that it was called. torch sets hooks that are missing.
        if name not in (*state, "step") and _can_be_pickled(value)
    }
    return make, args, more | state


def _can_be_pickled(value: object) -> bool:
    """Whether cloudpickle can pickle a value. If not, the value is not sent: a tracker's hook or a
    fused optimizer's kernel, for example.

    A hook may refer to the whole model and its optimizers, so the trial skips these.
    """
    import cloudpickle

    torch = sys.modules["torch"]
    large = torch.Tensor, torch.UntypedStorage, torch.optim.Optimizer

    class Trial(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in WEAK:
                return reduced_weak(obj)  # as in the parcel
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
        return None
    make, args, state, *rest = loader.__reduce_ex__(5)
    if isinstance(state, dict):
        state = state | {"_iterator": None}
    return make, args, state, *rest


# Called by the pickle when it is loaded.


def _of_kind(kind: Any, data: Any, requires_grad: bool) -> Any:  # noqa: FBT001 - pickle calls it
    return data.as_subclass(kind).requires_grad_(requires_grad)


def _fill_tensor(tensor: Any, state: tuple[Any, Any, Any, Any]) -> None:
    attributes, hooks, hooks_after, gradient = state
    vars(tensor).update(attributes)
    if hooks:
        tensor._backward_hooks = hooks  # noqa: SLF001
    if hooks_after:
        tensor._post_accumulate_grad_hooks = hooks_after  # noqa: SLF001
    tensor.grad = gradient


def _parametrized(module: Any, state: Any) -> None:
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    vars(module).update(state)
    parametrize._inject_new_class(module)  # noqa: SLF001
    for name in module.parametrizations:
        parametrize._inject_property(module, name)  # noqa: SLF001


def _same(value: object) -> object:
    return value

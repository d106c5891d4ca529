"""Unpickles the pickle of a parcel, with its tensors, into a namespace."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from distmagic.remote.values.reductions import classes, placeholders
from distmagic.remote.values.storages import TensorLoader


class Loader(pickle.Unpickler):
    """An unpickler with the placeholders bound to one parcel's memory and one namespace.

    The classes `kept` stay as they are: a result's copy of a class has other globals and a rank's
    values.
    """

    def __init__(
        self,
        file: Any,
        buffers: Any,
        tensors: TensorLoader,
        namespace: dict[str, Any],
        kept: frozenset[type] = frozenset(),
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._kept = kept

        def weak(referent: object, make: Any) -> Any:
            """Return a weak reference to an object that lives as long as the namespace; a dead one
            to None.
            """
            if referent is None:
                return make(set())
            namespace.setdefault("__referred__", []).append(referent)
            return make(referent)

        # Not a method of this object: in a reference cycle, the loaded value would live until a
        # garbage collection.
        self._own: dict[str, Callable[..., Any]] = {
            "tensor": tensors.tensor,
            "storage": tensors.storage,
            "main": lambda: namespace,
            "weak": weak,
        }

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the object for a name in the pickle."""
        if module == placeholders.__name__ and name in self._own:
            return self._own[name]
        found = super().find_class(module, name)
        return classes.when_loaded(name, found, self._kept)

"""Functions that the pickle of a parcel names.

The parcel's loader calls its own functions of these names instead.

They stand for the parcel's memory and for the loading `__main__`, which only the loader has.
"""

from __future__ import annotations

import pickle
from typing import Any

_ONLY = "a parcel is opened by parcel.load only"


def tensor(*_: object) -> Any:
    """Return a tensor by its number in the parcel's table."""
    raise pickle.UnpicklingError(_ONLY)


def storage(*_: object) -> Any:
    """Return a storage by its number in the parcel's table."""
    raise pickle.UnpicklingError(_ONLY)


def main() -> dict[str, Any]:
    """Return the globals of `__main__`."""
    raise pickle.UnpicklingError(_ONLY)


def weak(*_: object) -> Any:
    """Return a weak reference to an object, made by a function.

    The object lives as long as `__main__`.
    """
    raise pickle.UnpicklingError(_ONLY)


class _Main(dict[str, Any]):
    """Stands for the globals of `__main__` in a pickle."""


MAIN = _Main(__name__="__main__")  # not empty: cloudpickle would fill an empty one

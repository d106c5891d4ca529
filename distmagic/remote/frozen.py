"""`@frozen` makes a class a frozen dataclass whose fields are keywords, as nearly all records of
distmagic are.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field

if typing.TYPE_CHECKING:
    from typing_extensions import dataclass_transform as dataclass_transform  # noqa: PLC0414  # for codec.py
else:  # Python 3.10 has none, and nothing but type checkers needs it
    dataclass_transform = lambda **_: lambda decorator: decorator  # noqa: E731


_C = typing.TypeVar("_C")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))  # fmt: skip
def frozen(cls: type[_C]) -> type[_C]:
    """Make a class a frozen dataclass whose fields are keywords."""
    return dataclass(frozen=True, kw_only=True)(cls)

"""Notes about a parcel, made while it is packed: what is in it, and what it needs."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from distmagic.remote.wire.parts import Blob


@dataclass
class Seen:
    """Notes about a parcel: the code in it, the modules that it needs when loaded, its SHA-256, its
    side files.

    `annotated` are names in string annotations; `has_gradients`: of some tensor. `only` and
    `takes_gradients` are requests: functions go with these globals (None: with all), tensors with
    their gradients.
    """

    codes: list[CodeType] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    sha256: Any = field(default_factory=hashlib.sha256)
    side_files: list[Blob] = field(default_factory=list)
    only: Container[str] | None = None
    has_gradients: bool = False
    takes_gradients: bool = False

"""A module of `remote/keeper/` as one argument of `python3 -c`: it runs where nothing of ours is yet. Pure."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import zlib
from collections.abc import Mapping
from pathlib import Path


def command(python: str, role: str, request: Mapping[str, object]) -> tuple[str, ...]:
    """Return the argv that runs the module `role` ("usher" or "keeper") with this request.

    The role is an argument too, so that `ps` shows whose process it is.
    """
    return (
        python,
        "-u",
        "-c",
        _one_line(role),
        f"distmagic-{role}",
        json.dumps(request),
    )


@functools.cache
def _one_line(role: str) -> str:
    spec = importlib.util.find_spec(f"distmagic.remote.keeper.{role}")
    assert spec is not None
    assert spec.origin is not None
    packed = base64.b64encode(zlib.compress(Path(spec.origin).read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"

"""What a host may say at most. What goes beyond is cut, so that no host can fill this machine's memory. Pure.

A host of ours stays below all of this by itself; what is cut here was sent by one that is broken, or hostile.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

from distmagic.errors import ProtocolError
from distmagic.remote.wire import protocol

SHORT_LINE_BYTES = 4096  # in a line of this length nothing is too long
_CHARS = 2000  # of any text but these
_CHARS_OF = {
    (protocol.Output, "text"): 1 << 18,
    (protocol.Failure, "message"): 40_000,
    (protocol.Failure, "traceback"): 150_000,
    (protocol.Ended, "meaning"): 40_000,
}
_ITEMS = 1000  # of any list or table but these
_ITEMS_OF = {
    (protocol.JobListing, "hosts"): 10_000,
    (protocol.NodeAdded, "hosts"): 10_000,
    (protocol.StartNode, "hosts"): 10_000,
    (protocol.StartNode, "side_files"): 10_000,
    (protocol.JoinTemplate, "sizes"): 10_000,
    (protocol.MissingBlobs, "sha256"): 10_000,
}
MOST_JOBS = 10_000  # of one host
_NAME_CHARS = 200  # of a metric


def limited(message: protocol.Message) -> protocol.Message:
    """Return a message that was read from a host with all its texts, lists and tables within their limits."""
    kind = type(message)
    changed = {}
    for field in fields(message):
        old = getattr(message, field.name)
        new = _limited(old, _CHARS_OF.get((kind, field.name), _CHARS), _ITEMS_OF.get((kind, field.name), _ITEMS))
        if new is not old:
            changed[field.name] = new
    return replace(message, **changed) if changed else message


def _limited(value: Any, chars: int, items: int) -> Any:
    if isinstance(value, str):
        return value[:chars]
    if isinstance(value, tuple):
        return tuple(_limited(item, _CHARS, _ITEMS) for item in value[:items]) if value else value
    if isinstance(value, dict):
        return {name[:_NAME_CHARS]: value[name] for name in list(value)[:items]}
    return limited(value) if is_dataclass(value) else value


def first_reply(text: bytes, host: str) -> dict[str, object]:
    """Return what a host says of itself before our own half runs there. Raises `ProtocolError`."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise ProtocolError(f"{host} sent {text[:80]!r} in place of its first answer.")
    return {name: value[:500] if isinstance(value, str) else value for name, value in reply.items()}


def version(reply: dict[str, object]) -> tuple[int, ...]:
    """Return the version of a host's Python."""
    found = reply.get("python")
    return tuple(part for part in found if isinstance(part, int)) if isinstance(found, list) else ()

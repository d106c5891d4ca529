"""Makes the ranks of a run meet at its own store, whatever address the program names, with a prefix
per group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit


def rendezvous(
    given: Mapping[str, str],
    next_prefix: Callable[[], str],
    original: Any,
    url: Any,
    rank: int = -1,
    world_size: int = -1,
    **more: Any,
) -> Iterator[Any]:
    """Replace torch's `rendezvous` (`original`): use the store of the run if the program names
    another one for all ranks.

    `given` are torchrun's variables. The keys of a group of all ranks start with `next_prefix`,
    unless that is "".
    """
    if _is_elsewhere(given, url, rank, world_size):
        place = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        if given["RANK"] == "0":
            sys.stderr.write(
                f"distmagic: the program names {':'.join(map(str, _asked(url)))} for its process group. Under torchrun no rank "
                f"listens on that port. The ranks meet at {':'.join(place.values())}, as torchrun has set MASTER_ADDR and "
                "MASTER_PORT: leave both as they are.\n"
            )
        os.environ.update(place)
        url = "env://"
    for store, own_rank, size in original(url, rank, world_size, **more):
        is_of_all = str(size) == given.get("WORLD_SIZE")
        prefix = next_prefix() if is_of_all else ""
        if prefix:
            store = sys.modules["torch.distributed"].PrefixStore(prefix, store)  # noqa: PLW2901
        yield store, own_rank, size


def _asked(url: Any) -> list[str | None]:
    """Return the address and the port of the store that the program names."""
    parts = urlsplit(str(url))
    if parts.scheme == "tcp":
        return [*parts.netloc.rsplit(":", 1)]
    return [os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")]


def _is_elsewhere(
    given: Mapping[str, str], url: Any, rank: int, world_size: int
) -> bool:
    """Whether all ranks of the run would meet at another store than torchrun's."""
    now = os.environ
    parts = urlsplit(str(url))
    ranks = [
        now.get("RANK") if rank == -1 else str(rank),
        now.get("WORLD_SIZE") if world_size == -1 else str(world_size),
    ]
    has_own_ranks = parts.scheme not in ("env", "tcp") or "rank=" in parts.query
    return (
        not has_own_ranks
        and ranks == [given.get("RANK"), given.get("WORLD_SIZE")]
        and _asked(url) != [given.get("MASTER_ADDR"), given.get("MASTER_PORT")]
        and now.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )

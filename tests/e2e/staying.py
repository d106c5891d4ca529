"""Ranks that stay, driven without a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distmagic.api import session
from distmagic.connection.prompts import NotebookAsker
from distmagic.outcome.run import Run
from distmagic.request import flags
from distmagic.request.access import Access
from distmagic.request.cells.cell import parse_cell
from distmagic.request.flags import Defaults
from distmagic.request.hosts import parse_hosts
from distmagic.session.place import place_of
from distmagic.staying.ranks import CellRequest, Ranks
from distmagic.staying.starting import start
from tests.e2e.runner import Watch


@contextmanager
def ranks_that_stay(
    way: Access, hosts: str, **notebook: object
) -> Iterator[tuple[Ranks, Callable[[str, Watch], Run]]]:
    """Give ranks, and a function that runs a cell on all of them. `notebook` has the names of the notebook."""
    request = flags.parse_line("--stay ranks", Defaults())
    asker = NotebookAsker(can_ask=False)
    place = place_of(session(), parse_hosts(hosts), way, asker, request.spec)
    limit_bytes = request.payload_limit_bytes
    first = parse_cell("pass", whole=True)
    ranks = start(place, session(), request, first, limit_bytes, can_type=True)

    def run_cell(text: str, screen: Watch) -> Run:
        plan = parse_cell(text, whole=True, filename="cell")
        request = CellRequest(plan=plan, notebook=notebook, labels={})
        return ranks.run_cell(request, screen)

    try:
        yield ranks, run_cell
    finally:
        ranks.end()

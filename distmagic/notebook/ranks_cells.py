"""Cells of `%%ranks`, which run on ranks that stay.

The first one starts the ranks; later ones must fit them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import UsageError
from distmagic.notebook import run_names
from distmagic.notebook.settings import Notebook
from distmagic.remote.values.call import is_of_user
from distmagic.remote.wire.clipping import LEFT_OUT
from distmagic.render.quantities import duration, plural
from distmagic.request import flags
from distmagic.request.cells.cell import CellPlan

if TYPE_CHECKING:
    from distmagic.staying.ranks import Ranks


def run(
    notebook: Notebook,
    request: flags.Request,
    plan: CellPlan,
    labels: Mapping[str, str],
    names: Sequence[str],
) -> object:
    """Run a cell on ranks that stay; start them if none have this name.

    `labels` are those of the notebook's cells, `names` those that get the run.
    """
    from distmagic.staying.ranks import CellRequest

    assert notebook.shell is not None
    assert request.stay is not None
    ranks = notebook.ranks.get(request.stay)
    if ranks is not None and ranks.done:
        del notebook.ranks[request.stay]
        ranks.raise_end()
    screen = notebook.screen()
    if ranks is None:
        ranks = _started(notebook, request, plan, can_type=screen.can_type())
    else:
        _check_same(notebook, request, ranks)
        if request.stay_idle_s not in (None, ranks.idle.limit_s) and ranks.is_kept:
            limit = duration(ranks.idle.limit_s)
            raise UsageError(
                f"The hosts end the {ranks.label} after the time of their first cell, {limit}.",
                "Leave --stay-idle out.",
            )
        if request.stay_idle_s is not None:
            ranks.idle.limit_s = request.stay_idle_s
    # Moves it to the end, as the last one used.
    notebook.ranks.pop(request.stay, None)
    notebook.ranks[request.stay] = ranks
    run_names.keep(notebook.shell, request.stay, ranks)
    values = notebook.shell.user_ns
    own = values.keys() - notebook.shell.user_ns_hidden.keys()
    of_cell = CellRequest(
        plan=plan,
        notebook={
            name: values[name]
            for name in own
            if is_of_user(name) and values[name] is not ranks
        },
        labels=labels,
        ranks=request.ranks,
        variable=run_names.variable_of(names),
    )

    def run_cell() -> object:
        try:
            return ranks.run_cell(of_cell, screen)
        except BaseException:
            if ranks.done:  # this error reports it
                notebook.ranks.pop(ranks.name, None)
            raise

    return run_names.bound(notebook.shell, names, run_cell)


def _started(
    notebook: Notebook, request: flags.Request, plan: CellPlan, *, can_type: bool
) -> Ranks:
    """Return new ranks that stay."""
    from distmagic.session.place import place_of
    from distmagic.staying.starting import start

    part = notebook.part(request)
    if part is not None:
        raise part.refusal("--stay")
    hosts, access = notebook.way(request)
    session = notebook.session()
    asker = NotebookAsker(can_ask=False)
    place = place_of(session, request.allocation or hosts, access, asker, request.spec)
    limit_bytes = request.payload_limit_bytes
    return start(place, session, request, plan, limit_bytes, can_type=can_type)


def _check_same(notebook: Notebook, request: flags.Request, ranks: Ranks) -> None:
    """Raise `UsageError` if a later cell requests other hosts or other settings than its ranks
    have.
    """
    plain = notebook.request()
    if ranks.is_attached:
        # Of what their first cell requested, only the hosts are known here.
        hosts = tuple(host.name for host in request.hosts or ())
        if hosts in ((), ranks.hosts):
            return
        raise UsageError(
            f"The {ranks.label} are on {', '.join(ranks.hosts)}, and this line asks for other hosts.",
            "Leave its flags out.",
        )
    for name in ("hosts", "hostfile", "allocation", "spec", "access"):
        value = getattr(request, name)
        if value not in (getattr(plain, name), getattr(ranks.request, name)):
            raise UsageError(
                f"The {ranks.label} stay as they were started, and this line asks for another {name}.",
                f"Leave its flags out; or end them first: %distributed end {ranks.name}",
            )


def whole_text(notebook: Notebook, name: str, cell: str) -> str:
    """Return the text of all cells so far of the ranks of this name, and of this one.

    Raises `UsageError`.
    """
    ranks = notebook.ranks.get(name)
    before = ranks.program if ranks is not None else []
    if failed := sum(one.startswith("# ") for one in before):
        cells = plural(failed, "failed cell")
        notebook.say(f"{cells} left out: comments in the program have the text.")
    if any(LEFT_OUT.search(one) for one in before):
        raise UsageError(
            f"A cell of the ranks called {name} is too long: this kernel does not have all of its text.",
            "Export the ranks from the kernel that ran it.",
        )
    return "\n\n".join(one.rstrip() for one in [*before, cell])

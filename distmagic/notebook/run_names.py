"""The variables that get a run: those named in its line or cell, else `_run`."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distmagic.errors import RunError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.staying.ranks import Ranks

LAST_RUN = "_run"  # the last run, if it got no other name


def variable_of(names: Sequence[str]) -> str:
    """Return the variable name for messages about a run with these names."""
    return names[-1] if names else LAST_RUN


def bind(shell: InteractiveShell | None, names: Sequence[str], run: object) -> None:
    """Assign the run to its names, one of which may be an item or an attribute, such as
    `runs["a"]`.

    Only a run without a name is assigned to `_run`, which would otherwise keep it after `del run`.
    A terminal has no shell, and thus no variables. A note warns about a name that had another
    value, as in `model = train(model)`.
    """
    if shell is None:
        return
    for name in names:
        older = shell.user_ns.get(name)
        is_run = str(type(older).__module__).startswith("distmagic.")
        if older is not None and not is_run:
            print(
                f"! {name} is the run now, and no longer a {type(older).__name__}. What a rank has returned: "
                f"{name}.results[0]."
            )
    shell.push({LAST_RUN: run}, interactive=False)
    for name in names:  # if one fails, the run is assigned to `_run`
        exec(f"{name} = {LAST_RUN}", shell.user_global_ns, shell.user_ns)  # noqa: S102  # the cell asks for it
    if names and LAST_RUN not in names:
        shell.user_ns.pop(LAST_RUN)
        shell.user_ns_hidden.pop(LAST_RUN)


def keep(shell: InteractiveShell, name: str, ranks: Ranks) -> None:
    """Assign ranks that stay to their name; a note warns if it had another value."""
    older = shell.user_ns.get(name)
    if older is not None and type(older) is not type(ranks):
        print(
            f"! {name} stands for the ranks now, and no longer for a {type(older).__name__}."
        )
    shell.push({name: ranks})


def bound(
    shell: InteractiveShell | None, names: Sequence[str], start: Callable[[], object]
) -> object | None:
    """Start a run and assign it to its names, even if it fails; return it only if it has none, or
    Out would keep it.
    """
    try:
        run = start()
    except RunError as error:
        if error.run is not None:
            bind(shell, names, error.run)
        raise
    if run is not None:  # None: a dry run
        bind(shell, names, run)
    return None if names else run

"""Runs a cell's own statements in the notebook, and warns about statements that were meant for the
ranks.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.errors import UsageError
from distmagic.payload.refused import made_alone
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.request.cells import notebook_effects
from distmagic.request.cells.cell import CellPlan
from distmagic.request.cells.library_changes import Tables, library_changes
from distmagic.request.cells.notebook_effects import LocalEffect
from distmagic.request.cells.used_names import names_evaluated, names_wanted

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.state.model import RunState

_WHOLE_NOTE = "This statement ran in the notebook; with %%distributed --whole the cell runs on the hosts alone."
_NO_RANK_NOTE = (
    f"This statement ran in the notebook, which is not a rank. {notebook_effects.CURE}"
)
_ARGPARSE_HINT = (
    'Give parse_args a list, such as parse_args(["--lr", "0.1"]); or move it into the function; or write %%distributed '
    "--whole, and every rank runs the whole cell. %%distributed --script -- --lr 0.1 does that with these arguments."
)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_OFFERED = ""  # stands for the note among the names of what was loaded
_OF_TORCH = ("environment variable", "Default process group has not been initialized")


def run_local(shell: InteractiveShell, plan: CellPlan, given: Collection[str]) -> None:
    """Run the cell's own statements in the notebook, as without the magic, and print what they
    changed in the notebook alone.

    `given` are the variables that the ranks receive from the request. An error of a statement is
    raised unchanged, with a note if it arose because the notebook is not a rank. Raises
    `UsageError` in these cases:

    - before any statement runs: the call uses an object that each rank must create itself;
    - argparse ended the cell;
    - after the statements: the call uses an undefined name, or its arguments don't fit the
      function.
    """
    _reject_made_here(shell, plan)
    effects = notebook_effects.local_effects(plan.local, given)
    module = shell.transform_ast(ast.Module(list(plan.local), []))
    code = shell.compile(module, plan.filename, "exec")
    try:
        exec(code, shell.user_global_ns, shell.user_ns)  # noqa: S102  # to run the cell is the purpose
    except BaseException as error:
        if (refusal := _of_argparse(error, plan.filename)) is not None:
            raise refusal from None
        if cause := _note_on(error, plan.filename, effects):
            if sys.version_info >= (3, 11):
                error.add_note(cause)
            else:
                print(cause, file=sys.stderr)
        _show_from(error.__traceback__, error, shell)
        raise
    _reject_names(plan, {*shell.user_ns, *dir(builtins), "__file__"})
    _reject_arguments(plan, shell.user_ns)
    if effects:
        print(f"! {notebook_effects.note(effects)}")


def _reject_made_here(shell: InteractiveShell, plan: CellPlan) -> None:
    """Raise `UsageError` if the call uses an object that each rank must create, before the notebook
    creates it.
    """
    taken = names_evaluated(plan).keys()
    origins = _origins(shell.user_ns, plan)
    for statement in plan.local:
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign) or not isinstance(value, ast.Call):
            continue
        first, _, rest = notebook_effects.dotted(value.func).partition(".")
        what = made_alone(f"{origins.get(first, '')}.{rest}".strip("."))
        names = {one.id for one in statement.targets if isinstance(one, ast.Name)}
        for name in names & taken if what else ():
            raise UsageError(
                f"line {statement.lineno} would make `{name}`, {what}, in the notebook, which is not a rank, and the call "
                "takes it to the ranks; nothing has run.",
                notebook_effects.CURE,
            )


def _origins(namespace: Mapping[str, object], plan: CellPlan) -> dict[str, str]:
    """Return the full names of modules and classes, by their names in the cell."""
    found = {}
    for name, value in namespace.items():
        if isinstance(value, type):
            found[name] = f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, ModuleType):
            found[name] = value.__name__
    for statement in plan.local:
        if isinstance(statement, _NAMED):
            found[statement.name] = ""
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                whole, name = alias.name, alias.asname or alias.name
                if isinstance(statement, ast.ImportFrom):
                    whole = f"{statement.module}.{whole}"
                elif not alias.asname:
                    whole = name = name.partition(".")[0]
                found[name] = whole
    return found


def reject_names_early(shell: InteractiveShell, plan: CellPlan) -> None:
    """Raise `UsageError` for an undefined name in the call, before the cell's own statements run.

    Only if these statements call nothing, because a call may define names.
    """
    for statement in plan.local:
        for node in notebook_effects.executed(statement):
            if isinstance(node, ast.Call):
                return  # it may define any name
    made = [one.name for one in plan.local if isinstance(one, _NAMED)]
    found = names_evaluated(plan).keys() - names_wanted(plan).keys()
    _reject_names(plan, {*shell.user_ns, *made, *found})


def _reject_names(plan: CellPlan, known: Collection[str]) -> None:
    """Raise `UsageError` for an unknown name in the call: each rank would raise NameError."""
    for name, lineno in names_evaluated(plan).items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"line {lineno}: {name} is not defined, and the call needs it; nothing was started.",
                f"Did you mean {close[0]}?" if close else "",
            )


def _reject_arguments(plan: CellPlan, namespace: Mapping[str, object]) -> None:
    """Raise `UsageError` where the arguments don't fit the cell's function: each rank would raise
    TypeError.
    """
    call = plan.call.value if isinstance(plan.call, ast.Await) else plan.call
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return
    function = namespace.get(call.func.id)
    keywords = {one.arg: one.value for one in call.keywords if one.arg is not None}
    is_open = len(keywords) < len(call.keywords) or any(
        isinstance(one, ast.Starred) for one in call.args
    )
    if is_open or not isinstance(function, FunctionType):
        return
    try:
        inspect.signature(function, follow_wrapped=False).bind(*call.args, **keywords)
    except TypeError as error:
        raise UsageError(
            f"line {call.lineno}: `{ast.unparse(call)}` does not fit the function: {error}; nothing was started."
        ) from None


def note_library_changes(
    shell: InteractiveShell,
    is_lost: Callable[[LocalEffect], bool],
    filename: str,
    labels: Mapping[str, str],
    noted: set[tuple[str, int, str]],
) -> None:
    """Print once which library changes, also by the cell `filename`, are missing on ranks."""
    found = []
    texts = ["".join(linecache.getlines(name)) for name in labels]
    tables: Tables = {}
    for index, (name, label) in enumerate(labels.items()):
        shown = "" if name == filename else label
        changes = library_changes(
            texts[index], shown, shell.user_ns, texts[index + 1 :], tables
        )
        for effect in changes:
            key = (name, effect.lineno, effect.name)
            if key not in noted and is_lost(effect):
                noted.add(key)
                found.append(effect)
    if found:
        print(f"! {notebook_effects.note(found)}")


def note_loading(state: RunState, loaded: set[str]) -> None:
    """Print once, if a run spent most of its time in loading what an earlier one has `loaded`, that
    ranks can stay.
    """
    ends = [worker.ended for worker in state.workers.values() if worker.ended]
    slowest = max(ends, key=lambda end: end.loading_s, default=None)
    if slowest is None or not slowest.loaded:
        return
    if slowest.loaded in loaded and _OFFERED not in loaded:
        loaded.add(_OFFERED)
        print(
            f"rank {slowest.rank} loaded {sanitize.line(slowest.loaded)}, as in an earlier run: {slowest.loading_s:.0f} s. "
            "Ranks that stay load it once (%distributed help ranks)."
        )
    loaded.add(slowest.loaded)


def _of_argparse(error: BaseException, filename: str) -> UsageError | None:
    """Return the error for argparse's exit; None for any other error. argparse has printed the
    usage.
    """
    places = [
        (one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)
    ]
    is_of_argparse = any(name.endswith("argparse.py") for name, _ in places)
    if not isinstance(error, SystemExit) or not is_of_argparse:
        return None
    return UsageError(
        f"line {dict(reversed(places)).get(filename, 1)}: argparse read the command line of the notebook's own kernel: this statement ran "
        "in the notebook.",
        _ARGPARSE_HINT,
    )


def _note_on(
    error: BaseException, filename: str, effects: Sequence[LocalEffect]
) -> str:
    """Return a note for an error whose cause is that the notebook is no rank, or lacks something of
    hosts; else "".
    """
    if isinstance(error, ModuleNotFoundError):
        return _WHOLE_NOTE
    frames = traceback.extract_tb(error.__traceback__)
    lineno = next((one.lineno for one in frames if one.filename == filename), None)
    is_of_rank = isinstance(error, SystemExit)
    if isinstance(error, KeyError):
        is_of_rank = any(one in TORCHRUN_VARIABLES for one in error.args[:1])
    elif isinstance(error, ValueError | RuntimeError):
        is_of_rank = any(words in str(error) for words in _OF_TORCH)
    for effect in effects:
        is_of_rank |= (
            effect.kind in ("rank", "argv", "group") and lineno in effect.lines
        )
    return _NO_RANK_NOTE if is_of_rank else ""


def _show_from(
    tb: TracebackType | None, error: BaseException, shell: InteractiveShell
) -> None:
    """Make IPython show `error` starting at the cell's own frames, without those of the magic."""
    own = tb.tb_next if tb is not None else None
    if own is None or hasattr(error, "_render_traceback_"):
        return

    def render() -> list[str]:
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(error), error, own, tb_offset=0
        )
        return lines

    # Even if the error's class forbids new attributes.
    object.__setattr__(error, "_render_traceback_", render)

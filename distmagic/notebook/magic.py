"""`%load_ext distmagic`: the magics `%%distributed` and `%distributed` of a notebook or of IPython
in a terminal.

A cell is executed in these steps. Parse the line and the cell, and start to connect to the hosts in
the background. Run the cell's own statements in the notebook. Pack the call, and launch it. An
error before the launch releases the hosts.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import ast
import linecache
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from distmagic import notebook_place
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.errors import PayloadTooLarge, UsageError
from distmagic.notebook import run_names
from distmagic.notebook.local_run import (
    note_library_changes,
    note_loading,
    reject_names_early,
    run_local,
)
from distmagic.notebook.settings import MAGICS, RANKS, Notebook, say
from distmagic.remote.system import threads
from distmagic.remote.values.settings import MADE
from distmagic.request import flag_parser, flags
from distmagic.request.cells import cell as cells
from distmagic.request.cells.notebook_effects import LocalEffect
from distmagic.request.cells.shell_commands import with_commands
from distmagic.request.cells.used_names import names_wanted
from distmagic.request.config import settings_of
from distmagic.request.spec import check_system

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distmagic.outcome.detached import Detached
    from distmagic.outcome.run import Run
    from distmagic.payload.pack import Payload
    from distmagic.render.screen import Screen
    from distmagic.request.access import Access
    from distmagic.request.hosts import Hosts
    from distmagic.session.background import BackgroundRun

_ASKS_HELP = re.compile(r"%%(distributed|distmagic)\s+(-h|--help)\s*")
_SCRIPT_NAME = "cell.py"  # name of a whole cell as a script
_OWN_LINES = "running the cell's own lines in the notebook"
_OWN_LINES_FAILED = (
    "nothing was started: the cell's own lines did not come to their end"
)


class CellSyntaxError(UsageError):
    """The cell is no valid Python.

    `lines` are what IPython shows for a syntax error in any cell.
    """

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(f"line {error.lineno}: {error.msg}")
        self.lines = lines

    def _render_traceback_(self) -> list[str]:
        return self.lines


class Magics:
    """The two magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.config = settings_of(shell)
        self.notebook = Notebook(shell, self.config)
        # Library changes that were shown.
        self._noted: set[tuple[str, int, str]] = set()
        self._loaded: set[str] = set()  # what ranks of earlier runs have loaded
        self._is_first_cell = True
        self.matcher = _matcher(self.notebook)

    def line(self, line: str) -> object:
        """Set the notebook's hosts, start a playground, manage jobs.

        `%distributed` alone lists the commands.
        """
        from distmagic.notebook import commands

        # A message may be asked about as it is, with an apostrophe in it.
        is_question = line.startswith("help ")
        words = line.split() if is_question else flags.split(line)
        return commands.execute(self.notebook, words)

    def cell(self, line: str, cell: str) -> object | None:
        """Run the cell's last expression on every rank, under torchrun.

        All statements before it run in the notebook. The cell's value is the run: run.results,
        run.logs(rank), run.metrics. A run with a name, by an assignment or -o, is not the cell's
        value, because IPython's Out would keep it after `del`. `%distributed --help` lists the
        flags.
        """
        if flags.asks_help(line):
            print(flag_parser.help_text())
            return None
        request = flags.parse_line(line, self.config.defaults(os.environ))
        names = [request.output] if request.output else []
        from distmagic.notebook import ranks_cells

        if request.stay is not None and request.export is not None:
            cell = ranks_cells.whole_text(self.notebook, request.stay, cell)
        plan = self._read(cell, request)
        if request.export is not None:
            say(self._export(plan, request))
            return None
        if request.stay is not None:
            labels = _labels(self.shell)
            return ranks_cells.run(self.notebook, request, plan, labels, names)
        names[:0] = plan.targets
        reject_names_early(self.shell, plan)
        variable = run_names.variable_of(names)

        def start() -> Any:
            if request.workflow is not None:
                from distmagic.session.programs import run_workflow

                with closing(asker_of(self.shell)) as asker:
                    pack = partial(self._payload, plan, request, asker)
                    return run_workflow(request, self.notebook.screen, pack, variable)
            from distmagic.session.inside import digest_of

            return self.notebook.launch(
                request,
                partial(digest_of, "cell", line, cell),
                partial(self._run_on, request, plan, variable),
                before=partial(self._run_own, plan, request),
            )

        return run_names.bound(self.shell, names, start)

    def ranks(self, line: str, cell: str) -> object | None:
        """Run the whole cell on ranks that stay: `%%ranks [NAME] [0,4-7]`, with the flags of
        `%%distributed`.
        """
        if flags.asks_help(line):
            print(flag_parser.help_text("%%ranks [NAME] [0,4-7] [FLAGS]"))
            return None
        last = next(reversed(self.notebook.ranks), "ranks")
        return self.cell(shlex.join(flags.words_of_ranks(line, last)), cell)

    def late(self, line: str) -> None:
        """Raise `UsageError` for a `%%` magic that is not in a cell's first line: IPython treats it
        as a line magic.
        """
        del line
        raise UsageError(
            "A cell's magic stands on its first line, and this one has something above it.",
            "Move those lines below the magic, comments too; only a magic such as %%time or %%capture may stay above.",
        )

    def _run_on(
        self,
        request: flags.Request,
        plan: cells.CellPlan,
        variable: str,
        hosts: Hosts,
        access: Access,
    ) -> Run | Detached | BackgroundRun | None:
        """Run the cell on these hosts, or on those of its allocation; None for a dry run."""
        from distmagic.outcome.run import Run
        from distmagic.screens.announcing import announcing
        from distmagic.session.place import place_of

        session = self.notebook.session()
        with closing(asker_of(self.shell)) as asker:
            if request.dry_run:
                from distmagic.session.dry_run import start_commands

                first_links = session.reach(hosts, access, asker)
                say(start_commands(first_links, request.spec))
                return None

            def what() -> str:
                return "waits for your answer" if asker.is_asking else _OWN_LINES

            def pack(screen: Screen) -> Payload:
                # The first cell takes longest until its run can be shown.
                at_once, self._is_first_cell = self._is_first_cell, False
                with announcing(screen, what, _OWN_LINES_FAILED, at_once=at_once):
                    return self._payload(plan, request, asker)

            # The user may be away when the cell is over.
            of_run = NotebookAsker(can_ask=False) if request.background else asker
            # Connecting takes seconds, so it starts before the cell's own statements run.
            wanted = request.allocation or hosts
            left = place_of(session, wanted, access, of_run, request.spec).run(
                partial(self.notebook.screen, in_background=request.background),
                pack,
                variable,
                in_background=request.background,
            )
        if isinstance(left, Run):
            note_loading(left.state, self._loaded)
        return left

    def _export(self, plan: cells.CellPlan, request: flags.Request) -> str:
        """Write the exported folder, and return a message for the user.

        The program of ranks that stay is all their cells, and this one.
        """
        from distmagic.exports import cell_script
        from distmagic.session import exporting

        hosts = self.notebook.choose(request).hosts
        self._run_own(plan, request)
        # A kernel gives a cell that runs again its old file name.
        try:
            text = cell_script.of_cell(plan, self.shell.user_ns, self._texts())
            program = exporting.of_script(text, request)
        except cell_script.NoProgram as no_program:
            if request.stay is not None:
                raise UsageError(
                    f"The cells of the ranks called {request.stay} are not one program: {no_program.why}.",
                    "Define what is missing in a cell of the ranks.",
                ) from None
            with closing(asker_of(self.shell)) as asker:
                payload = self._pack(plan, request, asker)
            program = exporting.of_payload(payload, no_program.why, request)
        return exporting.write(program, request.stay or "cell", request, hosts)

    def _texts(self) -> dict[str, str]:
        """Return the texts of all cells by their files' names, in the order of their numbers."""
        labels = _labels(self.shell)

        def number(name: str) -> int:
            digits = "".join(filter(str.isdigit, labels[name]))
            return int(digits or 0)

        names = sorted(labels, key=number)
        return {name: "".join(linecache.getlines(name)) for name in names}

    def _read(self, cell: str, request: flags.Request) -> cells.CellPlan:
        """Return the parsed cell. Raises `UsageError`."""
        stays = request.stay is not None
        whole = stays or request.whole or request.script
        # The magic's own line is a comment, so that line numbers are those of the cell.
        raw = f"#%%{MAGICS[0]}\n{cell}"
        first = next((line for line in cell.splitlines() if line.strip()), "")
        if first.startswith("%%"):
            raise UsageError(
                f"{first.split()[0]} is a second magic of this cell, under %%{MAGICS[0]}.",
                f"Write {first.split()[0]} above %%{MAGICS[0]}, or leave it out.",
            )
        transform = self.shell.transform_cell
        if stays:
            text = with_commands(raw, transform)
        else:
            text = raw if whole else transform(raw)
        filename = self._remember(raw, text)
        try:
            plan = cells.parse_cell(text, whole=whole, filename=filename)
        except SyntaxError as error:
            lines = self.shell.SyntaxTB.structured_traceback(type(error), error, [])
            raise CellSyntaxError(error, lines) from None
        if plan.call is None and not stays:
            self._reject_notebook_names(plan)
        return plan

    def _remember(self, raw: str, text: str) -> str:
        """Make `text` available to tracebacks, and return its file name.

        It is the name of the visible cell if the magic is in its first line, so that the kernel's
        debugger finds its lines.
        """
        result = getattr(self.shell.displayhook, "exec_result", None)
        number, visible = self.shell.execution_count, ""
        if result is not None:
            number, visible = result.execution_count, result.info.raw_cell
        is_this = visible.startswith(("%%dist", "%%ranks")) and _body(visible) == _body(
            raw
        )
        filename: str = self.shell.compile.cache(
            text, number, raw_code=visible if is_this else raw
        )
        return filename

    def _reject_notebook_names(self, plan: cells.CellPlan) -> None:
        """Raise `UsageError` if a cell that runs whole on every rank uses a name of the
        notebook.
        """
        own = self.shell.user_ns.keys() - self.shell.user_ns_hidden.keys()
        for name, lineno in names_wanted(plan).items():
            if name in own:
                raise UsageError(
                    f"line {lineno}: {name} is the notebook's, and a cell that runs whole on every rank can't see it.",
                    f"Define {name} in this cell; or put the statements into a function, and end with its call.",
                )

    def _payload(
        self,
        plan: cells.CellPlan,
        request: flags.Request,
        asker: NotebookAsker,
    ) -> Payload:
        """Run the cell's own statements, and pack its call."""
        self._run_own(plan, request)
        payload = self._pack(plan, request, asker)
        if plan.call is not None:
            is_usual = request.spec.no_settings or request.workflow is not None

            def is_lost(effect: LocalEffect) -> bool:
                if effect.kind == "seed":
                    return True
                if effect.kind == "variable":
                    is_ours = effect.name.startswith("DISTMAGIC_")
                    return effect.name not in dict(request.spec.env) and not is_ours
                is_made = MADE.search(effect.words) and not is_usual
                return effect.name in payload.uses and not is_made

            labels = _labels(self.shell)
            note_library_changes(
                self.shell, is_lost, plan.filename, labels, self._noted
            )
        return payload

    def _pack(
        self,
        plan: cells.CellPlan,
        request: flags.Request,
        asker: NotebookAsker,
    ) -> Payload:
        """Pack the cell's call; for a whole cell its text, with the arguments of a script.

        Above the size limit it asks the user; if no user can answer, it raises `PayloadTooLarge`.
        """
        from distmagic.payload.pack import pack_call, pack_whole

        limit_bytes, labels = request.payload_limit_bytes, _labels(self.shell)
        if plan.call is None:
            argv = (_SCRIPT_NAME, *request.args) if request.script else ()
            return pack_whole(
                plan.text,
                filename=_SCRIPT_NAME,
                labels={_SCRIPT_NAME: labels.get(plan.filename, plan.filename)},
                limit_bytes=limit_bytes,
                argv=argv,
                title=shlex.join(argv) or "the whole cell",
            )
        thunk = cells.make_thunk(
            plan, self.shell.user_ns, plan.filename, self.shell.compile.flags
        )
        pack = partial(pack_call, thunk, labels=labels, title=ast.unparse(plan.call))
        try:
            return pack(limit_bytes=limit_bytes)
        except PayloadTooLarge as error:
            if not asker.confirm(f"{error.message} Send it anyway?"):
                raise
        return pack(limit_bytes=sys.maxsize)

    def _run_own(self, plan: cells.CellPlan, request: flags.Request) -> None:
        """Run the cell's statements for the notebook: all before its call."""
        if plan.call is not None:
            run_local(self.shell, plan, dict(request.spec.env))


def _matcher(notebook: Notebook) -> Callable[[Any], dict[str, Any]]:
    """Return IPython's completion function; on a line of these magics it suppresses other
    completions.
    """
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="distmagic")  # type: ignore[untyped-decorator]
    def complete(context: Any) -> dict[str, Any]:
        from distmagic.notebook.completion import Completer

        completer = Completer(hosts=notebook.host_names, jobs=notebook.job_names)
        found = completer.candidates(context.text_until_cursor)
        if found is None:
            return {"completions": []}
        fitting = [text for text in found if text.startswith(context.token)]
        completions = [SimpleCompletion(text, type="distmagic") for text in fitting]
        return {"completions": completions, "suppress": True, "ordered": True}

    return complete  # type: ignore[no-any-return]


def _help_of_cell(lines: list[str]) -> list[str]:
    """Turn a cell with only `--help` into a line magic, because IPython passes no empty cell to a
    cell magic.
    """
    first, *rest = lines or [""]
    if _ASKS_HELP.fullmatch(first) and not "".join(rest).strip():
        return [first.removeprefix("%")]
    return lines


def _body(cell: str) -> str:
    return cell.partition("\n")[2].rstrip()


def _labels(shell: InteractiveShell) -> dict[str, str]:
    """Return IPython's label of each cell's file so far: "Cell In[3]"."""
    names = {one: shell.compile.format_code_name(one) for one in list(linecache.cache)}
    return {one: " ".join(label) for one, label in names.items() if label is not None}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics.

    If another extension has registered `%%distributed`, it keeps the name.
    """
    check_system()
    magics = Magics(shell)
    shell.configurables.append(magics.config)
    owner = _other_owner(shell)
    if owner:
        print(
            f"%%{MAGICS[0]} belongs to {owner} in this notebook: for distmagic write %%{MAGICS[1]} and %{MAGICS[1]}."
        )
    for name in MAGICS[1:] if owner else MAGICS:
        for kind, magic in (("line", magics.line), ("cell", magics.cell)):
            shell.register_magic_function(magic, kind, name)
        # A marker that IPython uses if `%%distributed` is not the first magic of the cell.
        shell.register_magic_function(magics.late, "line", f"%{name}")
    shell.register_magic_function(magics.ranks, "cell", RANKS)
    shell.register_magic_function(magics.late, "line", f"%{RANKS}")
    shell.Completer.custom_matchers.append(magics.matcher)
    shell.input_transformers_cleanup.append(_help_of_cell)
    notebook_place.register(magics.notebook.place)
    threads.begin("imports", _import_for_first_cell)


def _import_for_first_cell() -> None:
    """Import what a first cell or command needs, while the user writes it.

    It takes a tenth of a second, for which `%load_ext` does not wait.
    """
    import distmagic.notebook.completion
    import distmagic.notebook.ranks_cells
    import distmagic.session.inside
    import distmagic.session.place  # noqa: F401
    from distmagic.request import systems

    # Those of other packages are loaded when they are needed: some can only be on the main thread.
    if not systems.other_packages():
        systems.systems()


def _other_owner(shell: InteractiveShell) -> str:
    """Return the package of another extension that has registered the first of the names, "" if
    none.
    """
    for table in shell.magics_manager.magics.values():
        magic = table.get(MAGICS[0])
        if magic is not None and not _is_ours(magic):
            module = getattr(magic, "__module__", None) or "another extension"
            return str(module).partition(".")[0]
    return ""


def _is_ours(magic: object) -> bool:
    return type(getattr(magic, "__self__", None)).__module__ == __name__


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister what `load_ipython_extension` registered, and close connections and playground."""
    owners = set()
    for table in shell.magics_manager.magics.values():
        for name, magic in list(table.items()):
            if _is_ours(magic):
                owners.add(table.pop(name).__self__)
    for magics in owners:
        magics.notebook.close()
        notebook_place.unregister(magics.notebook.place)
        shell.Completer.custom_matchers.remove(magics.matcher)
        shell.input_transformers_cleanup.remove(_help_of_cell)
        shell.configurables.remove(magics.config)

"""The architecture, as a table that is checked: who may import whom, and which foreign library lives in which file."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "distmagic"

# From the bottom up: a module imports from its own package and from packages on earlier lines, never from later ones.
# This table is the architecture; each package's `__init__` says what happens there, and what never does.
PACKAGES = (
    "remote",
    "remote.wire",
    "remote.system",
    "remote.records",
    "remote.values",
    "remote.gang",
    "remote.rank",
    "remote.engine",
    "remote.agent",
    "remote.contact",
    "remote.keeper",
    "sanitize",
    "errors",
    "request",
    "payload",
    "names",
    "notebook_place",
    "planning",
    "exports.on_nodes",
    "exports",
    "state",
    "render",
    "comparison",
    "transports",
    "transports.ssh",
    "connection",
    "connection.requests",
    "inside",
    "runner",
    "systems.slurm",
    "systems.skypilot",
    "systems.osmo",
    "systems.sing",
    "systems.torchrun",
    "systems",
    "screens",
    "session",
    "playground",
    "api",
    "notebook",
    "cli",
    "distmagic",
)

# Who may import a library that isn't Python's own. "lazily": only inside functions.
FOREIGN = {
    "IPython": "distmagic notebook.magic notebook.local_run notebook.run_names notebook.settings connection.prompts "
    "session.background runner.outcome screens.notebook screens.page_requests screens.reloaded_pages",
    "anywidget": "screens.widget",
    "asyncssh": "playground.server",
    "cloudpickle": "remote.values.pickling",
    "cryptography": "connection.certificate transports.ssh.client playground.server",
    "pathspec": "payload.ignored",
    "paramiko": "transports.ssh.client",
    "torch": "systems.sing.sing_entry exports.on_nodes.run_node remote.rank.checkpoint remote.engine.engine remote.engine.meeting remote.values.storages",
    "typing_extensions": "api",
    "traitlets": "request.config screens.widget",
}
# `%load_ext distmagic` imports none of them.
SLOW = {
    "torch",
    "paramiko",
    "asyncssh",
    "anywidget",
    "cloudpickle",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target: `module` is dotted and absolute; `is_lazy` inside functions and TYPE_CHECKING."""

    module: str
    is_lazy: bool


def modules() -> dict[str, Path]:
    """Return {name below distmagic: file}; a package has its own name, distmagic's is "distmagic"."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__") or "distmagic"] = (
            path
        )
    return found


MODULES = modules()


@functools.cache
def imports(name: str) -> tuple[Import, ...]:
    """Return all that a module imports; `from distmagic import x` counts as distmagic.x where that is a module."""
    return tuple(_walk(ast.parse(MODULES[name].read_text()), is_lazy=False))


def _walk(node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # nothing is imported in it
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports don't say where they lead"
            yield from (
                Import(_target(child.module or "", alias.name), is_lazy)
                for alias in child.names
            )
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
                child.test
            )
            yield from _walk(child, is_lazy=is_lazy or is_function or is_for_types)


def _target(module: str, name: str) -> str:
    inner = f"{module}.{name}".removeprefix("distmagic.")
    return (
        f"{module}.{name}"
        if module.startswith("distmagic") and inner in MODULES
        else module
    )


def ours(name: str) -> Iterator[Import]:
    """Yield the imports of our own modules, named as in MODULES."""
    for found in imports(name):
        if found.module.partition(".")[0] == "distmagic":
            yield Import(found.module.removeprefix("distmagic."), found.is_lazy)


def package_of(name: str) -> str:
    """Return the entry of the table to which a module belongs: the longest that it begins with."""
    return max(
        (entry for entry in PACKAGES if f"{name}.".startswith(f"{entry}.")),
        key=len,
        default="",
    )


def test_every_module_has_a_package_and_every_package_a_module():
    assert [name for name in MODULES if not package_of(name)] == [], (
        "modules of no package"
    )
    assert set(PACKAGES) - {package_of(name) for name in MODULES} == set(), (
        "packages without a module"
    )


def test_no_package_imports_from_a_higher_one():
    climbs = [
        f"{name} imports {found.module}"
        for name in MODULES
        for found in ours(name)
        if PACKAGES.index(package_of(found.module)) > PACKAGES.index(package_of(name))
    ]
    assert climbs == []


@pytest.mark.parametrize(
    "package",
    [name for name in PACKAGES if (PACKAGE / name.replace(".", "/")).is_dir()],
)
def test_a_package_is_small_enough_to_be_seen_at_once_and_says_what_happens_in_it(
    package,
):
    folder = PACKAGE / package.replace(".", "/")
    assert len(list(folder.glob("*.py"))) <= 15, (
        "with its __init__: more than 14 modules are two packages"
    )
    assert (
        len(
            (
                ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            ).split()
        )
        >= 6
    )


def test_a_system_is_imported_by_itself_alone():
    """No system imports another; all else finds them in the table of request/systems.py."""
    meetings = [
        f"{name} imports {found.module}"
        for name in MODULES
        for found in ours(name)
        if (system := package_of(found.module)).startswith("systems.")
        and package_of(name) != system
    ]
    assert meetings == []


def test_modules_that_travel_import_only_python_and_each_other():
    strangers = [
        f"{name} imports {found.module}"
        for name in MODULES
        if name.startswith("remote")
        for found in imports(name)
        if not found.module.startswith("distmagic.remote")
        and found.module.partition(".")[0] not in sys.stdlib_module_names
        and not found.is_lazy
    ]
    assert strangers == []


def test_every_foreign_library_is_imported_where_the_table_says():
    strays = [
        f"{name} imports {found.module}"
        for name in MODULES
        for found in imports(name)
        if (library := found.module.partition(".")[0]) not in sys.stdlib_module_names
        and library != "distmagic"
        and name not in FOREIGN.get(library, "").split()
    ]
    assert strays == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for types alone count, too: modules that know each other are read as one."""
    graph = {}
    for name in MODULES:
        graph[name] = {found.module for found in ours(name)} & set(MODULES)
    while leaves := {name for name, needs in graph.items() if not needs & set(graph)}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert graph == {}, "in a circle, or behind one"


def test_loading_the_extension_imports_nothing_slow():
    queue, reached = ["distmagic", "notebook.magic"], set()
    while queue:
        name = queue.pop()
        if name in MODULES and name not in reached:
            reached.add(name)
            packages = {
                ".".join(name.split(".")[:end])
                for end in range(1, len(name.split(".")))
            }
            queue += [found.module for found in ours(name) if not found.is_lazy] + list(
                packages
            )
    slow = {
        f"{name} imports {found.module}"
        for name in reached
        for found in imports(name)
        if not found.is_lazy and found.module.partition(".")[0] in SLOW
    }
    assert slow == set()


def test_no_test_module_imports_another():
    """What two test modules need stands in tests/builders, tests/lab or tests/e2e; scripts in strings count too."""
    borrowed = [
        f"{path.relative_to(REPOSITORY)} names {module}"
        for path in (REPOSITORY / "tests").rglob("*.py")
        for module in re.findall(r"\btests\.[\w.]*\btest_\w+", path.read_text())
        if not module.endswith(f".{path.stem}")
    ]
    assert borrowed == []

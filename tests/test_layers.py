"""The architecture, as a table that is checked: who may import whom, and which foreign library lives in which file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "distmagic"

# From the bottom up: a module imports from its own line and the lines before it, never from one after it.
# `remote` and `transports` stand for all their modules, which have tables of their own.
LAYERS = (
    ("words that all use; the half that travels", "harmless errors remote torchrun interrupts"),
    ("what the user asks for, pure", "hosts spec cell flags config completion"),
    (
        "what is decided and how it reads, pure",
        "diagnose plan blame translate series state hangs draft fold_ranks fold_launcher fold found verdict render",
    ),
    ("what is packed to travel", "blobs bundle certificate local_modules pack"),
    ("a process on a host", "transports"),
    ("a conversation with a host", "limits link notebook_prompts resting reach job_requests"),
    (
        "a run, from its start to its end",
        "delivery takeback orders inbox newcomers growth launch prepare opening inquiry drive outcome",
    ),
    ("what is seen of it", "screen"),
    ("the whole, from Python", "housekeeping session api playground playground_command playground_server"),
    ("the whole, from a notebook", "backend line_magic job_magic magic"),
    ("what `import distmagic` offers", "distmagic"),
)
REMOTE_LAYERS = (
    (
        "the wire, places, processes",
        "wire parts events answers requests protocol places processes peers lease datagrams gang udp exits memory culprits storages volumes boot uncollected",
    ),
    ("values and how they travel", "pickling parcel call"),
    ("files and lines", "lines logs journal listing logout facts streams readers stacks spread intake"),
    (
        "parts of the agent and of a rank",
        "endpoint ending gang_channel muster ranks roster roll_call report bars checkpoint fresh marks",
    ),
    ("a rank, and torchrun that starts it", "worker nursery engine starting"),
    ("what else is started as a process", "agent warmth template contact"),
)
TRANSPORT_LAYERS = (
    ("words", "troubles quoting prompts deadline config_lines"),
    ("parts", "piped streams known_hosts ssh_config ssh_words"),
    ("paramiko", "ssh_process ssh_paramiko ssh_auth"),
    ("the transports", "local ssh ssh_command"),
)

# Who may import a library that isn't Python's own. "lazily": only inside functions.
FOREIGN = {
    "IPython": "distmagic magic line_magic job_magic notebook_prompts outcome screen",
    "asyncssh": "playground_server",
    "cloudpickle": "remote.pickling",
    "cryptography": "certificate transports.ssh_paramiko playground_server",
    "ipywidgets": "screen",
    "paramiko": "transports.ssh_paramiko",
    "torch": "remote.checkpoint remote.engine remote.storages",
    "traitlets": "config",
}
SLOW = {"torch", "paramiko", "asyncssh", "ipywidgets", "cloudpickle"}  # `%load_ext distmagic` imports none of them


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
        found[".".join(part for part in parts if part != "__init__") or "distmagic"] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[Import]:
    """Yield all that a module imports; `from distmagic import x` counts as distmagic.x where that is a module."""
    yield from _walk(ast.parse(MODULES[name].read_text()), is_lazy=False)


def _walk(node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports don't say where they lead"
            yield from (Import(_target(child.module or "", alias.name), is_lazy) for alias in child.names)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from _walk(child, is_lazy=is_lazy or is_function or is_for_types)


def _target(module: str, name: str) -> str:
    inner = f"{module}.{name}".removeprefix("distmagic.")
    return f"{module}.{name}" if module.startswith("distmagic") and inner in MODULES else module


def ours(name: str) -> Iterator[Import]:
    """Yield the imports of our own modules, named as in MODULES."""
    for found in imports(name):
        if found.module.partition(".")[0] == "distmagic":
            yield Import(found.module.removeprefix("distmagic."), found.is_lazy)


def heights(layers: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Return {module: how high its layer is}."""
    return {name: height for height, (_, names) in enumerate(layers) for name in names.split()}


def entry(name: str, package: str) -> str:
    """Return a module's name in the table of `package`, "" for what belongs to another table."""
    if not package:
        return name.partition(".")[0]
    return name.removeprefix(f"{package}.") if name.startswith(f"{package}.") else ""


TABLES = {"": heights(LAYERS), "remote": heights(REMOTE_LAYERS), "transports": heights(TRANSPORT_LAYERS)}


@pytest.mark.parametrize("package", TABLES)
def test_the_table_names_every_module_and_no_other(package):
    there = {entry(name, package) for name in MODULES} - {""}
    assert there - set(TABLES[package]) == set(), "modules that are in no layer"
    assert set(TABLES[package]) - there == set(), "layers with modules that don't exist"


@pytest.mark.parametrize("package", TABLES)
def test_no_module_imports_from_a_higher_layer(package):
    table = TABLES[package]
    climbs = [
        f"{name} imports {found.module}"
        for name in MODULES
        for found in ours(name)
        if (low := entry(name, package))
        and (high := entry(found.module, package))
        and table.get(high, 0) > table.get(low, 99)
    ]
    assert climbs == []


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
    graph = {name: {found.module for found in ours(name) if not found.is_lazy} & set(MODULES) for name in MODULES}
    while leaves := {name for name, needs in graph.items() if not needs & set(graph)}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert graph == {}, "in a circle, or behind one"


def test_loading_the_extension_imports_nothing_slow():
    queue, reached = ["distmagic", "magic"], set()
    while queue:
        name = queue.pop()
        if name in MODULES and name not in reached:
            reached.add(name)
            packages = {".".join(name.split(".")[:end]) for end in range(1, len(name.split(".")))}
            queue += [found.module for found in ours(name) if not found.is_lazy] + list(packages)
    slow = {
        f"{name} imports {found.module}"
        for name in reached
        for found in imports(name)
        if not found.is_lazy and found.module.partition(".")[0] in SLOW
    }
    assert slow == set()

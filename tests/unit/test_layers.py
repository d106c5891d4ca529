"""The architecture, as a table that is checked: who may import whom, and which foreign library lives in which file."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distmagic.remote.system import threads
from tests import REPOSITORY

PACKAGE = REPOSITORY / "distmagic"

# From the bottom up: a module imports from its own package and from packages on earlier lines, never from later ones.
# This table is the architecture; each package's `__init__` says what happens there, and what never does.
PACKAGES = (
    "remote",
    "remote.wire",
    "remote.system",
    "remote.records",
    "remote.values.reductions",
    "remote.values",
    "remote.checkup",
    "remote.gang",
    "remote.training",
    "remote.rank",
    "remote.engine",
    "remote.agent",
    "remote.contact",
    "remote.keeper",
    "sanitize",
    "errors",
    "request",
    "request.cells",
    "payload",
    "names",
    "notebook_place",
    "planning",
    "exports.on_nodes",
    "exports",
    "failures",
    "state",
    "render",
    "diagnosis",
    "comparison",
    "tracking",
    "transports",
    "transports.ssh",
    "connection",
    "connection.requests",
    "inside",
    "runner",
    "outcome",
    "systems",
    "systems.slurm",
    "systems.skypilot",
    "systems.osmo",
    "systems.sing",
    "systems.torchrun",
    "screens",
    "session",
    "sweeps",
    "staying",
    "playground",
    "api",
    "notebook",
    "cli",
    "__main__",
    "distmagic",
)

# Who may import a library that isn't Python's own. "lazily": only inside functions.
FOREIGN = {
    "IPython": "distmagic notebook.magic notebook.local_run notebook.run_names notebook.settings connection.prompts "
    "outcome.shown sweeps.sweep screens.notebook",
    "anywidget": "screens.widget",
    "asyncssh": "playground.server",
    "cloudpickle": "remote.values.pickling remote.values.reductions.torch_objects",
    "cryptography": "connection.certificate transports.ssh.client playground.server",
    "pathspec": "payload.ignored",
    "paramiko": "transports.ssh.client",
    "torch": "exports.on_nodes.run_node remote.checkup.collective remote.rank.checkpoint remote.engine.engine remote.engine.meeting remote.values.storages",
    "typing_extensions": "api remote.frozen",
    "traitlets": "request.config screens.widget",
}
# Names that a library keeps to itself: the file that has it, our modules that use it, and what a version without it changes.
# Tried with torch 2.13, paramiko 5.1, asyncssh 2.24, ipykernel 7.4, Lightning 2.6, tqdm 4.70, and Python 3.10 to 3.13.
PRIVATE = """
_BackendRendezvousStateHolder | torch/distributed/elastic/rendezvous/dynamic_rendezvous.py | remote.engine.meeting | torchrun compares the clocks of hosts, as it does by itself
_C | torch/__init__.py | remote.values.storages remote.training.steps | no tensor can be sent
_DYNAMIC_CLASS_TRACKER_BY_CLASS | cloudpickle/cloudpickle.py | remote.values.reductions.classes | a result changes the notebook's own classes
_DYNAMIC_CLASS_TRACKER_BY_ID | cloudpickle/cloudpickle.py | remote.values.reductions.classes | no class of a cell can be sent
_LoggerConnector | lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py | remote.rank.logged_numbers | numbers that Lightning logs are not shown
_ZSt13set_terminatePFvvE | torch/lib/libtorch_python.so | remote.rank.calls | a rank that gloo aborts leaves no calls: the error has no sizes
_abc | abc.py | remote.values.reductions.cell_objects | a function that wraps an abstract class of a cell can't be sent
_abort_process_group | torch/distributed/distributed_c10d.py | remote.training.groups | a rank that aborts its groups may be noted as one without any
_allow_stdin | ipykernel/kernelbase.py | connection.prompts | a notebook asks for no password
_backward_hooks | torch/_C/__init__.pyi | remote.values.reductions.torch_objects | no tensor of a call can be sent
_current_frames | sys.py | remote.rank.stay | a cell that waits for ranks outside it waits until an interrupt
_base_executable | sys.py | remote.records.environments | environments are made from the Python that runs
_cdata | torch/storage.py | remote.values.storages | no tensor can be sent
_dump_fr_trace | torch/lib/libtorch_python.so | remote.training.torch_groups | the call of a rank that is out of step has no name, and a hang is explained by stacks alone
_device_types | torch/_C/_distributed_c10d.pyi | remote.training.torch_groups | groups are noted as used, and none is kept
_exit_barrier | torch/distributed/elastic/agent/server/api.py | exports.on_nodes.run_node | a node of an exported job waits for its peers as torchrun does
_find_imported_submodules | cloudpickle/cloudpickle.py | remote.values.pickling | no function with inner functions can be sent
_fmt | logging/__init__.py | remote.values.settings | handlers of the notebook's logging can't be read
_class_setstate | cloudpickle/cloudpickle.py | remote.values.reductions.classes | a result changes the notebook's own classes
_cloudpickle_submodules | cloudpickle/cloudpickle.py | remote.values.pickling | no function with inner functions can be sent
_compiled_call_impl | torch/nn/modules/module.py | remote.values.reductions.torch_objects | a parametrized module that was compiled can't be sent
_current_graph_task_id | torch/lib/libtorch_python.so | remote.training.steps | steps are not counted
_get_backend | torch/_C/_distributed_c10d.pyi | remote.training.torch_groups | groups are noted as used, and none is kept
_get_protocol_attrs | typing.py | remote.values.reductions.source_form | no Protocol of a cell reaches a Python of another version, from 3.12 on
_get_sequence_number_for_group | torch/lib/libtorch_python.so | remote.training.torch_groups | groups are noted as used
_group_end | torch/_C/_distributed_c10d.pyi | remote.training.groups | groups of NCCL are not broken
_group_start | torch/_C/_distributed_c10d.pyi | remote.training.groups | groups of NCCL are not broken
_has_storage | torch/_C/__init__.pyi | remote.values.storages | no tensor can be sent
_inject_new_class | torch/nn/utils/parametrize.py | remote.values.reductions.torch_objects | no parametrized module can be sent
_inject_property | torch/nn/utils/parametrize.py | remote.values.reductions.torch_objects | no parametrized module can be sent
_inpbuf | asyncssh/forward.py | playground.server | no host of the playground can be the way to another
_inst | random.py | remote.values.reductions.cell_objects | functions imported from random draw the same numbers on all ranks
_is_in_bad_fork | torch/cuda/__init__.py | remote.engine.preloading remote.engine.spare_ranks | no template is kept: each run starts cold
_is_protocol | typing.py | remote.values.reductions.source_form | no Protocol of a cell reaches a Python of another version
_is_runtime_protocol | typing.py | remote.values.reductions.source_form | isinstance with a Protocol of a cell fails on hosts of another Python
_iterator | torch/utils/data/dataloader.py | remote.values.reductions.torch_objects | a DataLoader whose workers stay can't be sent once it was used
_make_skeleton_class | cloudpickle/cloudpickle.py | remote.values.reductions.classes | a class gets an empty double in registries
_make_skeleton_enum | cloudpickle/cloudpickle.py | remote.values.reductions.classes | members of enumerations lose their attributes
_monitor_workers | torch/distributed/elastic/agent/server/api.py | exports.on_nodes.run_node remote.engine.engine | a node of an exported job waits for failed peers as torchrun does
_neg_view | torch/_C/_VariableFunctions.pyi | remote.values.storages | no tensor with a negative bit can be sent
_new_process_group_helper | torch/distributed/distributed_c10d.py | remote.training.groups | groups of gloo are not broken
_next_service | asyncssh/connection.py | playground.server | the playground takes one attempt to log in
_popen | torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py | remote.engine.engine remote.engine.spare_ranks | torchrun starts ranks by itself: warm starts are slower
_post_accumulate_grad_hooks | torch/_tensor.py | remote.values.reductions.torch_objects | no tensor of a call can be sent
_rand | numpy/random/mtrand.pyi | remote.values.reductions.cell_objects | functions imported from numpy.random draw the same numbers on all ranks
_registry | weakref.py | remote.engine.forking | the ends of ranks and of torchrun are slower
_run_exitfuncs | atexit.py | exports.on_nodes.run_rank remote.engine.forking | a rank ends with an error after its program
_run_module_as_main | runpy.py | exports.on_nodes.run_rank remote.rank.script | programs by -m don't start
_sanitize | torch/distributed/elastic/rendezvous/dynamic_rendezvous.py | remote.engine.meeting | torchrun compares the clocks of hosts, as it does by itself
_send_user_message | paramiko/transport.py | transports.ssh.client | no connection is kept alive
_set_conj | torch/_C/__init__.pyi | remote.values.storages | no conjugate view can be sent
_set_neg | torch/_C/__init__.pyi | remote.values.storages | no negative view can be sent
_settings | torch/distributed/elastic/rendezvous/dynamic_rendezvous.py | remote.engine.meeting | torchrun compares the clocks of hosts, as it does by itself
_shutdown | threading.py | exports.on_nodes.run_rank remote.engine.forking | a rank does not wait for its threads at its end
_state_holder | torch/distributed/elastic/rendezvous/dynamic_rendezvous.py | remote.engine.engine | rounds of an elastic job are numbered 0
_store | torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py | remote.engine.engine | a run on several hosts fails when its nodes meet
_style | logging/__init__.py | remote.values.settings | handlers of the notebook's logging can't be read
_torchdynamo_orig_callable | torch/_dynamo/eval_frame.py | remote.values.reductions.cell_objects remote.values.unpicklable | compiled functions of a cell can't be sent
_untyped_storage | torch/storage.py | remote.values.storages | no TypedStorage can be sent
_world | torch/distributed/distributed_c10d.py | remote.rank.calls remote.training.groups | groups are noted as used, and none is kept
_wrapped | tqdm/utils.py | remote.rank.bars | bars on wrapped streams are not followed
"""
# What Python documents in spite of its underscore, and attributes of other libraries' objects that are ours.
NOT_PRIVATE = re.compile("_exit|_esm|_fields|_field_defaults|_replace|_fn|_s")
# `%load_ext distmagic` imports none of them.
SLOW = {"torch", "paramiko", "asyncssh", "anywidget", "cloudpickle"}


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


def private_names() -> dict[str, set[str]]:
    """Return {name: modules} of the names with an underscore that our modules use and that none of them makes."""
    made: set[str] = set()
    used: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.Name):
                made.add(node.id)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.Attribute):
                name = node.attr
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):  # fmt: skip
                    made.add(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value if node.value.isidentifier() else ""
            if name.startswith("_") and not name.endswith("_"):
                used.setdefault(name, set()).add(module)
    return {
        name: modules
        for name, modules in used.items()
        if name not in made and not NOT_PRIVATE.fullmatch(name)
    }


def private_rows() -> dict[str, list[str]]:
    """Return {name: [file, modules, what is without it]} of the table."""
    rows = [line.split(" | ") for line in PRIVATE.strip().splitlines()]
    return {name: rest for name, *rest in rows}


def test_private_names_of_libraries_stand_in_the_table():
    rows = private_rows()
    used = private_names()
    assert {name: set(rows[name][1].split()) for name in used if name in rows} == used
    for name in set(rows) - set(used):  # those that a class of ours overrides
        for module in rows[name][1].split():
            assert name in MODULES[module].read_text(), f"{module} lacks {name}"


@pytest.mark.parametrize("name", private_rows())
def test_a_private_name_is_there_in_the_versions_that_are_installed(name):
    file = private_rows()[name][0]
    module = file.removesuffix(".py")
    if module in sys.builtin_module_names:
        assert hasattr(importlib.import_module(module), name)
        return
    found = [Path(root, file) for root in sys.path if Path(root, file).is_file()]
    assert re.search(rf"\b{name}\b".encode(), found[0].read_bytes())


def test_threads_begin_in_few_modules_and_each_is_told_who_ends_it():
    making = set()
    for name in MODULES:
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).removeprefix("threading.")
                if called in ("Thread", "Timer", "ThreadPoolExecutor") and not any(
                    one.arg == "frames" for one in node.keywords
                ):
                    making.add(name)
                if called == "threads.begin":
                    first = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
                    named = first.partition("-{")[0]
                    assert re.search(
                        rf"^    .*\b{named}\b.*  ", threads.__doc__, re.MULTILINE
                    )
    # Pools of threads are made in the last two.
    assert making == {
        "remote.system.threads",
        "connection.parallel",
        "remote.checkup.doors",
    }


def test_nothing_draws_from_a_generator_that_users_seed():
    found = [
        f"{module}: random.{node.attr}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr != "Random"
    ]
    assert found == ["remote.engine.forking: random.seed"], "of a process just forked"


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

"""Finds the user's own modules that a call needs, and their files.

The current files on disk are sent, not the versions that the notebook imported before an edit.

A local module is neither in the standard library nor in a site-packages directory: files next to
the notebook, checkouts on PYTHONPATH, editable installs. One that hides a module of Python counts
if it is loaded. A package is sent as a whole folder, including data files (work_files.py).
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from distmagic.errors import PayloadError
from distmagic.payload.folder import content_of
from distmagic.remote.frozen import frozen
from distmagic.remote.system.gc_pause import parsed

MAX_FILES = 2_000
MAX_BYTES = 20 << 20
_NEVER = {"distmagic", "__main__", "__mp_main__", *sys.stdlib_module_names}
# Loaded modules that need no second look: of Python, extensions, or with the name of their file.
_BY_NAME: dict[str, ModuleType] = {}


@frozen
class LocalModule:
    """A top-level module of the user: its file, or the directories of a package."""

    name: str
    file: Path | None = None
    places: tuple[Path, ...] = ()
    at: str = ""  # its folder below the working directory, "" for that directory itself

    @property
    def root(self) -> Path:
        """The directory from which it is imported."""
        return self.file.parent if self.file is not None else self.places[0].parent


def found(
    names: Iterable[str], script: Path | None = None, current: Path | None = None
) -> tuple[LocalModule, ...]:
    """Return the local modules in `names` and those that they import in turn, in alphabetical
    order.

    For a program, `script` is the directory from which it imports first, and `current` has modules
    that are importable nowhere else. Raises `PayloadError` for a package that is too large or
    unreadable, except for a program.
    """
    modules: dict[str, LocalModule] = {}
    waiting, done = sorted(set(map(_top, names))), set[str]()
    while waiting:
        top = waiting.pop()
        if top in done or (top in _NEVER and not _hides_pythons(top)):
            continue
        done.add(top)
        module = _beside(top, script) or _local(top)
        if module is None and top not in sys.modules and _spec(top) is None:
            module = _beside(top, current)
        if module is None:
            continue
        modules[top] = module
        try:
            for _, data in python_texts(module):
                waiting += sorted(set(map(_top, imports_of_text(data))) - done)
        except PayloadError:
            if current is None:
                raise
    return tuple(modules[name] for name in sorted(modules))


def _hides_pythons(top: str) -> bool:
    """Whether a file of the user is loaded under the name of a module of Python, such as a
    profile.py.
    """
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top in sys.stdlib_module_names and file != "" and not is_installed(file)


def loaded_by_path() -> list[str]:
    """Return the user's modules that can't be imported by name: `spec_from_file_location("plan",
    "conf/base.py")`.
    """
    found = []
    for name, module in sys.modules.copy().items():
        parent, _, _ = name.rpartition(".")
        has_parent = not parent or parent in sys.modules
        if has_parent and _BY_NAME.get(name) is module:
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        needs_no_look = name in _NEVER or not file.endswith(".py")
        if needs_no_look or (has_parent and _has_name(file, name)):
            _BY_NAME[name] = module
            continue
        if module.__name__ != name or is_installed(file):
            continue
        # A new import of its package may find the loaded one: an editable install may name its
        # folder.
        top = _top(name)
        specs = (finder.find_spec(top, None) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        loaded = getattr(sys.modules.get(top), "__file__", None)
        if spec is None or spec.origin != loaded:
            found.append(name)
    return found


def _has_name(file: str, name: str) -> bool:
    """Whether a module's file has the module's name."""
    path = name.replace(".", "/")
    return f"/{file}".endswith((f"/{path}.py", f"/{path}/__init__.py"))


def _top(name: str) -> str:
    return name.partition(".")[0]


@functools.lru_cache(maxsize=MAX_FILES)
def imports_of_code(code: CodeType) -> tuple[str, ...]:
    """Return the names of imports in this code, as `imports_of_text`, without functions inside
    it.
    """
    module, found = "", []
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
            if module:
                found.append(module)
        elif step.opname == "IMPORT_FROM" and module:
            found.append(f"{module}.{step.argval}")
    return tuple(found)


@functools.lru_cache(maxsize=MAX_FILES)
def imports_of_text(text: str | bytes) -> tuple[str, ...]:
    """Return the names of imports in a program's text (`from a import b`: a, a.b); none for invalid
    Python.
    """
    try:
        tree = parsed(text)
    except (SyntaxError, ValueError):
        return ()  # maybe no rank imports this file of the package; one that does gets the error
    names = []
    for node in ast.walk(tree):
        names += imports_of_statement(node)
    return tuple(names)


def imports_of_statement(node: ast.AST) -> list[str]:
    """Return the names of imports in one statement; none for other statements and relative
    imports.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return []


def _beside(top: str, folder: Path | None) -> LocalModule | None:
    if folder is None:
        return None
    if (folder / top / "__init__.py").is_file():
        return LocalModule(name=top, places=(folder / top,))
    file = folder / f"{top}.py"
    return LocalModule(name=top, file=file) if file.is_file() else None


def _local(top: str) -> LocalModule | None:
    """Return a top-level module by its import name; None unless it is local."""
    module, spec = sys.modules.get(top), _spec(top)
    folders = (
        getattr(spec, "submodule_search_locations", None)
        or getattr(module, "__path__", None)
        or ()
    )
    places = [Path(one) for one in folders if not is_installed(one)]
    places = [place for place in places if place.is_dir()]
    if places:
        return LocalModule(name=top, places=tuple(places))
    origin = getattr(spec, "origin", None) or getattr(module, "__file__", None) or ""
    is_file = origin.endswith(".py") and Path(origin).is_file()
    if not is_file or is_installed(origin):
        return None
    return LocalModule(name=top, file=Path(origin))


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


def python_texts(module: LocalModule) -> Iterator[tuple[str, bytes]]:
    """Yield (path, text) of all Python files of a module. Raises `PayloadError`."""
    if module.file is not None:
        yield str(module.file), content_of(module.file)
    count = size = 0
    for place in module.places:
        for file in python_files(place):
            data = content_of(file)
            count += 1
            size += len(data)
            if count > MAX_FILES or size > MAX_BYTES:
                raise PayloadError(
                    f"The local package {module.name!r} ({place}) is too large to send: more than {MAX_FILES:,} Python "
                    f"files or {MAX_BYTES >> 20} MB.",
                    "Install it on the hosts and on this machine (not as an editable install), or import less of it than "
                    f"{module.name}.",
                )
            yield str(file), data


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a package's directory.

    No module has a name that begins with a dot: Emacs' lock of an unsaved train.py is a dangling
    link, .#train.py.
    """
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name for name in names if name != "__pycache__" and not name.startswith(".")
        )
        if "pyvenv.cfg" in files:
            names.clear()
            continue
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith("."):
                continue
            path = Path(folder, name)
            if os.path.isfile(path):  # noqa: PTH113 - False in a folder that can't be searched
                yield path


def is_installed(path: str | os.PathLike[str]) -> bool:
    """Whether a file belongs to Python itself, to an installed package or to distmagic."""
    real = Path(os.path.realpath(path))
    if {"site-packages", "dist-packages"} & set(real.parts):
        return True
    if any(real.is_relative_to(root) for root in _installed_roots()):
        return True
    return any(_is_recorded(one.parent, one.name) for one in (real, *real.parents[:-1]))


@functools.cache
def _is_recorded(folder: Path, name: str) -> bool:
    """Whether `pip install --target` has put this file or package into a folder: a .dist-info next
    to it lists it.
    """
    for record in folder.glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", errors="replace") as lines:
            if any(line.split(",", 1)[0].split("/", 1)[0] == name for line in lines):
                return True
    return False


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    found = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),
    ]
    return tuple(Path(os.path.realpath(path)) for path in found)

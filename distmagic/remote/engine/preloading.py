"""Loads into a template's successor the packages that ranks imported in the last runs.

    rank      --list of its modules, in the job's folder-->   template     (remote/records/imported_modules.py)
    template  --keeps the list, by its own key; forks-->      successor
    successor --imports one package after the other-->        the template in place of the first one

Only packages that are installed are imported: those that a *.dist-info beside them has in its list of files. After each
one the successor looks at itself. Where it could not be forked any more, or ranks could tell it from a new process, it
ends; the package is refused from then on, and the next successor goes without it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distmagic.remote.records import places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES

MOST_BYTES = 1_500_000_000  # of memory that all packages add
ENOUGH_S = 40.0  # after which no further one is begun
_MOST_MODULES = 6000
_MOST_REFUSED = 20
_OF_A_RANK = ("SLURM_", "TORCHELASTIC_", "PET_", "PMI")
# Modules that note their rank when they are imported; `forking.mend_rank` corrects that in each rank.
_MENDED = (
    "lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", "torchmetrics.utilities.prints",
)  # fmt: skip
_LOOKS_UP = ("os", "collections.abc", __name__)  # modules that stand between a reader and a variable  # fmt: skip


class NotForTemplate(Exception):
    """A package may not be in a template; the text says why."""


class Wishes:
    """Which packages the templates of one key are to load, kept on disk for those that come later."""

    def __init__(self, key: str) -> None:
        self._path = places.home() / "imports" / f"{key}.json"
        self._tried: set[str] = set()  # modules that are loaded, or can't be
        self.modules: list[str] = []
        self.refused: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_text())
            self.modules = [str(name) for name in kept["modules"]][:_MOST_MODULES]
            self.refused = {str(one): str(why) for one, why in kept["refused"].items()}

    def learn(self, told: Path) -> None:
        """Add what a rank has told in a file. What can't be read is left out."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = set(self.modules)
            new = [str(one) for one in json.loads(told.read_text()) if one not in known]
            if new:
                self.modules = [*self.modules, *new][:_MOST_MODULES]
                self._keep()

    def refuse(self, package: str, why: str) -> None:
        """Note that a package is not to be loaded."""
        self.refused[package] = why
        self._keep()

    def done(self, packages: dict[str, list[str]]) -> None:
        """Note that these were imported, as far as they can be."""
        for names in packages.values():
            self._tried.update(names)

    def _keep(self) -> None:
        with contextlib.suppress(OSError):
            places.make_private(self._path.parent)
            with atomic_write(self._path) as file:
                text = json.dumps({"modules": self.modules, "refused": self.refused})
                file.write(text.encode())

    def packages(self) -> dict[str, list[str]]:
        """Return {package: its modules} of those that are not loaded yet, dependencies before what needs them.

        A package's own modules are in the order in which the rank imported them.
        """
        found: dict[str, list[str]] = {}
        if len(self.refused) > _MOST_REFUSED:
            return found  # every further try would cost as much as the last one
        for name in self.modules:
            package = name.partition(".")[0]
            is_new = name not in self._tried and name not in sys.modules
            if is_new and package not in self.refused:
                found.setdefault(package, []).append(name)
        return dict(reversed(found.items()))


# ---- in the successor


def load(packages: Mapping[str, list[str]]) -> Iterator[str]:
    """Import packages, and yield the name of each before. Raises `NotForTemplate`, and what the import of one raises."""
    installed = _Installed()
    began_s, began_bytes = time.monotonic(), _memory_bytes()
    handlers = _handlers()
    for package, names in packages.items():
        if time.monotonic() - began_s > ENOUGH_S:
            return
        if not installed.has(package):
            continue
        yield package
        with _noted_reads() as read, gc_paused(), _devices_counted_by_nvml():
            importlib.import_module(package)
            for name in names:
                with contextlib.suppress(ImportError):  # it may be made at run time
                    importlib.import_module(name)
        if read:
            raise NotForTemplate(f"reads {min(read)}")
        if _memory_bytes() - began_bytes > MOST_BYTES:
            raise NotForTemplate(
                f"takes more than {MOST_BYTES / 1e9:.1f} GB with the others"
            )
        _check_process(handlers)


def _check_process(handlers: list[object]) -> None:
    """Raise `NotForTemplate` unless this process can still be forked, and still has these signal `handlers`."""
    if not has_one_thread():
        raise NotForTemplate("starts threads")
    if _has_children():
        raise NotForTemplate("starts processes")
    if _uses_gpu():
        raise NotForTemplate("uses a GPU")
    if _handlers() != handlers:
        raise NotForTemplate("handles signals")


class _Installed:
    """Knows which packages are installed in the folders that Python imports from."""

    def __init__(self) -> None:
        self._by_folder: dict[str, set[str]] = {}

    def has(self, package: str) -> bool:
        """Whether an import of this name finds a package that an installer has put there."""
        try:
            spec = importlib.machinery.PathFinder.find_spec(package)
        except (ImportError, AttributeError, ValueError):
            return False
        origin = spec.origin if spec is not None else None
        if not origin:
            return False
        path = Path(origin)
        folder = path.parents[1] if path.name.startswith("__init__.") else path.parent
        return package in self._in(str(folder))

    def _in(self, folder: str) -> set[str]:
        if folder not in self._by_folder:
            names = set()
            for record in Path(folder).glob("*.dist-info/RECORD"):
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    for line in record.read_text().splitlines():
                        names.add(line.partition(",")[0].partition("/")[0].partition(".")[0])  # fmt: skip
            self._by_folder[folder] = names
        return self._by_folder[folder]


@contextmanager
def _noted_reads() -> Iterator[set[str]]:
    """Give the variables of a rank that are read within the block: a rank that is forked later has others."""
    kind: Any = type(os.environ)
    look_up = kind.__getitem__
    read: set[str] = set()

    def noting(environ: object, name: str) -> object:
        if name in TORCHRUN_VARIABLES or str(name).startswith(_OF_A_RANK):
            frame = sys._getframe(1)  # noqa: SLF001
            while frame.f_back and frame.f_globals.get("__name__") in _LOOKS_UP:
                frame = frame.f_back
            if frame.f_globals.get("__name__") not in _MENDED:
                read.add(name)
        return look_up(environ, name)

    kind.__getitem__ = noting
    try:
        yield read
    finally:
        kind.__getitem__ = look_up


@contextmanager
def _devices_counted_by_nvml() -> Iterator[None]:
    """Have torch ask NVML, and not CUDA, whether there are GPUs: a process that has asked CUDA can't be forked."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def has_one_thread() -> bool:
    """Whether this is the only thread. OpenBLAS ends its own when the process forks, and starts them when needed."""
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _has_children() -> bool:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return bool(file.read().strip())
    except OSError:
        return False  # of a kernel that does not tell


def _uses_gpu() -> bool:
    """Whether CUDA was initialized: a rank that is forked then can't use it."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return True
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(cuda._is_in_bad_fork()))  # noqa: SLF001 - only a child knows
    return os.waitpid(pid, 0)[1] != 0


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

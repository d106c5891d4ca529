"""The packages that a template loads in addition to torch: imports in the texts of its jobs, and
the user's setting.

It only loads installed packages, and only while no job runs. A package is first tried in a child
process. If that process could not be forked afterwards, or ranks could notice a difference from a
new process, the package is refused.
"""

from __future__ import annotations

import importlib.machinery
import os
import pkgutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from distmagic.remote.system import processes
from distmagic.remote.system.gc_pause import gc_paused
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES

MOST_BYTES = 1_500_000_000  # memory that all packages may add
SLOW_S = 60  # time limit for one package
_LOADED_ANYWAY = ("distmagic", "torch", "cloudpickle", "__main__")
_OF_A_RANK = ("SLURM_", "TORCHELASTIC_", "PET_", "PMI")
# These contain names of rank variables, but read none on import, or `forking.mend_rank` corrects it
# in each rank.
READ_NO_RANK = (
    "torch", "torchmetrics", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning",
    "transformers", "accelerate",
)  # fmt: skip
_LASTS = f"takes longer than {SLOW_S} s"
# Why a package is not loaded, by the exit code of the child that tried it.
_WHYS = (
    "", "is not installed", "can't be imported", "starts threads", "starts processes", "uses a GPU", "handles signals",
    "names variables of a rank", f"takes more than {MOST_BYTES / 1e9:.1f} GB with the others",
)  # fmt: skip


class Preloading:
    """The packages of one template. `loaded` are loaded, `refused` is {package: reason}."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.names: set[str] = set()  # names of modules, and of objects in them
        self.refused: dict[str, str] = {}
        self._waiting: dict[str, set[str]] = {}  # names to import, by their package
        self._done: set[str] = set()
        self._began_bytes = _memory_bytes()
        self._tried: tuple[str, set[str]] | None = None  # a package and its names
        # Pid of the child that tries them, 0 once it has found no problem.
        self._child = 0

    def want(self, names: Iterable[str]) -> None:
        """Queue modules, or objects in them (`transformers.Trainer`), for `step` to import.

        Names that were queued before, names of imported modules, and refused packages are skipped.
        """
        for name in names:
            package = name.partition(".")[0]
            is_known = name in self._done or name in sys.modules
            if is_known or package in {*_LOADED_ANYWAY, *sys.stdlib_module_names}:
                continue
            self._done.add(name)
            if package not in self.refused:
                self._waiting.setdefault(package, set()).add(name)

    @property
    def has_work(self) -> bool:
        """Whether a package waits, or is being tried."""
        return bool(self._waiting or self._tried)

    def step(self, *, is_idle: bool) -> bool:
        """Continue with one package; return whether it was just imported in this process.

        `is_idle`: no job runs.
        """
        if self._child and self._tried:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                self._child = 0
                self._judge(self._tried[0], status)
        elif is_idle and self._tried:
            package, names = self._tried
            self._tried = None
            load(names)
            self.loaded.add(package)
            self.names |= names
            return True
        elif is_idle and self._waiting:
            parent = os.getpid()
            package, names = self._waiting.popitem()
            try:
                self._child = os.fork()
            except OSError:
                return False  # no process or no memory for it: not again
            self._tried = package, names
            if not self._child:
                processes.die_with_parent(parent)
                # The child's exit code is the reason why the package can't be loaded.
                why = "is not installed"
                if is_installed(package):
                    signal.alarm(SLOW_S)
                    why = why_not(names, self._began_bytes)
                for process in processes.descendants(os.getpid()):
                    processes.send(process, signal.SIGKILL)
                os._exit(_WHYS.index(why))
        return False

    def _judge(self, package: str, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        why = _LASTS if code == -signal.SIGALRM else "ends the process"
        if 0 <= code < len(_WHYS):
            why = _WHYS[code]
        if why:
            self._tried = None
        if why and why != "is not installed":  # a module of the user
            self.refused[package] = why


def is_installed(package: str) -> bool:
    """Whether this name imports an installed file, and not one of the user's."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(package)
    except (ImportError, AttributeError, ValueError):
        return False
    if spec is None or not spec.origin:
        return False
    path = Path(spec.origin)
    folder = path.parents[1] if path.name.startswith("__init__.") else path.parent
    listed = f"\n{path.relative_to(folder)},"
    records = folder.glob("*.dist-info/RECORD")
    return any(listed in f"\n{one.read_text(errors='replace')}" for one in records)


def why_not(names: Iterable[str], began_bytes: int) -> str:
    """Import, and return why ranks can't be forked from this process then, or would differ from new
    ones.
    """
    handlers = _handlers()
    modules = set(sys.modules)
    try:
        load(names)
    except BaseException:  # noqa: BLE001 - whatever the code of a package raises
        return "can't be imported"
    if not has_one_thread():
        return "starts threads"
    if processes.descendants(os.getpid()):
        return "starts processes"
    if _uses_gpu():
        return "uses a GPU"
    if _handlers() != handlers:
        return "handles signals"
    if _names_rank_variables(set(sys.modules) - modules):
        return "names variables of a rank"
    return _WHYS[-1] if _memory_bytes() - began_bytes > MOST_BYTES else ""


def load(names: Iterable[str]) -> None:
    """Import modules, and look up the named objects in them. Raises the errors of the import."""
    # Torch must ask NVML, not CUDA, whether there are GPUs: a process that has asked CUDA can't be
    # forked.
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with gc_paused():
            for name in sorted(names):
                importlib.import_module(name.partition(".")[0])
                # It may be created at run time, or be missing in this version.
                with suppress(ImportError, AttributeError, ValueError):
                    pkgutil.resolve_name(name)
    finally:
        if before is None:
            # A package may have removed it.
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def _names_rank_variables(modules: Iterable[str]) -> bool:
    """Whether a module's code contains the name of a rank variable, which it might read on
    import.
    """
    for name in modules:
        spec = getattr(sys.modules[name], "__spec__", None)
        loader: Any = getattr(spec, "loader", None)
        is_known = name.partition(".")[0] in READ_NO_RANK
        if is_known or not hasattr(loader, "get_code"):
            continue
        waiting = []
        with suppress(Exception):  # a loader of the package itself
            waiting.append(loader.get_code(name))
        while waiting:
            constant = waiting.pop()
            if isinstance(constant, CodeType):
                waiting += constant.co_consts
            elif isinstance(constant, tuple | frozenset):
                waiting += constant
            elif isinstance(constant, str) and (
                constant in TORCHRUN_VARIABLES or constant.startswith(_OF_A_RANK)
            ):
                return True
    return False


def has_one_thread() -> bool:
    """Whether this is the only thread.

    OpenBLAS ends its threads when the process forks, and restarts them when needed.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _uses_gpu() -> bool:
    """Whether CUDA was initialized: a forked rank could not use it."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
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
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

"""Runs a program like Python, and ends it without Python's shutdown.

torchrun starts this script on every rank:

    python run_rank.py train.py 50 --lr 0.1
    python run_rank.py -m package.module

If a thread of gloo needs Python after the shutdown has started, it aborts the process ("terminate
called without an active exception"). Then the job counts as failed. A model that has the last
reference to its process group waits for gloo's threads without releasing the GIL. They may wait for
the GIL: the rank hangs. So this script also keeps references to the groups of models. It needs only
Python.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(words: Sequence[str]) -> None:
    """Run the program that these words name, with its arguments, as `__main__`. Never returns."""
    own = sys.modules["__main__"]
    sys.meta_path.insert(0, _GroupsFinder())
    code: object = None
    try:
        _run(own, words)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:  # noqa: BLE001 - as at the top of any program
        below = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error, below and below.tb_next)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    # Make the program's open files be written, as the shutdown would: clear `__main__`, and flush
    # the rest.
    _hold_groups_of_models()
    if threading.active_count() == 1:
        # Otherwise a daemon thread may still use any of them.
        kept = (types.ModuleType, types.FunctionType, type)  # a `__del__` may use them
        names = [n for n, value in vars(own).items() if not isinstance(value, kept)]
        for name in names:
            if not name.startswith("__"):
                delattr(own, name)
        gc.collect()
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or another kind of object
                one.flush()
    os._exit((code or 0) & 0xFF)


def _run(own: types.ModuleType, words: Sequence[str]) -> None:
    for name in [name for name in vars(own) if name not in _OF_PYTHON]:
        delattr(own, name)
    vars(own).update(__doc__=None, __annotations__={}, __package__=None, __spec__=None)
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv[:] = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls
        return
    path = Path(words[0]).absolute()
    sys.path[0] = str(path.resolve().parent)
    sys.argv[:] = words
    own.__file__ = str(path)
    code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(own))  # noqa: S102 - the user's program


class _GroupsFinder:
    """Replaces a function of torch when the program imports it, and is used only for that.

    The function ends process groups. Its replacement keeps references to those of models first.
    """

    def find_spec(self, name: str, path: Any, _target: Any = None) -> Any:
        """Find torch's module with `destroy_process_group`, which is wrapped after the import."""
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_replace(module: Any) -> None:
                execute(module)
                destroy = module.destroy_process_group

                @functools.wraps(destroy)
                def hold_and_destroy(*args: Any, **kwargs: Any) -> None:
                    _hold_groups_of_models()
                    destroy(*args, **kwargs)

                module.destroy_process_group = hold_and_destroy

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _hold_groups_of_models() -> None:
    """Keep references to the groups of existing models, and drop those of models that are gone."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    model = getattr(parallel, "DistributedDataParallel", ())
    _held[:] = [
        one.process_group for one in gc.get_objects() if issubclass(type(one), model)
    ]


_OF_PYTHON = ("__name__", "__builtins__")
_held: "list[object]" = []  # never cleared

if __name__ == "__main__":
    if getattr(sys.flags, "safe_path", False):
        # Python leaves this folder out. The program's replaces it, because its modules are next to
        # it.
        sys.path.insert(0, str(Path(__file__).parent))
    # From a separate module, because the program replaces this one as `__main__`.
    importlib.import_module(Path(__file__).stem).main(sys.argv[1:])

"""A real IPython shell, and the extension loaded in it over fakes."""

import atexit
import gc
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from distmagic import notebook_place
from tests.unit.notebook.fakes import Lab


@pytest.fixture
def shell(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("DISTMAGIC_HOSTS", raising=False)
    # Or later tests of this process that name no hosts would run on this shell's.
    monkeypatch.setattr(notebook_place, "_registered", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    InteractiveShell.clear_instance()
    # Jedi's cache is shared by all processes of a user: what it finds there is chance.
    config = Config(
        HistoryManager={"hist_file": ":memory:"}, IPCompleter={"use_jedi": False}
    )
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("colors", "nocolor")
    yield shell
    atexit.unregister(shell.atexit_operations)
    # A shell that ends collects all garbage of the process: a quarter of a second a test in one that has loaded torch.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    shell.atexit_operations()
    InteractiveShell.clear_instance()


@pytest.fixture
def lab(shell, monkeypatch):
    return Lab(shell, monkeypatch)

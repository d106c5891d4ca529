"""What the notebook has set in libraries, logging and Python, and ranks begin with."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest

from distmagic.remote.values import settings
from tests import REPOSITORY
from tests.builders.forks import Forks
from tests.builders.later import Later
from tests.builders.shell import completed

Later("torch")  # without it this module is skipped

# A process that sets something prints it for another one, which begins with that and prints what it has then.
SETS = """
import logging, sys
from distmagic.remote.values import settings
{sets}
print(*settings.read(), sep="\\n")
"""
BEGINS = """
import logging, sys
from distmagic.remote.training import import_hooks
from distmagic.remote.values import settings
if {is_warm}:
    import torch
settings.begin_with({text!r}, import_hooks.when_imported)
assert ("torch" in sys.modules) is {is_warm}
print({shows})
"""
# What is set, its words, and how a rank has it.
OF_TORCH = [
    ("torch.set_default_dtype(torch.float64)", "default dtype float64", "torch.ones(1).dtype == torch.float64"),
    ("torch.set_float32_matmul_precision('medium')", "matmul precision medium", "torch.get_float32_matmul_precision() == 'medium'"),
    ("torch.use_deterministic_algorithms(True, warn_only=True)", "deterministic mode 1", "torch.is_deterministic_algorithms_warn_only_enabled()"),
    ("torch.autograd.set_detect_anomaly(True)", "anomaly detection on", "torch.is_anomaly_enabled()"),
    ("torch.backends.cudnn.deterministic = True", "cudnn.deterministic on", "torch.backends.cudnn.deterministic"),
]  # fmt: skip
OF_OTHERS = [
    ("import numpy as np; np.seterr(over='raise')", "seterr {'divide': 'warn', 'over': 'raise', 'under': 'ignore', 'invalid': 'warn'}", "__import__('numpy').geterr()['over']", "raise"),
    ("import decimal; decimal.getcontext().prec = 50", "decimal precision 50", "len(str(__import__('decimal').Decimal(1) / 3))", "52"),
]  # fmt: skip
# What is set, its words, what a rank does, and what is to be seen.
OF_LOGGING = {
    "level": ("logging.basicConfig(level='INFO')", "logging (the root logger at INFO)", "logging.getLogger('x').info('seen')", "INFO:x:seen"),
    "format": ("logging.basicConfig(level=10, format='{message}!', style='{', stream=sys.stdout)", "the root logger at DEBUG", "logging.debug('seen')", "seen!"),
    "own logger": ("log = logging.getLogger('train'); log.setLevel(10); log.propagate = False; log.addHandler(logging.StreamHandler())", "train at DEBUG", "logging.getLogger('train').debug('seen')", "seen"),
    "handler's level": ("logging.basicConfig(level=10); logging.root.handlers[0].setLevel(30)", "DEBUG", "logging.info('no'), logging.warning('yes')", "WARNING:root:yes"),
    "configured again": ("logging.warning('odd')", "WARNING", "logging.basicConfig(level='INFO', format='R %(message)s'), logging.info('there')", "R there\n"),
    "a handler that stays": ("logging.basicConfig(level='INFO', handlers=[logging.FileHandler('/dev/null')])", "INFO, without its FileHandler", "logging.warning('seen')", "WARNING:root:seen"),
}  # fmt: skip


def ran(program: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, "-c", program], cwd=REPOSITORY)  # fmt: skip


def forked(forks: Forks, folder: Path, program: str) -> str:
    """Run a program in a process that has loaded torch, and return its output."""
    script = folder / "program.py"
    script.write_text(program)
    done = forks.run(script)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("name", OF_LOGGING)
def test_ranks_begin_with_the_notebooks_logging(name):
    sets, words, shows, expected = OF_LOGGING[name]
    text, said = ran(SETS.format(sets=sets)).stdout.splitlines()
    assert words in said
    done = ran(BEGINS.format(text=text, shows=shows, is_warm=False))
    assert expected in done.stdout + done.stderr
    assert "no" not in done.stderr


@pytest.mark.slow
def test_ranks_begin_with_the_notebooks_settings_of_torch(torch_forks, tmp_path):
    sets = "; ".join(["import torch", *(sets for sets, _, _ in OF_TORCH)])
    text, said = forked(torch_forks, tmp_path, SETS.format(sets=sets)).splitlines()
    assert said == "; ".join(words for _, words, _ in OF_TORCH)
    has = ", ".join(has for _, _, has in OF_TORCH)
    shows = f"exec('import torch') or all([{has}])"
    warm, cold = (
        BEGINS.format(text=text, shows=shows, is_warm=is_warm)
        for is_warm in (True, False)
    )
    assert forked(torch_forks, tmp_path, warm) == "True\n"
    assert ran(cold).stdout == "True\n"


@pytest.mark.parametrize(("sets", "words", "shows", "expected"), OF_OTHERS)
def test_ranks_begin_with_the_notebooks_settings_of_a_library(
    sets, words, shows, expected
):
    text, said = ran(SETS.format(sets=sets)).stdout.splitlines()
    assert said == words
    done = ran(BEGINS.format(is_warm=False, text=text, shows=shows))
    assert done.stdout == f"{expected}\n"


def test_ranks_begin_with_the_notebooks_recursion_limit():
    text, words = ran(SETS.format(sets="sys.setrecursionlimit(20_000)")).stdout.splitlines()  # fmt: skip
    assert words == "recursion limit 20,000"
    begins = BEGINS.format(is_warm=False, text=text, shows="sys.getrecursionlimit()")
    assert ran(begins).stdout == "20000\n"


def test_of_a_new_process_nothing_is_taken(torch_forks, tmp_path):
    foreign = "logging.root.addHandler(logging.NullHandler())"
    sets = f"import torch; log = logging.getLogger('train'); {foreign}"
    assert forked(torch_forks, tmp_path, SETS.format(sets=sets)).strip() == ""


@pytest.mark.parametrize(
    "made",
    ["np.seterr", "torch.set_default_dtype", "torch.backends.cudnn.benchmark", "logging.basicConfig",
     "logging.getLogger().setLevel", "log.addHandler"],
)  # fmt: skip
def test_the_words_for_what_is_taken(made):
    assert settings.MADE.search(f"line 3 calls {made} in the notebook")


@pytest.mark.parametrize(
    "made", ["torch.set_num_threads", "logging.getLogger('transformers').setLevel", "logging.captureWarnings", "socket.setdefaulttimeout", "warnings.simplefilter", "decimal.setcontext"]
)  # fmt: skip
def test_the_words_for_what_is_not_taken(made):
    assert not settings.MADE.search(f"line 3 calls {made} in the notebook")


def test_a_logger_that_has_handlers_gets_no_second_one():
    logger = logging.getLogger("a logger of a module")
    logger.addHandler(logging.NullHandler())
    row = {"stream": "stderr", "level": 0, "format": None}
    text = f'{{"logging": {{"{logger.name}": {{"level": 10, "propagate": true, "handlers": [{row}]}}}}}}'
    settings.begin_with(text.replace("'", '"').replace("None", "null"), lambda *_: None)
    assert logger.level == 10
    assert len(logger.handlers) == 1


def test_what_this_torch_can_not_say_is_not_taken_and_stops_nothing(monkeypatch):
    def mixed(*_):
        raise RuntimeError("mix of the legacy and new APIs to set the matmul precision")

    torch = types.SimpleNamespace(
        get_default_dtype=lambda: "torch.float64",
        get_float32_matmul_precision=mixed,
        set_default_dtype=mixed,
        float64="its dtype",
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    text, words = settings.read()
    assert "default dtype float64" in words
    assert "precision" not in words
    settings.begin_with(text, lambda _, patch: patch(torch))

"""What the frameworks that are known to a template read when they are imported. It imports all of them: a minute."""

import json
import subprocess
import sys

from distmagic.remote.engine.preloading import READ_NO_RANK

# Notes which modules read variables of a rank when they are imported; torch is what a template has already.
READS = """
import importlib, json, os, sys
import torch, torch.distributed.run, torch.nn.parallel, torch.utils.data
from distmagic.remote.engine.preloading import _OF_A_RANK
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
plain, found = type(os.environ).__getitem__, set()
def noting(environ, name):
    if name in TORCHRUN_VARIABLES or name.startswith(_OF_A_RANK):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in ("os", "collections.abc"):
            frame = frame.f_back
        found.add(frame.f_globals["__name__"])
    return plain(environ, name)
type(os.environ).__getitem__ = noting
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # it is not installed here
print(json.dumps(sorted(found)))
"""


def test_packages_that_are_known_read_no_variable_of_a_rank_but_what_is_mended():
    names = [*READ_NO_RANK, "transformers.trainer", "lightning.pytorch"]
    done = subprocess.run(
        [sys.executable, "-c", READS, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    mended = {
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "lightning_utilities.core.rank_zero",
        "torchmetrics.utilities.prints",
    }
    assert set(json.loads(done.stdout.splitlines()[-1])) <= mended

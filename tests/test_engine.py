"""torchrun's own log, as our engine has it written."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging, sys
import torch.distributed.run
from distmagic.remote import engine

engine.mend_logs()
agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
try:
    raise ConnectionResetError("the lead is gone")
except ConnectionResetError:
    agent.exception("Error waiting on exit barrier. Elapsed: %s seconds", 0.1)
    agent.exception("Something %s", "else")
print("torch._dynamo" in sys.modules)
"""


def test_an_exception_is_logged_without_torch_s_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "Something else" in done.stderr
    assert "ConnectionResetError: the lead is gone" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "exit barrier" not in done.stderr

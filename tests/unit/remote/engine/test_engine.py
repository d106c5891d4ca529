"""torchrun's own log, as our engine has it written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.forks import Forks

PROGRAM = """
import logging, sys
import torch.distributed.run
from distmagic.remote.engine import engine

engine.simplify_logs()
agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
try:
    raise ConnectionResetError("the lead is gone")
except ConnectionResetError:
    agent.exception("Error waiting on exit barrier. Elapsed: %s seconds", 0.1)
    agent.exception("Something %s", "else")
print("torch._dynamo" in sys.modules)
"""


def run(program: str, forks: Forks, folder: Path) -> tuple[str, str]:
    """Return what a program has printed, and its log."""
    (folder / "program.py").write_text(program)
    done = forks.run(folder / "program.py")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
def test_an_exception_is_logged_without_torch_s_compiler(torch_forks, tmp_path):
    printed, log = run(PROGRAM, torch_forks, tmp_path)
    assert printed == "False\n"
    assert "Something else" in log
    assert "ConnectionResetError: the lead is gone" in log
    assert log.count("Traceback") == 1
    assert "exit barrier" not in log


MEETING = """
import os
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from distmagic.remote.engine import engine

told = [DistStoreError("wait timeout after 15000ms, keys: /a\\nmore"), DistStoreError("once more"), None, DistNetworkError("gone")]

class Group:
    class spec:
        class rdzv_handler:
            class _state_holder:
                class state:
                    round = 3

def meet(agent, group):
    print(agent)
    if (error := told.pop(0)) is not None:
        raise error

SimpleElasticAgent._rendezvous = meet
os.environ["DISTMAGIC_WORKER"] = '{"call": "x"}'
engine.follow_rounds(is_elastic=True)
SimpleElasticAgent._rendezvous("agent", Group)
print(os.environ["DISTMAGIC_WORKER"])
try:
    SimpleElasticAgent._rendezvous("other agent", Group)
except DistNetworkError as error:
    print(error)
"""


@pytest.mark.slow
def test_nodes_meet_anew_when_one_is_lost_in_the_middle_of_it(torch_forks, tmp_path):
    printed, log = run(MEETING, torch_forks, tmp_path)
    assert printed.splitlines() == ["agent"] * 3 + [
        '{"call": "x", "round": 3}',
        "other agent",
        "gone",
    ]
    assert [line for line in log.splitlines() if "again" in line] == [
        "Meeting the other nodes again: wait timeout after 15000ms, keys: /a",
        "Meeting the other nodes again: once more",
    ]


WARM = """
import json, logging, os, sys
from torch.distributed import run
from distmagic.remote.engine import engine, forking

def fork_ranks(count):
    print(count, logging.getLogRecordFactory() is logging.LogRecord)
    sys.exit()

engine.prepare()
engine._fork_ranks = fork_ranks
forking.inherited.is_warm = True
os.environ["DISTMAGIC_WORKER"] = json.dumps({"agent_pid": os.getppid()})
print(run.parse_args(["program"]).tee)
os.environ["PET_TEE"] = "3"
print(run.parse_args(["program"]).tee)
engine.main(["--nproc-per-node=2", "program"])
"""


@pytest.mark.slow
def test_a_warm_torchrun_leaves_the_logs_of_ranks_alone_and_reads_its_variables(
    torch_forks, tmp_path
):
    printed, _ = run(WARM, torch_forks, tmp_path)
    assert printed.splitlines() == ["0", "3", "2 True"]

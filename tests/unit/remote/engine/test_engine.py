"""torchrun's own log, as our engine has it written."""

from __future__ import annotations

from pathlib import Path

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


ORDER = """
import json, os
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc
from distmagic.remote.engine import engine

class store:
    check = staticmethod(lambda keys: all(key in ("torchelastic/assigned_ranks/0", "torchelastic/assigned_ranks/1") for key in keys))
    multi_get = staticmethod(lambda keys: [b"[0, 6, 0, 6]", b"[4, 6, 4, 6]"])

class Group:
    store = store
    class spec:
        class rdzv_handler:
            class _state_holder:
                class state:
                    round = 3
                    participants = {_NodeDesc("10.0.0.9", 1, 0): 1, _NodeDesc("10.0.0.10", 1, 0): 0}

SimpleElasticAgent._rendezvous = lambda agent, group: None
engine.follow_rounds(is_elastic=True)
for endpoint in ("", "10.0.0.10 29500"):
    os.environ["DISTMAGIC_WORKER"] = json.dumps({"endpoint": endpoint})
    SimpleElasticAgent._rendezvous("agent", Group)
    said = json.loads(os.environ["DISTMAGIC_WORKER"])
    print(said.get("order"), said.get("firsts"))
"""


def test_ranks_of_the_lead_know_in_which_order_the_nodes_have_met(
    torch_forks, tmp_path
):
    printed, _ = run(ORDER, torch_forks, tmp_path)
    assert printed.splitlines() == [
        "['10.0.0.10', '10.0.0.9'] [0, 4]",
        "None None",
    ]

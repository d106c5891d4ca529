"""torchrun's own log, as our engine has it written."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmagic.remote.wire import protocol as p
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


REPORTING = """
import json, os, socket, subprocess, sys
from types import SimpleNamespace
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from distmagic.remote.engine import engine

os.environ["DISTMAGIC_WORKER"] = json.dumps({"socket": path})
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
listener.listen()

def report():
    return agent.recv(9999).decode().replace(str(processes[0].pid), "PID").strip()

def reap(agent, group):
    return [one.wait(0) for one in group.processes if one.poll() is not None]

LocalElasticAgent._monitor_workers = reap
to_agent = engine._connect_to_agent()
agent, _ = listener.accept()
engine._report_each_end(to_agent, waits=waits)
programs = ["import os; os.kill(os.getpid(), 9)", "raise SystemExit(0)", "input()"]
processes = [subprocess.Popen([sys.executable, "-c", one], stdin=subprocess.PIPE) for one in programs]
workers = [SimpleNamespace(id=one.pid, global_rank=4 + at, local_rank=at) for at, one in enumerate(processes)]
group = SimpleNamespace(workers=workers, processes=processes)
for one in processes[:2]:
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
assert sorted(LocalElasticAgent._monitor_workers(None, group)) == [-9, 0]
to_agent.close()
print(report())
print(report())
print(report())
processes[2].kill()
processes[2].communicate()
agent.close()
listener.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_torchrun_reports_a_failed_rank_before_it_reaps_it(
    torch_forks, tmp_path, waits
):
    program = f"waits, path = {waits}, {str(tmp_path / 'ranks')!r}\n{REPORTING}"
    printed, log = run(program, torch_forks, tmp_path)
    exits = (p.Exit(rank=4, local_rank=0, pid=77, code=-9),)
    reports = [p.encode(p.RankExits(exits=one)).decode() for one in ((), exits)]
    assert (printed, log) == ("".join(reports).replace("77", "PID") + "\n", "")


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

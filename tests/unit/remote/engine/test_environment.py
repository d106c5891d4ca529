"""What ranks see of a scheduler's variables."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from distmagic.remote.contact import template_client
from distmagic.remote.engine import engine
from distmagic.remote.wire import protocol
from tests import REPOSITORY
from tests.builders.messages import START
from tests.builders.shell import completed


def test_ranks_do_not_see_the_variables_of_the_one_task_around_them():
    host = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "4", "SLURM_NTASKS": "1", "PMI_RANK": "0",
            "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}  # fmt: skip
    env = engine.environment(
        replace(START, env={}, defaults={}), host, Path("/f"), Path("/r")
    )
    assert set(env) & set(host) == {
        "SLURM_JOB_ID",
        "SLURM_GPUS_ON_NODE",
        "CUDA_VISIBLE_DEVICES",
    }


def test_a_template_fits_whichever_step_asks_for_it(monkeypatch):
    warm = protocol.TemplateRequest(
        owner="me", idle_s=1.0, lease_s=1.0, env={}, defaults={}
    )
    monkeypatch.setenv("SLURM_STEP_ID", "4")
    first = template_client.variables(warm)
    monkeypatch.setenv("SLURM_STEP_ID", "5")
    monkeypatch.setenv("SLURM_TASK_PID", "77")
    assert template_client.variables(warm) == first


BEGINS_LATE = """
import os
from pathlib import Path
from distmagic.remote.engine import engine
from tests.builders.messages import START

os.environ.update(engine.environment(START, dict(os.environ), Path("/f"), Path("/r")))
is_over, agent_lives = os.pipe()
agent = os.getpid()
if os.fork() == 0:
    os.close(agent_lives)
    os.read(is_over, 1)
    while os.getppid() == agent:
        continue  # its files are closed, and it is about to end
    engine.simplify_logs = lambda: print("goes on", flush=True)
    engine.main([])
"""


def test_torchrun_does_not_begin_when_its_agent_was_killed_meanwhile(marks):
    """Its ranks would reach no agent; it would start them again, and in the end close the others' rendezvous."""
    done = completed([sys.executable, "-c", BEGINS_LATE], cwd=REPOSITORY, env={**os.environ, **marks}, check=False)  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)

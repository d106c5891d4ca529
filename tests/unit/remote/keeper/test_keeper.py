"""A keeper and its ushers on this machine, without Slurm: what starts, what ends with what, and when it all ends."""

from __future__ import annotations

import ast
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distmagic.remote.keeper import (
    allocation_lease,
    keeper,
    listening,
    processes,
    usher,
)
from distmagic.remote.keeper.allocation_lease import LOOK_S, AllocationLease
from distmagic.transports import program_text
from tests.builders.keepers import LocalKeeper
from tests.lab import clock
from tests.lab.waiting import HANG_S, wait_until
from tests.transports.contract import read_all

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="keepers run on Linux nodes"
)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def sleeper(transport: LocalKeeper) -> int:
    """Start a process that starts another one in a session of its own, as a contact starts an agent; return that one."""
    process = transport.start(
        ("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!; cat")
    )
    return int(process.read())


@pytest.mark.parametrize(
    "module", [allocation_lease, keeper, listening, processes, usher]
)
def test_they_run_on_old_pythons(module):
    ast.parse(Path(module.__file__).read_text(), feature_version=(3, 6))
    assert "from __future__" not in Path(module.__file__).read_text()


def test_the_process_has_a_session_of_its_own_and_knows_who_came():
    with LocalKeeper() as node:
        text = 'import os; print(os.getsid(0) == os.getpid(), os.environ["DISTMAGIC_CLIENT"], os.getcwd())'
        process = node.start((sys.executable, "-c", text))
        assert read_all(process).decode().split() == [
            "True",
            "10.0.0.9",
            os.path.expanduser("~"),
        ]


def test_what_a_process_has_started_outlives_it_and_its_usher():
    with LocalKeeper() as node:
        pid = sleeper(node)
        (gone,) = node._local._open
        os.kill(gone.pid, signal.SIGKILL)
        other = node.start(("echo", "still here"))
        assert other.read() == b"still here\n"
        assert is_alive(pid)
    wait_until(lambda: not is_alive(pid), "what was started to end with the keeper")


@pytest.mark.slow
def test_a_process_whose_usher_is_killed_ends_also_if_it_ignores_sigterm():
    with LocalKeeper() as node:
        process = node.start(
            ("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 1; done")
        )
        pid = int(process.read())
        (step,) = node._local._open
        os.kill(step.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the process to be killed")


def test_sigterm_is_passed_on_to_all_and_leaves_nothing():
    with LocalKeeper() as node:
        pid = sleeper(node)
        node.process.terminate()
        assert node.wait_ended() == 0
        assert not is_alive(pid)


def test_the_lead_ends_when_nobody_comes():
    with LocalKeeper(first_lease_s=0.5) as node:
        assert node.wait_ended() == 0


def test_another_keeper_ends_with_the_lead_whose_output_it_reads():
    with LocalKeeper(leads=False) as node:
        pid = sleeper(node)
        node.process.stdin.close()
        assert node.wait_ended() == 0
        assert not is_alive(pid)


def test_the_lead_starts_the_others_and_waits_for_their_end():
    others = "/tmp/distmagic-{}-slurm.{}.there"
    with LocalKeeper(step=("env", "SLURMD_NODENAME=there")) as node:
        folder = Path(others.format(os.getuid(), node.job))
        wait_until((folder / "keeper").exists, "the other keeper to be up")
        node.process.terminate()
        assert node.wait_ended() == 0
        assert not folder.exists()


OTHERS = ("env", "SLURMD_NODENAME=there")


def kill_other(node: LocalKeeper) -> None:
    """Kill the keeper of the other node, which is a child of the lead's here, as srun's task is not."""
    folder = Path(f"/tmp/distmagic-{os.getuid()}-slurm.{node.job}.there")
    wait_until((folder / "keeper").exists, "the other keeper to be up")
    for pid, parent in processes.parents().items():
        if parent == node.process.pid:
            os.kill(pid, signal.SIGKILL)


def test_the_lead_ends_with_an_error_when_another_keeper_is_killed():
    with LocalKeeper(step=OTHERS) as node:
        kill_other(node)
        assert node.wait_ended() == 1


def test_the_lead_of_nodes_that_may_be_lost_goes_on_without_them():
    with LocalKeeper(step=OTHERS, needs_others=False) as node:
        kill_other(node)
        assert node.start(("echo", "still here")).read() == b"still here\n"
        assert node.process.poll() is None


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT"])
def test_a_warning_of_slurm_ends_nothing(name):
    with LocalKeeper() as node:
        pid = sleeper(node)
        node.process.send_signal(getattr(signal, name))
        text = (
            f"import signal; print(signal.getsignal(signal.{name}) is signal.SIG_IGN)"
        )
        assert read_all(node.start((sys.executable, "-c", text))) == b"False\n"
        assert is_alive(pid)


@pytest.mark.slow
def test_another_keeper_does_not_count_the_time():
    with LocalKeeper(leads=False, first_lease_s=0.1, lease_s=0.1, idle_s=0.1) as node:
        process = node.start(("sleep", "2.5"))
        assert process.wait(HANG_S) == 0
        assert node.process.poll() is None


@pytest.mark.slow
def test_a_lease_is_renewed_and_ends():
    with LocalKeeper(first_lease_s=60, lease_s=4) as node:
        lease = node.usher({"lease": True})
        assert lease.read() == b"ready\n"
        for _ in range(25):
            assert lease.wait(0.2) is None
            lease.write(b".")
        assert node.process.poll() is None
        assert node.wait_ended() == 0


@pytest.mark.needs("cc")
@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_clock_that_is_set_neither_ends_an_allocation_nor_holds_it(
    tmp_path, monkeypatch, ahead_s
):
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    (tmp_path / "clock.so").write_bytes(clock.library())
    monkeypatch.setenv("CLOCK_AHEAD", str(ahead))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "clock.so"))
    is_ahead = ahead_s > 0
    with LocalKeeper(lease_s=60 if is_ahead else 1) as node:
        lease = node.usher({"lease": True})
        assert lease.read() == b"ready\n"
        ahead.write_text(str(ahead_s))
        if is_ahead:
            assert node.start(("true",)).wait(HANG_S) == 0
            assert node.start(("true",)).wait(HANG_S) == 0
            assert node.process.poll() is None
        else:
            lease.close()
            assert node.wait_ended() == 0


def test_an_allocation_that_is_told_to_end_ends_at_once():
    with LocalKeeper() as node:
        lease = node.usher({"lease": True})
        assert lease.read() == b"ready\n"
        lease.write(b"e")
        assert node.wait_ended() == 0
        assert lease.read() == b""


@pytest.mark.slow
def test_an_unused_allocation_ends_though_the_notebook_is_there():
    with LocalKeeper(idle_s=5) as node:
        lease = node.usher({"lease": True})
        assert lease.read() == b"ready\n"
        assert node.wait_ended() == 0


@pytest.mark.slow
def test_a_job_that_runs_holds_the_allocation_without_a_notebook(monkeypatch):
    with LocalKeeper(first_lease_s=5, idle_s=5) as node:
        process = node.start(("env", "DISTMAGIC_JOB=7", "sleep", "7"))
        assert process.wait(HANG_S) == 0, "the allocation ended below a job"
        assert node.wait_ended() == 0


def test_the_lease_in_time():
    lease = AllocationLease(100.0, {"first_lease_s": 30, "lease_s": 10, "idle_s": 50})
    assert not lease.is_over(129.0, has_job=False)
    lease.renew(129.0)
    assert not lease.is_due(139.0)
    assert lease.is_over(140.0, has_job=False)
    assert not lease.is_over(140.0, has_job=True)
    assert not lease.is_due(140.0 + LOOK_S), (
        "it looks again after a while, not all the time"
    )
    assert lease.is_over(146.0, has_job=False)
    for now in range(146, 250):
        lease.renew(now)
        assert lease.is_due(now) == (now > 190)


def test_a_folder_of_somebody_else_is_not_used():
    with LocalKeeper() as node:
        assert node.start(("true",)).wait(HANG_S) == 0
        node.folder.chmod(0o755)
        process = node.usher({"argv": ["true"]}, patience_s=0.1)
        assert process.wait(HANG_S) == usher.NO_KEEPER
        assert "is not this user's alone" in process.stderr()


def test_an_usher_without_a_keeper_says_so():
    node = LocalKeeper()
    process = node.usher({"argv": ["true"]}, patience_s=0.1)
    assert process.wait(HANG_S) == usher.NO_KEEPER
    assert (
        "distmagic: no keeper answers on here: No such file or directory"
        in process.stderr()
    )
    node.close()


def test_a_second_keeper_of_the_same_node_leaves_it_to_the_first():
    with LocalKeeper() as node:
        assert node.start(("true",)).wait(HANG_S) == 0
        again = LocalKeeper()
        again.job = node.job
        with again:
            assert again.process.wait(HANG_S) == 0
        assert node.start(("echo", "first")).read() == b"first\n"


def test_what_is_no_request_ends_the_connection_and_not_the_keeper():
    with LocalKeeper() as node:
        for request in ({}, {"argv": "no list of words"}, {"argv": []}):
            assert node.usher(request).wait(HANG_S) in (usher.NO_KEEPER, 126, 127)
        assert node.start(("echo", "here")).read() == b"here\n"


def test_what_a_killed_keeper_has_left_is_removed_by_the_next_one_on_the_node():
    name = f"here-{secrets.token_hex(4)}"
    with LocalKeeper(node=name) as dead:
        assert dead.start(("true",)).wait(HANG_S) == 0
        dead.process.kill()
        dead.process.wait(HANG_S)
    assert dead.folder.exists()
    with LocalKeeper(node=name) as alive, LocalKeeper(node=name) as node:
        for one in (alive, node):
            assert one.start(("true",)).wait(HANG_S) == 0
        assert not dead.folder.exists()
        assert alive.folder.exists(), "it answers"


@pytest.mark.parametrize(("step", "code"), [([], 0), (["sh", "-c", "echo no step"], 1)])
def test_the_log_of_the_batch_script_stays_where_the_others_did_not_come_up(
    tmp_path, step, code
):
    log = tmp_path / ".distmagic-slurm-17.out"
    # Of its own: a second keeper of a job leaves the node to the first.
    node = {"SLURM_JOB_ID": str(secrets.randbelow(10**9)), "SLURMD_NODENAME": "here"}
    settings = {
        "leads": True,
        "first_lease_s": 0.2,
        "lease_s": 1,
        "idle_s": 1,
        "step": step,
        "needs_others": True,
    }
    with log.open("w") as file:
        command = program_text.command(sys.executable, "keeper", settings)
        done = subprocess.run(
            command,
            env={**os.environ, **node},
            stdout=file,
            stderr=file,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == code
    assert (log.read_text() if log.exists() else "") == ("no step\n" if code else "")


def test_the_log_of_the_batch_script_is_removed_when_its_notebook_has_come(tmp_path):
    log = tmp_path / ".distmagic-slurm-17.out"
    with log.open("w") as file, LocalKeeper(log=file) as node:
        lease = node.usher({"lease": True})
        assert lease.read() == b"ready\n"
        assert not log.exists()

"""Processes of a job, with real ones: orphans adopted, trees ended, numbers not mixed up. Only children of this test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from distmagic.remote.agent import termination
from distmagic.remote.agent.termination import Termination
from distmagic.remote.system import exit_codes, memory, processes
from distmagic.remote.system.processes import ProcessInfo
from tests import REPOSITORY
from tests.lab.waiting import HANG_S

ROOT = REPOSITORY
WAIT = "import sys; print('up', flush=True); sys.stdin.read()"  # lives until its stdin is closed
HEAD = "import json, os, signal, sys\nfrom distmagic.remote.system import processes\n"


@pytest.fixture
def start(marks: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that runs Python source in a child, which is killed after the test, and so are its orphans."""
    children = []

    def run(source: str, **env: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", source], cwd=ROOT, env={**os.environ, **marks, **env}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            pipe.close()  # an orphan may hold the other end: nobody reads to its end


def up(child: subprocess.Popen[str]) -> ProcessInfo:
    """Wait until a child that runs WAIT is there; return it."""
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    found = processes.read(child.pid)
    assert found is not None
    return found


def is_running(child: subprocess.Popen[str]) -> bool:
    found = processes.read(child.pid)
    return found is not None and found.state not in "ZX"


# ---- looking


def test_a_process_as_proc_shows_it(start):
    found = up(start(WAIT))
    assert (found.parent, found.exit_status) == (os.getpid(), 0)
    assert found.name.startswith("python")
    assert found.state in "SRD"
    assert found.started > 0
    for table in (processes.everything(), processes.descendants(os.getpid())):
        assert [(p.parent, p.started) for p in table if p.pid == found.pid] == [
            (os.getpid(), found.started)
        ]


def test_a_name_with_brackets(start):
    name = "a) S (b c)"
    found = up(start(f"open('/proc/self/comm', 'w').write({name!r}); {WAIT}"))
    assert (found.name, found.parent) == (name, os.getpid())


def test_a_number_that_nobody_has(start):
    child = start(WAIT)
    up(child)
    child.kill()
    child.wait()
    assert processes.read(child.pid) is None
    assert processes.read(2**30) is None


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("os._exit(7)", 7),
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.abort()", -6),
    ],
)
def test_a_zombie_tells_how_it_ended(start, how, code):
    child = start(
        f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {how}"
    )
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = processes.read(child.pid)
    assert found is not None
    assert (found.state, os.waitstatus_to_exitcode(found.exit_status)) == ("Z", code)
    assert child.pid not in [p.pid for p in processes.descendants(os.getpid())]
    assert child.wait() == code


def process(pid: int, parent: int, state: str = "S") -> ProcessInfo:
    return ProcessInfo(
        pid=pid, parent=parent, started=pid, state=state, name=f"p{pid}", exit_status=0
    )


def test_descendants_of_a_table():
    rows = ((1, 0), (2, 1), (3, 2), (4, 3, "Z"), (5, 4), (6, 1), (7, 9))
    table = [process(*row) for row in rows]
    assert [p.pid for p in processes.descendants(2, table)] == [3, 5]
    assert {p.pid for p in processes.descendants(1, table)} == {2, 3, 5, 6}
    assert processes.descendants(7, table) == ()


# ---- ending


def test_the_end_of_a_process_is_awaited_among_many_open_files(start):
    source = f"""
import resource, subprocess
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
held = [os.dup(0) for _ in range(1100)]
child = subprocess.Popen(["true"])
processes.wait_gone(processes.read(child.pid), {HANG_S})
print(processes.read(child.pid).state)
"""
    assert start(HEAD + source).stdout.read() == "Z\n"


def test_a_number_that_was_given_out_again_is_not_hit(start):
    child = start(WAIT)
    found = up(child)
    processes.send(replace(found, started=found.started + 1), signal.SIGKILL)
    assert is_running(child)
    processes.send(found, signal.SIGKILL)
    assert child.wait() == -9
    processes.send(found, signal.SIGKILL)  # gone: nothing happens


ENDS_WITH_ITS_PARENT = """
ready, there = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    processes.die_with_parent(parent)
    os.write(there, b"x")
    signal.pause()
os.read(ready, 1)
sys.stdin.read()
os._exit(0)
"""
A_LAUNCHER_BETWEEN = """
parent = os.getpid()
if os.fork() == 0:
    if os.fork() == 0:
        processes.die_with_parent(parent)
        print("lives", flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
os._exit(0)
"""
ASKS_TOO_LATE = """
is_over, parent_lives = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    os.close(parent_lives)
    os.read(is_over, 1)
    while os.getppid() == parent:
        continue  # its files are closed, and it is about to end
    processes.die_with_parent(parent)
    print("lives", flush=True)
    signal.pause()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [(ENDS_WITH_ITS_PARENT, ""), (A_LAUNCHER_BETWEEN, "lives\n"), (ASKS_TOO_LATE, "")],
    ids=["its parent ends", "a launcher between", "its parent has ended"],
)
def test_die_with_parent(start, code, printed):
    """The end of file on the child's stdout says that the child ended too."""
    child = start(HEAD + code)
    out, _ = child.communicate(timeout=HANG_S)
    assert (out, child.returncode) == (printed, 0)


ORPHAN = (
    HEAD
    + """
processes.become_subreaper()
ready, there = os.pipe()
middle = os.fork()
if middle == 0:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(there, b"%d" % os.getpid())
        while True:
            signal.pause()
    os._exit(0)
orphan = int(os.read(ready, 20))
os.waitpid(middle, 0)
"""
)


def test_orphans_are_adopted_and_ended_though_they_ignore_sigterm(start):
    child = start(
        ORPHAN
        + """
from distmagic.remote.agent.termination import Termination
tree = [p.pid for p in processes.descendants(os.getpid())]
end = Termination()
before = end.has_begun
end.begin(10.0, 3.0)
end.step(12.9)
lived = [p.pid for p in processes.descendants(os.getpid())]
end.step(13.0)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
end.step(13.1)
reaped = processes.reap()
print(json.dumps([orphan, tree, lived, before, end.has_begun, end.is_done, end.survivors, list(reaped.items()), processes.reap()]))
"""
    )
    orphan, tree, lived, before, begun, done, survivors, reaped, again = json.loads(
        child.communicate(timeout=HANG_S)[0]
    )
    assert (tree, lived) == ([orphan], [orphan])
    assert (before, begun, done, survivors) == (False, True, True, [])
    assert (reaped, again) == ([[orphan, 9]], {})


def test_sweep_ends_what_carries_the_mark(start):
    job = f"test-{os.getpid()}"
    mine = start(ORPHAN + "print('up', flush=True)\n" + WAIT, **{processes.MARK: job})
    other = start(WAIT, **{processes.MARK: f"{job}0"})
    up(mine)
    up(other)
    assert {p.pid for p in processes.marked(job)} >= {mine.pid}
    assert len(processes.marked(job)) == 2
    assert processes.sweep(job) == ()
    assert mine.wait() == -9
    assert is_running(other)
    assert processes.sweep(f"{job}-never") == ()


def test_sweep_spares_an_agent_and_its_orphans(start):
    """One host may be two nodes of a job: the agent of the one lives while the other one is swept."""
    job = f"test-{os.getpid()}"
    agent = start(ORPHAN + "print('up', flush=True)\n" + WAIT, **{processes.MARK: job})
    dead = start(WAIT, **{processes.MARK: job})
    lives = up(agent)
    up(dead)
    before = {process.pid for process in processes.marked(job)}
    assert processes.sweep(job, spared=(lives,)) == ()
    assert dead.wait() == -9
    left = {process.pid for process in processes.marked(job)}
    # The agent, and the orphan that it has adopted.
    assert (len(left), left) == (2, before - {dead.pid})


def test_a_process_that_was_written_down_is_found_as_long_as_it_runs(start, tmp_path):
    child = start(WAIT)
    process = up(child)
    processes.note(child.pid, tmp_path / "pid")
    assert processes.noted(tmp_path / "pid") == processes.read(child.pid)
    # Of a process before it with this number.
    (tmp_path / "earlier").write_text(f"{child.pid} {process.started - 1}")
    (tmp_path / "torn").write_text(f"{child.pid}")
    assert processes.noted(tmp_path / "earlier") is None
    assert processes.noted(tmp_path / "torn") is None
    child.kill()
    child.wait()
    assert processes.noted(tmp_path / "pid") is None
    assert processes.noted(tmp_path / "none") is None


def test_whoever_sweeps_does_not_end_itself_or_its_parents(start):
    job = f"test-{os.getpid()}"
    source = f"{HEAD}print(json.dumps([p.pid for p in processes.marked({job!r})]), flush=True); sys.stdin.read()"
    child = start(source, **{processes.MARK: job})
    assert json.loads(child.stdout.readline()) == []
    assert len(processes.marked(job)) == 1


class Tree:
    """Processes that are not there, and the signals that they were sent."""

    def __init__(self, *pids: int) -> None:
        self.alive = {pid: process(pid, 1) for pid in pids}
        self.signals: list[tuple[int, int]] = []

    def send(self, one: ProcessInfo, number: int) -> None:
        self.signals.append((one.pid, number))


@pytest.fixture
def tree(monkeypatch) -> Tree:
    made = Tree(11, 12)
    monkeypatch.setattr(
        termination.processes, "descendants", lambda root: tuple(made.alive.values())
    )
    monkeypatch.setattr(termination.processes, "has_child", lambda: True)
    monkeypatch.setattr(termination.processes, "send", made.send)
    return made


def test_each_is_asked_once_and_killed_later(tree):
    end = Termination()
    end.step(0.0)
    assert tree.signals == []
    end.begin(1.0, 3.0)
    end.step(1.1)
    assert tree.signals == [(11, signal.SIGTERM), (12, signal.SIGTERM)]
    del tree.alive[11]
    tree.alive[13] = process(13, 1)  # started meanwhile
    end.step(2.0)
    assert tree.signals[2:] == [(13, signal.SIGTERM)]
    end.step(4.0)
    assert tree.signals[3:] == [(12, signal.SIGKILL), (13, signal.SIGKILL)]
    tree.alive.clear()
    end.step(4.1)
    assert (end.is_done, end.survivors) == (True, ())


def test_those_that_another_has_asked_are_left_alone_until_it_is_over(tree):
    end = Termination()
    end.begin(0.0, 30.0, asks=False)
    end.step(29.0)
    assert tree.signals == []
    end.begin(29.0, 0.5)  # torchrun has ended, and these are left
    end.step(29.1)
    assert tree.signals == [(11, signal.SIGTERM), (12, signal.SIGTERM)]
    end.step(29.5)
    assert tree.signals[2:] == [(11, signal.SIGKILL), (12, signal.SIGKILL)]


def test_a_second_call_can_only_shorten(tree):
    end = Termination()
    end.begin(0.0, 3.0)
    end.begin(1.0, 30.0)
    end.step(2.9)
    assert (11, signal.SIGKILL) not in tree.signals
    end.begin(2.9, 0.0)
    assert (11, signal.SIGKILL) in tree.signals


def test_what_can_not_be_ended_is_named(tree):
    tree.alive = {11: process(11, 1, "D")}
    end = Termination()
    end.begin(0.0, 0.0)
    end.step(9.9)
    assert not end.is_done
    end.step(10.1)
    assert (end.is_done, end.survivors) == (True, ("p11 (pid 11, state D)",))
    sent = len(tree.signals)
    end.step(11.0)
    assert len(tree.signals) == sent


# ---- what an end means


@pytest.mark.parametrize(
    "code", [0, 1, 127, -9, 137, -11, 139, -6, -7, -15, -2, -40, -99, 128, 200, 255], ids=str
)  # fmt: skip
def test_meanings(code, golden):
    golden(exit_codes.meaning_of(code, out_of_memory=""))
    assert exit_codes.outcome_of(code) == ("signalled" if code < 0 else "exited")


@pytest.mark.parametrize(
    ("code", "is_oom"), [(-9, True), (137, True), (-15, False), (1, False)]
)
def test_out_of_memory(code, is_oom):
    text = "SIGKILL: the host ran out of memory and its kernel ended the process"
    assert (
        exit_codes.meaning_of(code, out_of_memory=memory.HOST_WIDE) == text
    ) is is_oom

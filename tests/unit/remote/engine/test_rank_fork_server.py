"""Ranks that are forked: children of the engine that asked for them, fresh, and seen by others as what they are."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distmagic.remote.engine import forking, process_title, rank_fork_server
from distmagic.remote.system import processes
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="hosts run Linux"
)

_ENGINE = """
import json, os, signal, sys, threading, time
from distmagic.remote.engine import forking, rank_fork_server; from distmagic.remote.system import processes; from distmagic.remote.rank import worker

def rank(argv):
    with open("/proc/self/cmdline") as cmdline, open("/proc/self/environ") as environ:
        shown = cmdline.read().rstrip("\\0").split("\\0")[-1], "DISTMAGIC_JOB=job-7\\0" in environ.read()
    fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    line = json.dumps({
        "parent": os.getppid(), "pid": os.getpid(), "shown": shown, "number": os.environ["NUMBER"], "argv": sys.argv[1:],
        "leads": os.getsid(0) == os.getpid(), "fds": len(fds), "threads": threading.active_count(),
    })
    os.write(1, line.encode() + b"\\n")  # at once: one of them is ended meanwhile
    number = int(os.environ["NUMBER"])
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        time.sleep(1000)
    sys.exit(number)

worker.main = rank

def engine():
    ranks = rank_fork_server.RankForkServer()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # torchrun has some
    told = []
    for number in range(4):
        child = rank_fork_server.ForkedProcess(ranks.fork_rank({**os.environ, "NUMBER": str(number)}, 1, 2))
        if number == 3:
            child.send_signal(signal.SIGTERM)
        told.append((child.pid, child.wait(60)))
    print(json.dumps({"engine": os.getpid(), "told": told}))

def start():
    forking.remember(dict(os.environ), ())
    forking.run(lambda: forking.exit_like_python(engine))

start()
"""


def run_engine(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as an engine that was forked from a template, to its end."""
    (tmp_path / "mine.py").touch()
    code = tmp_path / "code.zip"
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("sources.json", json.dumps({"may_be_loaded": None}))
    from_agent = json.dumps({"paths": [str(tmp_path)], "code": str(code)})
    env = {
        **os.environ,
        processes.MARK: process_title.JOB_PLACEHOLDER,
        "DISTMAGIC_WORKER": from_agent,
    }
    program = program.replace(
        "def start():\n",
        f'def start():\n    os.environ["{processes.MARK}"] = "job-7"\n',
    )
    argv = [sys.executable, "-u", "-c", program, process_title.ROLE_PLACEHOLDER]
    return completed(argv, env=env, check=False)


def test_ranks_are_children_of_the_engine(tmp_path):
    done = run_engine(_ENGINE, tmp_path)
    assert done.stderr == ""
    *ranks, engine = [json.loads(line) for line in done.stdout.splitlines()]
    ranks.sort(key=lambda rank: rank["number"])  # they write at the same time
    assert [code for _, code in engine["told"]] == [
        0,
        1,
        -signal.SIGKILL,
        -signal.SIGTERM,
    ]
    assert len({pid for pid, _ in engine["told"]}) == 4
    for number, rank in enumerate(ranks):
        assert rank == {
            "parent": engine["engine"], "pid": engine["told"][number][0], "shown": ["worker", True],
            "number": str(number), "argv": ["worker"], "leads": True, "fds": 3, "threads": 1,
        }  # fmt: skip


_FORKS_FAIL = """
import errno
fork = forking.fork

def fail(act):
    number = act.args[0]["NUMBER"] if getattr(act, "func", None) is rank_fork_server._be_rank else ""
    if number == "0":
        raise BlockingIOError(errno.EAGAIN, "pids.max")
    if number == "1":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return fork(act)

forking.fork = fail

def engine():
    ranks = rank_fork_server.RankForkServer()
    for number in range(3):
        try:
            child = rank_fork_server.ForkedProcess(ranks.fork_rank({**os.environ, "NUMBER": str(number)}, 1, 2))
        except OSError as error:
            print(error)
        else:
            print(child.wait(60) == -signal.SIGKILL)

start()
"""


def test_a_rank_that_can_not_be_forked_is_an_error_and_no_endless_wait(
    tmp_path, golden
):
    done = run_engine(_ENGINE.removesuffix("\nstart()\n") + _FORKS_FAIL, tmp_path)
    assert done.stderr == ""
    refused, killed, *_, last = done.stdout.splitlines()
    assert refused == killed
    golden(refused)
    assert last == "True", "the next one can be forked again"


def test_a_child_is_waited_for_as_popen_does():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = rank_fork_server.ForkedProcess(sleeper.pid)
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANG_S) == child.poll() == -15
    child.send_signal(signal.SIGKILL)  # it has ended: nobody is hit
    sleeper.returncode = -15


def test_modules_of_the_user_ask_for_a_fresh_start(tmp_path, monkeypatch):
    monkeypatch.setattr(
        forking.inherited, "modules", frozenset({"torch", "torch.nn", "filelock"})
    )
    asked_for = frozenset({"filelock", "filelock.Lock"})
    monkeypatch.setattr(forking.inherited, "asked_for", asked_for)

    def needs_exec(*names: str, may_be_loaded: list[str] | None = None) -> bool:
        folder = tmp_path / secrets.token_hex(4)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        sources = {"roots": [str(folder)], "may_be_loaded": may_be_loaded}
        with zipfile.ZipFile(tmp_path / "code", "w") as archive:
            archive.writestr("sources.json", json.dumps(sources))
        at_home = {"paths": [], "code": str(tmp_path / "code")}
        in_work_dir = {**at_home, "paths": ["/nowhere", str(folder)]}
        found = {
            rank_fork_server._needs_exec({"DISTMAGIC_WORKER": json.dumps(one)})
            for one in (in_work_dir, at_home)
        }
        (answer,) = found
        return answer

    assert not needs_exec("data.json", "mine.py", "lab/filelock.py", "torch/events.log")
    assert needs_exec("filelock.py")
    assert needs_exec(may_be_loaded=[])
    assert needs_exec(may_be_loaded=["torch", "filelock"])
    assert needs_exec(may_be_loaded=["filelock.Lock"])
    assert not needs_exec(may_be_loaded=["torch.nn", "filelock.Lock"])
    assert needs_exec("torch/__init__.py")


def test_there_must_be_room_for_what_is_shown():
    with pytest.raises(ValueError):
        process_title.show("a role with a long name", "job")
    assert not process_title.can_show()


_TITLE = """
from distmagic.remote.engine import process_title
known = process_title.can_show()
process_title._limits = lambda words: (0, 0)  # as on gVisor
print(known, process_title.can_show())
"""


def test_nothing_is_shown_where_its_place_is_not_known():
    env = {**os.environ, processes.MARK: process_title.JOB_PLACEHOLDER}
    argv = [sys.executable, "-c", _TITLE, process_title.ROLE_PLACEHOLDER]
    assert completed(argv, env=env).stdout == "True False\n"

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

from distmagic.remote.engine import forking, process_title, spare_ranks
from distmagic.remote.system import processes
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="hosts run Linux"
)

_ENGINE = """
import json, os, signal, sys, threading, time
from distmagic.remote.engine import forking, spare_ranks; from distmagic.remote.system import processes; from distmagic.remote.rank import worker

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
    ranks = spare_ranks.SpareRanks(4)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # torchrun has some
    told = []
    for number in range(4):
        child = ranks.start({**os.environ, "NUMBER": str(number)}, 1, 2)
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
    raise BlockingIOError(errno.EAGAIN, "pids.max")

class Handler:
    _stdout = _stderr = None

    def _popen(self, args, env):
        if "NO_MORE" in env:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return args[0]

def engine():
    spare_ranks.SpareRanks(1).replace_popen(Handler)
    command = processes.command("worker")
    print(Handler()._popen(("numactl", *command), {}))
    rank = Handler()._popen(command, {**os.environ, "NUMBER": "1"})
    print("forked", rank.wait(60))
    print(Handler()._popen(command, {}) == command[0])  # torchrun restarts it
    forking.fork = fail
    spare_ranks.SpareRanks(1).replace_popen(Handler)
    print(Handler()._popen(command, {}) == command[0])
    try:
        Handler()._popen(command, {"NO_MORE": ""})
    except OSError as error:
        print(error)

start()
"""


def test_torchrun_starts_the_ranks_for_which_there_is_no_spare_one(tmp_path, golden):
    done = run_engine(_ENGINE.removesuffix("\nstart()\n") + _FORKS_FAIL, tmp_path)
    assert done.stderr == ""
    numactl, rank, *others, refused = done.stdout.splitlines()
    assert numactl == "numactl"
    assert json.loads(rank)["number"] == "1"
    assert others == ["forked 1", "True", "True"]
    golden(refused)


_KILLED = """
def engine():
    ranks = spare_ranks.SpareRanks(2)
    for pid, _ in ranks._waiting:
        os.kill(pid, signal.SIGKILL)  # as the kernel does when memory runs out
    print([ranks.start(dict(os.environ), 1, 2).wait(60) for _ in range(2)])

start()
"""


def test_a_spare_rank_that_was_killed_is_a_rank_that_was_killed(tmp_path):
    done = run_engine(_ENGINE.removesuffix("\nstart()\n") + _KILLED, tmp_path)
    assert (done.stdout, done.stderr) == ("[-9, -9]\n", "")


_UNUSED = """
def engine():
    spare_ranks.SpareRanks(2)
    os.kill(os.getpid(), signal.SIGKILL)

processes.become_subreaper()
engine_pid = os.fork()
if engine_pid:
    os.waitpid(engine_pid, 0)
    ended = []
    while processes.has_child():
        ended.append(os.wait())
    print(len(ended))
else:
    start()
"""


def test_spare_ranks_end_with_their_engine(tmp_path):
    done = run_engine(_ENGINE.removesuffix("\nstart()\n") + _UNUSED, tmp_path)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_child_is_waited_for_as_popen_does():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = spare_ranks.ForkedProcess(sleeper.pid)
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANG_S) == child.poll() == -15
    child.send_signal(signal.SIGKILL)  # it has ended: nobody is hit
    sleeper.returncode = -15


def test_modules_of_the_user_ask_for_a_fresh_start(tmp_path, monkeypatch):
    monkeypatch.setattr(forking.inherited, "packages", frozenset({"torch", "filelock"}))
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
        found = {spare_ranks._needs_exec(one) for one in (in_work_dir, at_home)}
        (answer,) = found
        return answer

    assert not needs_exec("data.json", "mine.py", "lab/filelock.py", "torch/events.log")
    assert needs_exec("filelock.py")
    assert needs_exec(may_be_loaded=[])
    assert needs_exec(may_be_loaded=["torch", "filelock"])
    assert needs_exec(may_be_loaded=["filelock.Lock"])
    assert not needs_exec(may_be_loaded=["torch.nn", "filelock.Lock"])
    assert needs_exec("torch/__init__.py")


def test_a_rank_that_is_restarted_has_the_variables_of_a_new_process(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(forking.inherited, "before", {"COLOUR": "red"})
    monkeypatch.setattr(
        forking.inherited, "variables", {"COLOUR": "blue", "KMP_INIT_AT_FORK": "FALSE"}
    )
    with zipfile.ZipFile(tmp_path / "code", "w") as archive:
        archive.writestr("sources.json", "{}")
    from_agent = json.dumps({"paths": [], "code": str(tmp_path / "code")})
    monkeypatch.setenv("DISTMAGIC_WORKER", from_agent)

    class Handler:
        def _popen(self, args, env):
            return env

    spare_ranks.SpareRanks(0).replace_popen(Handler)
    env = {"COLOUR": "blue", "KMP_INIT_AT_FORK": "FALSE", "RANK": "1"}
    started = Handler()._popen(processes.command("worker"), env)
    assert started == {"COLOUR": "red", "RANK": "1"}


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

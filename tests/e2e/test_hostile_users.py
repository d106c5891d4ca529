"""Another user on a host of ours: sees nothing, reaches nothing, and what he prepared is refused with a name.

His programs are real processes with another uid; ours is root's here, whom no mode keeps out: so all that protects is
what distmagic does itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distmagic.api import session
from distmagic.errors import PreflightError
from tests.e2e import runner
from tests.e2e.runner import at_work
from tests.lab import LabHost

pytestmark = pytest.mark.needs("lab")

SECRET = "hunter2-DO-not-tell".lower()  # this source travels, and is no leak
AS_OTHER = (
    "import glob, json, os, socket, sys; os.setgroups([]); os.setgid(1); os.setuid(1)\n"
)
SNOOP = """
seen = []
for path in glob.glob("/tmp/distmagic-*") + glob.glob("/home/node/.distmagic/*"):
    try:
        seen += [os.path.join(path, name) for name in os.listdir(path)]
    except OSError:
        pass
for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
    for name in ("environ", "cmdline"):
        try:
            seen += [f"{pid}/{name}"] if b"hunter2" in open(f"/proc/{pid}/{name}", "rb").read() else []
        except OSError:
            pass
print(json.dumps(seen))
"""
FORGE = """
folder, job = sys.argv[1:]
words = [
    ("readers", socket.SOCK_STREAM, {"t": "attach", "n": 0, "job": job, "node_rank": 0}),
    ("readers", socket.SOCK_STREAM, {"t": "stop", "n": 0, "grace_s": 0.0}),
    ("ranks", socket.SOCK_SEQPACKET, {"t": "ended", "n": 0, "rank": 0, "restart": 0, "outcome": "exited", "code": 3}),
    ("ranks", socket.SOCK_SEQPACKET,
     {"t": "worker", "n": 0, "rank": 0, "local_rank": 0, "world_size": 2, "restart": 7, "pid": os.getpid()}),
]
heard = []
for name, kind, word in words:
    conn = socket.socket(socket.AF_UNIX, kind)
    conn.connect(os.path.join(folder, name))
    try:
        conn.send(json.dumps(word).encode() + b"\\n")
        heard.append(conn.recv(100000).decode())
    except (BrokenPipeError, ConnectionResetError):
        heard.append("")
print(json.dumps(heard))
"""


def as_other(host: LabHost, script: str, *argv: str) -> list[str]:
    done = host.exec(["python3", "-c", AS_OTHER + script, *argv])
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout or "[]"))


def log_in_with(host: LabHost, line: str) -> None:
    """Have every log-in begin with a line of shell."""
    script = f'#!/bin/bash\n{line}\nexec /bin/bash "$@"\n'
    host.exec(
        ["sh", "-c", "cat > ~/shell; chmod 755 ~/shell"], stdin=script
    ).check_returncode()
    host.set_shell("/home/node/shell")
    session().close()  # a connection that stands goes on with the old one


def modes(host: LabHost, *tops: str) -> dict[str, str]:
    """Return "kind mode" of everything below some directories, themselves included."""
    done = host.exec(["find", *tops, "-printf", "%p\\t%y %m\\n"])
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t") for line in done.stdout.splitlines())


def work_until_told(folder: str) -> int:
    """Work until there is a file `go`; return this rank's umask."""
    import os
    import time
    from pathlib import Path

    import distmagic

    distmagic.report(step=1)
    while not (Path(folder) / "go").exists():
        time.sleep(0.02)
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.quick
def test_another_user_sees_nothing_and_reaches_nothing(lab):
    host = lab.hosts[0]
    log_in_with(host, "umask 000")
    found: dict[str, object] = {}

    def attack() -> None:
        (name,) = (
            name for name in host.listdir("/tmp") if name.startswith("distmagic-")
        )
        folder = f"/tmp/{name}"
        try:
            found["modes"] = modes(host, folder, "/home/node/.distmagic")
            found["seen"] = as_other(host, SNOOP)
            found["texts"] = host.exec(
                ["grep", "-rl", SECRET, "/home/node/.distmagic", folder]
            ).stdout
            found["argv"] = [
                word for p in host.processes() for word in p.cmdline if SECRET in word
            ]
            found["here"] = [
                pid
                for pid in os.listdir("/proc")
                if pid.isdigit() and SECRET in _cmdline(pid)
            ]
            job = (
                name.removeprefix(f"distmagic-{os.getuid()}-")
                .partition("-")[2]
                .rpartition("-")[0]
            )
            host.exec(
                ["chmod", "777", folder, f"{folder}/readers", f"{folder}/ranks"]
            ).check_returncode()
            found["heard"] = as_other(host, FORGE, folder, job)
            host.exec(["chmod", "700", folder]).check_returncode()
        finally:
            (host.home / "go").touch()

    watch = runner.Watch(at_work(2), attack)
    run = runner.run(
        lab, "dm1:2", work_until_told, "/home/node", screen=watch, env={"WORD": SECRET}
    )
    # The umask of the log-in is the ranks' business.
    assert dict(run.results) == {0: 0, 1: 0}
    assert found["heard"] == [""] * 4
    assert found["seen"] == found["argv"] == found["here"] == []
    assert run.state.phase == "done"
    assert all(worker.restart == 0 for worker in run.state.workers.values())
    kinds = {"d": "d 700", "f": "f 600", "s": "s 600"}
    table = found["modes"]
    assert isinstance(table, dict)
    ours = {path: mode for path, mode in table.items() if "/torchrun/" not in path}
    assert {path: mode for path, mode in ours.items() if mode != kinds[mode[0]]} == {}
    assert any(path.endswith("/readers") for path in ours)
    assert any(path.endswith("/journal.jsonl") for path in ours)
    assert (
        found["texts"]
        == host.exec(["grep", "-rl", SECRET, "/home/node/.distmagic"]).stdout
        == ""
    )


def _cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        ("os.mkdir('/tmp/dm', 0o755)", "/tmp/dm belongs to another user (uid 1)"),
        ("os.umask(0); os.mkdir('/tmp/dm', 0o777)", "/tmp/dm belongs to another user (uid 1)"),
        ("os.symlink('/home/node', '/tmp/dm')", "/tmp/dm is another user's link (uid 1)"),
        ("os.symlink('/home/node/nowhere', '/tmp/dm')", "/tmp/dm is another user's link (uid 1)"),
    ],
)  # fmt: skip
def test_a_home_that_another_user_has_prepared(lab, prepare, why):
    """Through the link, files of ours would have been made, and old ones removed, in a place that he chose."""
    host = lab.hosts[0]
    log_in_with(host, "export DISTMAGIC_HOME=/tmp/dm")
    host.exec(
        ["sh", "-c", "mkdir -p jobs/thesis; touch -d 2001-01-01 jobs/thesis jobs"]
    ).check_returncode()
    try:
        as_other(host, prepare)
        error = runner.failure(lab, "dm1:1", int)
        assert isinstance(error, PreflightError)
        assert error.message == f"dm1: can't write to /tmp/dm: {why}."
        assert "DISTMAGIC_HOME" in error.hint
        assert host.listdir("/home/node/jobs") == ("thesis",)
        assert {"blobs", "nowhere"}.isdisjoint(host.listdir("/home/node"))
    finally:
        host.exec(["rm", "-r", "/tmp/dm"])


def test_a_home_where_everybody_can_replace_it(lab, golden):
    host = lab.hosts[0]
    log_in_with(host, "export DISTMAGIC_HOME=/tmp/all/dm")
    host.exec(["mkdir", "-p", "-m", "777", "/tmp/all"]).check_returncode()
    error = runner.failure(lab, "dm1:1", int)
    golden(error.message)
    host.exec(["rm", "-r", "/tmp/all"]).check_returncode()


def test_what_others_could_change_in_an_open_home_is_sent_again(lab):
    """A file with the right content that belongs to somebody else is right only until he changes it."""
    host = lab.hosts[0]
    script = """
        umask 000; mkdir -p ~/.distmagic/jobs ~/.distmagic/blobs; chmod 777 ~/.distmagic ~/.distmagic/*
        for f in ~/.distmagic/blobs/*; do cp $f $f.x; chmod 644 $f.x; chown 1 $f.x; mv -f $f.x $f; done
        ls ~/.distmagic/blobs | wc -l
    """
    assert runner.run(lab, "dm1:1", int).results[0] == 0
    done = host.exec(["sh", "-c", script])
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert runner.run(lab, "dm1:1", int).results[0] == 0
    owners = host.exec(
        ["find", "/home/node/.distmagic/blobs", "-type", "f", "-printf", "%U %m\n"]
    ).stdout.split("\n")
    assert set(owners) == {"0 600", ""}
    table = modes(host, "/home/node/.distmagic")
    assert (table["/home/node/.distmagic"], table["/home/node/.distmagic/blobs"]) == (
        "d 755",
        "d 700",
    )

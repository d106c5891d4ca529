"""Snapshots: which one is taken, by whom it was written, and that nothing is left of those that were cut short."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from distmagic.remote.rank import checkpoint
from distmagic.remote.rank.checkpoint import Snapshot

HOST = os.uname().nodename


def a_snapshot(step: int, job: str) -> Snapshot:
    return Snapshot(step=step, job=job, host="gpu-a")


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        ([], None),
        ([None, None], None),
        ([None, a_snapshot(3, "now")], 1),
        ([a_snapshot(3, "now"), a_snapshot(5, "now"), a_snapshot(5, "now")], 1),
        ([a_snapshot(3, "now"), None, a_snapshot(99, "older")], 0),
        ([a_snapshot(3, "now"), None, a_snapshot(99, "")], 0),
        ([a_snapshot(3, "older"), a_snapshot(99, "oldest")], 1),
    ],
)
def test_a_snapshot_of_this_job_comes_before_any_other(found, rank):
    assert checkpoint.newest(found, "now") == rank


def test_without_a_job_the_newest_is_taken():
    assert checkpoint.newest([a_snapshot(3, ""), a_snapshot(99, "older")], "") == 1


@pytest.mark.parametrize(
    ("writer", "reader", "words"),
    [
        ("job-1", "job-1", "this job"),
        ("job-1", "job-2", "job job-1"),
        ("", "job-2", "an unknown job"),
    ],
)
def test_one_line_says_which_snapshot_was_taken(
    tmp_path, monkeypatch, capsys, writer, reader, words
):
    monkeypatch.setenv("DISTMAGIC_JOB", writer)
    path = tmp_path / "a" / "snapshot.pt"
    assert checkpoint.load(path) is None
    checkpoint.save({"epoch": 7}, path, step=7)
    monkeypatch.setenv("DISTMAGIC_JOB", reader)
    assert checkpoint.load(path) == {"epoch": 7}
    line = (
        f"distmagic.checkpoint: {path}: took step 7, from {HOST}, written by {words}\n"
    )
    assert capsys.readouterr().err == line


def test_other_local_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    checkpoint.save({}, tmp_path / "snapshot.pt", step=1)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_ranks_of_this_host_were_writing_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [
        f".snapshot.pt.{HOST}.{os.getppid()}",
        f".snapshot.pt.other.{ended.pid}",
        f".snapshot.pt.{HOST}.mine",
    ]
    for name in (*kept, f".snapshot.pt.{HOST}.{ended.pid}-5eed"):
        (tmp_path / name).write_bytes(b"half of it")
        os.utime(tmp_path / name, (1, 1))
    # One that is written to has changed just now: so is that of another container, whose process can't be seen from here.
    kept.append(f".snapshot.pt.{HOST}.{ended.pid}-abcd")
    (tmp_path / kept[-1]).write_bytes(b"half of it")
    checkpoint.save({}, tmp_path / "snapshot.pt", step=1)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "snapshot.pt"}


RANK = """
import json, os, sys
import torch.distributed as dist
from distmagic import checkpoint

folder = sys.argv[1]
other = os.fork()  # two ranks, for which torch is loaded once
rank = 1 if other == 0 else 0
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(checkpoint.load(f"{folder}/{rank}.pt"), file)
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_a_stale_snapshot_of_another_run_does_not_win(
    tmp_path, monkeypatch, torch_forks
):
    """A host that was away comes back with the file of an earlier experiment, which went on for longer."""
    monkeypatch.setenv("DISTMAGIC_JOB", "now")
    checkpoint.save({"weights": "ours"}, tmp_path / "0.pt", step=10)
    monkeypatch.setenv("DISTMAGIC_JOB", "older")
    checkpoint.save({"weights": "stale"}, tmp_path / "1.pt", step=99)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = torch_forks.run(script, str(tmp_path), env={"DISTMAGIC_JOB": "now"})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "weights": "ours"
        }
    said = [line for line in done.stderr.decode().splitlines() if "distmagic" in line]
    assert said == [
        f"distmagic.checkpoint: {tmp_path}/0.pt: took step 10, from {HOST}, written by this job"
    ]


FULL = """
import resource, sys
from pathlib import Path
import torch
from distmagic.remote.rank import checkpoint

checkpoint.save({"w": torch.ones(10)}, "snapshot.pt", step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
try:
    checkpoint.save({"w": torch.ones(100_000), "more": [torch.ones(3000)] * 50}, "snapshot.pt", step=2)
except OSError as caught:
    error = caught
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
print(type(error).__name__, error.errno)
print(checkpoint.load("snapshot.pt"), sorted(path.name for path in Path().iterdir()))
"""


@pytest.mark.parametrize("room_bytes", [0, 100, 5000, 350_000, 400_000])
def test_a_disk_that_becomes_full_is_an_error_of_the_system_and_the_old_snapshot_stays(
    torch_forks, tmp_path, room_bytes
):
    (tmp_path / "there").mkdir()
    (tmp_path / "program.py").write_text(FULL)
    done = torch_forks.run(
        tmp_path / "program.py", str(room_bytes), cwd=str(tmp_path / "there")
    )
    error, left = done.stdout.decode().splitlines()
    assert error == f"OSError {errno.EFBIG}"
    assert (
        left
        == "{'w': tensor([1., 1., 1., 1., 1., 1., 1., 1., 1., 1.])} ['snapshot.pt']"
    )

"""A secret in the home that all nodes of a job see: who finds it, who doesn't, and when it goes."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.errors import Unreachable, UsageError
from distmagic.inside import following as following_module
from distmagic.inside import shared_home
from distmagic.inside.following import Following
from distmagic.inside.job_node import JobNode
from distmagic.inside.meeting import Meeting
from distmagic.inside.proof import SharedHome, SharedSecret, proof_of
from tests.builders.dialling import HERE
from tests.lab.waiting import HANG_S

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
35 22 {device} / /home rw,relatime shared:1 - {type} filer:/home rw,vers=4.2
36 22 0:50 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of these tests alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DISTMAGIC_HOME", raising=False)
    return tmp_path


@pytest.fixture
def meeting(nodes: tuple[JobNode, JobNode]) -> Iterator[Meeting]:
    with contextlib.closing(Meeting(nodes[0], SharedHome(nodes[0]))) as made:
        yield made


def mounted(home: Path, kind: str) -> Path:
    """Write a table of mounts in which the home is on a file system of this kind, and return it."""
    device = home.stat().st_dev
    path = home / "mounts"
    path.write_text(
        MOUNTS.format(device=f"{os.major(device)}:{os.minor(device)}", type=kind)
    )
    return path


def secrets_in(home: Path) -> list[Path]:
    return [path for path in home.rglob(".distmagic/inside/*") if path.is_file()]


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [("nfs4", True), ("lustre", True), ("fuse.juicefs", True), ("xfs", False), ("tmpfs", False), ("overlay", False)],
)  # fmt: skip
def test_a_file_system_of_a_network_is_shared(home, kind, is_shared):
    assert shared_home.is_there(mounted(home, kind)) is is_shared


def test_a_home_that_the_table_does_not_have_is_not_shared(home):
    (home / "mounts").write_text("22 1 8:1 / / rw - nfs filer:/ rw\n")
    assert not shared_home.is_there(home / "mounts")
    assert not shared_home.is_there(home / "nowhere")


def test_it_is_for_slurm(nodes, home, monkeypatch):
    monkeypatch.setattr(shared_home, "is_there", lambda: True)
    assert isinstance(proof_of({}, nodes[0]), SharedHome)
    secret = {"DISTMAGIC_SECRET": "0123456789abcdef"}
    assert isinstance(proof_of(secret, nodes[0]), SharedSecret)
    assert proof_of({}, replace(nodes[0], key="skypilot 7")) is None
    monkeypatch.setattr(shared_home, "is_there", lambda: False)
    assert proof_of({}, nodes[0]) is None
    assert secrets_in(home) == [], "only node 0 writes one, and only when it listens"


def test_nodes_meet_by_a_secret_that_only_their_user_can_read(meeting, nodes, home):
    (path,) = secrets_in(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    proof = SharedHome(nodes[1])
    with contextlib.closing(Following(nodes[1], proof, HERE)) as following:
        following.come(1, "same", HANG_S)
        meeting.gather(1, "same", HANG_S)
        assert secrets_in(home) == [], "nobody needs it any more"
        process = meeting.transport("n1").start(("cat",))
        process.write(b"by a shared home\n")
        assert process.read() == b"by a shared home\n"
        process.close()


def test_a_node_0_to_which_nobody_came_leaves_none(meeting, home):
    assert len(secrets_in(home)) == 1
    meeting.close()
    assert secrets_in(home) == []


def test_a_home_that_is_not_shared_after_all_is_told(meeting, nodes, tmp_path, monkeypatch, golden):  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    with golden.raises(Unreachable):
        Following(nodes[1], SharedHome(nodes[1]), HERE).come(1, "same", 0.5)
    assert not meeting.members[0].is_there


@pytest.mark.parametrize("what", ["others can read it", "a link"])
def test_a_file_that_is_not_this_users_alone_opens_nothing(meeting, nodes, home, what):
    (path,) = secrets_in(home)
    if what == "a link":
        path.rename(home / "elsewhere")
        path.symlink_to(home / "elsewhere")
    else:
        path.chmod(0o644)
    with pytest.raises(Unreachable):
        Following(nodes[1], SharedHome(nodes[1]), HERE).come(1, "same", 0.5)
    assert not meeting.members[0].is_there


def test_one_that_an_earlier_start_has_left_is_replaced(nodes, home, monkeypatch):
    left = shared_home.offer(nodes[0].key)
    proof = SharedHome(nodes[1])
    with contextlib.closing(Meeting(nodes[0], SharedHome(nodes[0]))) as meeting:
        (path,) = secrets_in(home)
        now = path.read_text()
        assert left != now
        path.write_text(left)
        monkeypatch.setattr(following_module, "_WRONG_S", 0.5)
        with pytest.raises(Unreachable, match="DISTMAGIC_SECRET"):
            Following(nodes[1], proof, HERE).come(1, "same", HANG_S)
        path.write_text(now)
        with contextlib.closing(Following(nodes[1], proof, HERE)) as following:
            following.come(1, "same", HANG_S)
            meeting.gather(1, "same", HANG_S)


def test_a_node_0_that_ends_late_leaves_that_of_the_next(home):
    first = shared_home.offer("slurm 7.0")
    second = shared_home.offer("slurm 7.0")
    shared_home.withdraw("slurm 7.0", first)
    assert shared_home.find("slurm 7.0") == second
    shared_home.withdraw("slurm 7.0", second)
    assert secrets_in(home) == []


def test_what_a_killed_node_0_has_left_goes_a_month_later(home):
    shared_home.offer("slurm 7.0")
    (path,) = secrets_in(home)
    long_ago = time.time() - 31 * 86400
    os.utime(path, (long_ago, long_ago))
    shared_home.offer("slurm 8.0")
    assert secrets_in(home) != [path]
    assert len(secrets_in(home)) == 1


def test_a_home_that_takes_no_file_is_told(nodes, home, golden):
    (home / ".distmagic").write_text("no folder")
    with golden.raises(UsageError):
        Meeting(nodes[0], SharedHome(nodes[0]))


def test_jobs_with_any_name_have_files_of_their_own(home):
    for key in ("slurm ../../x.0", "slurm 7.0", "slurm 7.1"):
        shared_home.offer(key)
    assert len(secrets_in(home)) == 3

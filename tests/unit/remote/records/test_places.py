"""Where things lie on a host: names that can't lead elsewhere, and private directories."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from pathlib import Path

import pytest

from distmagic.remote.records import places

SHA = "0123456789abcdef" * 4


def test_home_is_in_the_users_own_unless_said(monkeypatch, home):
    assert places.home() == home
    monkeypatch.setenv("DISTMAGIC_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert places.home() == Path("/home/me/.distmagic")


def test_how_long_a_log_may_be(monkeypatch):
    monkeypatch.delenv("DISTMAGIC_LOG_BYTES", raising=False)
    assert places.log_limit_bytes() == places.log_limit_bytes({}) == 64 << 20
    monkeypatch.setenv("DISTMAGIC_LOG_BYTES", "100000")
    assert places.log_limit_bytes() == 100_000
    # The job's own goes first.
    assert places.log_limit_bytes({"DISTMAGIC_LOG_BYTES": "65536"}) == 65536


@pytest.mark.parametrize("text", ["1G", "-1", "65535", "0", "1e9", "²"])
def test_what_is_no_length_of_a_log(text, golden):
    with golden.raises(ValueError):
        places.log_limit_bytes({"DISTMAGIC_LOG_BYTES": text})


@pytest.mark.parametrize(
    "name",
    ["", "../" * 21 + "x", SHA.upper(), SHA[:-1], SHA + "0", "g" * 64, "/etc/passwd"],
)
def test_what_is_no_hash(home, name):
    with pytest.raises(ValueError) as caught:
        places.blob(name)
    assert str(caught.value) == f"{name[:80]!r} is no SHA-256"


def test_a_jobs_directory_is_named_by_node_and_host(home, monkeypatch):
    monkeypatch.setattr(places.socket, "gethostname", lambda: "node7")
    assert (
        places.job_dir("1121-094500-abcd", 3)
        == home / "jobs" / "1121-094500-abcd" / "3-node7"
    )


@pytest.mark.parametrize(
    "name", ["", "-", "..", "../../etc", "a/b", "a b", "a\0b", "a.b"]
)
def test_what_is_no_job(home, name):
    with pytest.raises(ValueError) as caught:
        places.job_dir(name, 0)
    assert str(caught.value) == f"{name[:80]!r} is not a job"
    for ask in (lambda: places.run_dir(name, 0), lambda: places.run_dirs(name)):
        with pytest.raises(ValueError, match="is not a job"):
            ask()


def test_a_socket_in_the_run_directory_has_a_short_name():
    path = places.run_dir("1231-235959-" + "f" * 8, 9999) / "readers"
    assert str(path).startswith(
        f"/tmp/distmagic-{os.getuid()}-{places.host_id()}-1231-235959-ffffffff-9999"
    )
    assert len(str(path)) + len("4294967295") < 107


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(places, "run_dir", lambda job, node: tmp_path / f"{job}-{node}")
    return tmp_path / "j-0"


def test_a_run_directory_is_private(run_dir):
    made = places.make_run_dir("j", 0)
    assert (made, made.stat().st_mode & 0o777) == (run_dir, 0o700)
    places.check_run_dir(made)
    with pytest.raises(FileExistsError):
        places.make_run_dir("j", 0)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1700, 0o600])
def test_a_directory_that_others_may_enter_is_refused(run_dir, mode, golden):
    run_dir.mkdir()
    run_dir.chmod(mode)
    with golden.raises(PermissionError):
        places.check_run_dir(run_dir)


def test_links_files_and_others_directories_are_refused(run_dir, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    run_dir.symlink_to(tmp_path / "real")
    with pytest.raises(FileExistsError):
        places.make_run_dir("j", 0)
    with pytest.raises(PermissionError):
        places.check_run_dir(run_dir)
    (tmp_path / "file").touch(0o700)
    with pytest.raises(PermissionError):
        places.check_run_dir(tmp_path / "file")
    monkeypatch.setattr(places.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError):
        places.check_run_dir(tmp_path / "real")


@pytest.mark.parametrize("given", ["~/else", "sub/folder"])
def test_the_home_is_absolute(given, monkeypatch, tmp_path):
    """Ranks have another working directory than the process that answers the notebook."""
    monkeypatch.setenv("DISTMAGIC_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert places.home() == tmp_path / given.removeprefix("~/")


def test_a_user_without_a_home(monkeypatch, golden):
    """Python leaves a `~` of which it knows nothing as it is."""
    monkeypatch.setenv("DISTMAGIC_HOME", "~no-such-user/distmagic")
    with golden.raises(FileNotFoundError):
        places.home()


def test_whether_the_disk_takes_anything(home):
    assert places.write_error().startswith(
        f"[Errno 2] No such file or directory: '{home}/blobs/"
    )
    (home / "blobs").mkdir(parents=True)
    assert places.write_error() == ""
    assert list((home / "blobs").iterdir()) == []


# ---- what dead agents left


# Other tests of this machine share /tmp.
JOB = f"1121-000000-{secrets.token_hex(4)}"
OWNER = secrets.token_hex(8)


@pytest.fixture
def deserted():
    path = places.make_run_dir(JOB, 0)
    yield path
    shutil.rmtree(path)


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path / "readers"))
    listener.listen(0)
    return listener


def an_hour_ago() -> float:
    """Return a time long after which a directory is judged, and not so long that other hosts of this /tmp remove it."""
    return time.time() - 3600


def is_dead(path: Path) -> bool:
    return path in places.dead_runs().get(JOB, ())


# The last one is of before the clock was set back.
@pytest.mark.parametrize(("age_s", "dead"), [(0, False), (3600, True), (-3600, True)])
def test_a_run_whose_agent_is_gone(deserted, age_s, dead):
    listening(deserted).close()
    os.utime(deserted, (1, time.time() - age_s))
    assert is_dead(deserted) is dead


def test_a_run_whose_agent_has_no_time_to_answer(deserted):
    with listening(deserted), socket.socket(socket.AF_UNIX) as first:
        os.utime(deserted, (1, an_hour_ago()))
        first.connect(str(deserted / "readers"))  # the queue is full now
        assert not is_dead(deserted)


def test_a_run_of_which_one_agent_lives(deserted):
    other = places.make_run_dir(JOB, 1)
    try:
        with listening(other):
            listening(deserted).close()
            for path in (deserted, other):
                os.utime(path, (1, an_hour_ago()))
            assert not is_dead(deserted)
    finally:
        shutil.rmtree(other)


def test_a_directory_that_others_may_enter_is_not_ours_to_judge(deserted):
    os.utime(deserted, (1, an_hour_ago()))
    deserted.chmod(0o755)
    assert not is_dead(deserted)


@pytest.mark.needs("lab")
def test_nobody_else_can_shield_or_fake_a_dead_run(deserted):
    """Names below /tmp are everybody's to take."""
    fakes = [deserted.with_name(deserted.name[:-1] + end) for end in ("7", "8")]
    fakes[0].mkdir(mode=0o700)
    os.chown(fakes[0], 1, 1)
    fakes[1].symlink_to(deserted)
    try:
        os.utime(deserted, (1, an_hour_ago()))
        assert places.dead_runs()[JOB] == [deserted]
        assert places.run_dirs(JOB) == (deserted,)
    finally:
        fakes[0].rmdir()
        fakes[1].unlink()


# ---- hosts that share one /tmp


@pytest.fixture
def as_host(monkeypatch):
    """Have this process be another host of the same /tmp, by name."""
    return lambda name: monkeypatch.setattr(places, "host_id", lambda: name)


@pytest.mark.parametrize(
    "differs",
    [0, 1, 2, 3],
    ids=["processes", "network", "files", "another start of the kernel"],
)
def test_what_makes_a_host_another_one(tmp_path, monkeypatch, differs):
    views = [tmp_path / name for name in ("pid", "net", "root", "boot_id")]
    for view in views:
        view.write_text("1")

    def host_id() -> str:
        monkeypatch.setattr(places, "_VIEWS", tuple(map(str, views[:3])))
        monkeypatch.setattr(places, "_BOOT_ID", views[3])
        return places.host_id.__wrapped__()

    first = host_id()
    assert (host_id(), len(first)) == (first, 8)
    views[differs].rename(tmp_path / "old")
    views[differs].write_text("2")
    assert host_id() != first


def test_what_another_host_has_in_tmp_is_neither_found_nor_judged(deserted, as_host):
    listening(deserted).close()
    os.utime(deserted, (1, an_hour_ago()))
    warm = places.make_warm_dir(OWNER, "key")
    try:
        assert is_dead(deserted)
        assert (JOB, 0) in places.live_runs()
        assert places.warm_dirs(OWNER, "key") == (warm,)
        as_host("00000000")
        assert not is_dead(deserted)
        assert places.run_dirs(JOB) == ()
        assert (JOB, 0) not in places.live_runs()
        assert places.warm_dirs(OWNER, "key") == ()
        other = places.make_run_dir(JOB, 0)  # nothing is in its way
        other.rmdir()
    finally:
        warm.rmdir()


@pytest.mark.parametrize(
    ("age_s", "listens", "goes"),
    [(90_000, False, True), (80_000, False, False), (90_000, True, False)],
)
def test_what_no_host_has_used_for_a_day_goes(deserted, as_host, age_s, listens, goes):
    """A container that is started anew has another name in /tmp, and never finds what it left there before."""
    warm = places.make_warm_dir(OWNER, "key")
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    try:
        for listener, path in zip(
            listeners, (deserted / "readers", warm / "template"), strict=True
        ):
            listener.bind(str(path))
            listener.listen(1)
            if not listens:
                listener.close()
        for folder in (deserted, warm):
            os.utime(folder, (1, time.time() - age_s))
        as_host("00000000")
        found = places.forgotten()
        assert (deserted in found, warm in found) == (goes, goes)
    finally:
        for listener in listeners:
            listener.close()
        shutil.rmtree(warm)


# ---- nobody else's business


def test_folders_are_made_private_under_any_umask(home):
    old = os.umask(0)
    try:
        places.make_private(home / "blobs")
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (home, home / "blobs")] == [
        0o700,
        0o700,
    ]


def test_folders_that_are_open_to_others_are_shut(home):
    (home / "blobs").mkdir(parents=True)
    home.chmod(0o777)
    (home / "blobs").chmod(0o777)
    places.make_private(home / "blobs")
    assert [path.stat().st_mode & 0o777 for path in (home, home / "blobs")] == [
        0o755,
        0o700,
    ]


@pytest.mark.needs("lab")
@pytest.mark.parametrize("which", [".", "blobs"])
def test_folders_of_somebody_else_are_refused(home, which, golden):
    (home / "blobs").mkdir(parents=True)
    os.chown(home / which, 1, 1)
    with golden.raises(PermissionError):
        places.make_private(home / "blobs")

"""Where things lie on a host: names that can't lead elsewhere, private directories, and what is removed when."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from distmagic.remote.records import places

SHA = "0123456789abcdef" * 4
DAY_S = 86400.0
NOW = 2_000_000_000.0


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


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
    assert places.log_limit_bytes({"DISTMAGIC_LOG_BYTES": "65536"}) == 65536  # the job's own goes first


@pytest.mark.parametrize("text", ["1G", "-1", "65535", "0", "1e9", "²"])
def test_what_is_no_length_of_a_log(text):
    with pytest.raises(ValueError) as caught:
        places.log_limit_bytes({"DISTMAGIC_LOG_BYTES": text})
    assert str(caught.value) == f"DISTMAGIC_LOG_BYTES={text} is no number of bytes of at least 65,536"


def test_what_goes_while_it_is_measured(home, monkeypatch):
    """The oldest piece of a log goes while its job runs; neither the listing nor the expiry stumbles over that."""
    folder = home / "jobs" / "long" / "0-a"
    folder.mkdir(parents=True)
    (folder / "rank0.stdout.log").write_bytes(b"x" * 7)
    (folder / "rank0.stdout.log.100").write_bytes(b"x" * 7)
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name.endswith(".100"):
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert places.size_of(folder) == 7
    places.expire(time.time() + 8 * DAY_S)
    assert not (home / "jobs" / "long").exists()


def test_a_blob_has_the_name_of_its_hash(home):
    assert places.blob(SHA) == home / "blobs" / SHA


@pytest.mark.parametrize("name", ["", "../" * 21 + "x", SHA.upper(), SHA[:-1], SHA + "0", "g" * 64, "/etc/passwd"])
def test_what_is_no_hash(home, name):
    with pytest.raises(ValueError) as caught:
        places.blob(name)
    assert str(caught.value) == f"{name[:80]!r} is no SHA-256"


def test_a_jobs_directory_is_named_by_node_and_host(home, monkeypatch):
    monkeypatch.setattr(places.socket, "gethostname", lambda: "node7")
    assert places.job_dir("1121-094500-abcd", 3) == home / "jobs" / "1121-094500-abcd" / "3-node7"


@pytest.mark.parametrize("name", ["", "-", "..", "../../etc", "a/b", "a b", "a\0b", "a.b"])
def test_what_is_no_job(home, name):
    with pytest.raises(ValueError) as caught:
        places.job_dir(name, 0)
    assert str(caught.value) == f"{name[:80]!r} is no job"
    for ask in (lambda: places.run_dir(name, 0), lambda: places.run_dirs(name)):
        with pytest.raises(ValueError, match="is no job"):
            ask()


def test_a_socket_in_the_run_directory_has_a_short_name():
    path = places.run_dir("1231-235959-" + "f" * 8, 9999) / "readers"
    assert str(path).startswith(f"/tmp/distmagic-{os.getuid()}-1231-235959-ffffffff-9999")
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
def test_a_directory_that_others_may_enter_is_refused(run_dir, mode):
    run_dir.mkdir()
    run_dir.chmod(mode)
    with pytest.raises(PermissionError) as caught:
        places.check_run_dir(run_dir)
    assert str(caught.value) == f"{run_dir} is not a private directory of this user"


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


# ---- what is removed


def make(path: Path, age_s: float, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    for each in (path, *path.parents):
        if each.name in ("home", "jobs", "blobs"):
            break
        os.utime(each, (NOW - age_s, NOW - age_s))
    return path


def test_nothing_there(home):
    places.expire(NOW)
    assert not home.exists()


def test_what_is_old_goes(home):
    old, young = make(home / "blobs" / SHA, 8 * DAY_S), make(home / "blobs" / SHA[::-1], 6 * DAY_S)
    job = make(home / "jobs" / "old" / "0-a" / "rank0.stdout.log", 8 * DAY_S)
    places.expire(NOW)
    assert (old.exists(), young.exists(), job.parent.parent.exists()) == (False, True, False)
    assert (home / "jobs").is_dir()


def test_files_that_were_never_finished_go_soon(home):
    old, young, whole = (
        make(home / "blobs" / name, age_s)
        for name, age_s in ((f"{SHA}.abc", 3700.0), (f"{SHA}.def", 3500.0), (SHA, 3700.0))
    )
    places.expire(NOW)
    assert (old.exists(), young.exists(), whole.exists()) == (False, True, True)


def test_a_job_whose_journal_is_touched_stays(home):
    log = make(home / "jobs" / "long" / "0-a" / "rank0.stdout.log", 30 * DAY_S)
    journal = make(home / "jobs" / "long" / "1-b" / "journal.jsonl", 30 * DAY_S)
    blob = make(home / "blobs" / SHA, 30 * DAY_S)
    for path in (log, log.parent, log.parent.parent, journal, journal.parent, blob):
        os.utime(path, (1, 1))
    places.touch((home / "gone", str(journal), blob))
    places.expire()
    assert log.exists()
    assert blob.exists()


@pytest.mark.parametrize("given", ["~/else", "sub/folder"])
def test_the_home_is_absolute(given, monkeypatch, tmp_path):
    """Ranks have another working directory than the process that answers the notebook."""
    monkeypatch.setenv("DISTMAGIC_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert places.home() == tmp_path / given.removeprefix("~/")


def test_beyond_its_size_the_oldest_go_first(home, monkeypatch):
    monkeypatch.setattr(places, "KEPT_BYTES", 250)
    blobs = [make(home / "blobs" / (str(i) * 64), 3600.0 * i, 100) for i in range(1, 5)]
    places.expire(NOW)
    assert [blob.exists() for blob in blobs] == [True, True, False, False]


def test_what_may_be_in_use_stays_however_large(home, monkeypatch):
    monkeypatch.setattr(places, "KEPT_BYTES", 0)
    blob, old = make(home / "blobs" / "new", 10.0), make(home / "blobs" / "old", 400.0)
    places.expire(NOW)
    assert (blob.exists(), old.exists()) == (True, False)


def make_job(home: Path, name: str, age_s: float, *, fetched: bool = True) -> Path:
    """Make a job of 200,000 bytes and a little more, half of it a result."""
    folder = home / "jobs" / name / "0-a"
    make(folder / "rank0.stdout.log", age_s, 100_000)
    result = make(folder / "rank0.result", age_s, 100_000)
    if fetched:
        places.mark_fetched(result)
        make(result.with_name("rank0.result.fetched"), age_s, 0)
    return folder.parent


def test_results_that_nobody_has_fetched_do_not_count_nor_does_the_newest_job(home, monkeypatch):
    """A job is over in the night, its results are large, and another contact comes before its user does."""
    monkeypatch.setattr(places, "KEPT_BYTES", 300_000)
    newest = make_job(home, "newest", 3600.0)
    second, third, fourth = (make_job(home, f"fetched{n}", 3600.0 * n) for n in (2, 3, 4))
    unfetched = make_job(home, "unfetched", 3600.0 * 5, fetched=False)
    old = make_job(home, "old", 8 * DAY_S, fetched=False)
    places.expire(NOW)
    assert [job.exists() for job in (newest, second, third, fourth)] == [True, True, False, False]
    assert (unfetched.exists(), old.exists()) == (True, False)


def test_on_a_full_disk_unfetched_results_count_too_but_for_the_newest_job(home, monkeypatch):
    monkeypatch.setattr(places, "KEPT_BYTES", 100_000)
    monkeypatch.setattr(places, "FULL_BYTES", 1 << 62)
    newest, other = (make_job(home, f"job{n}", 3600.0 * n, fetched=False) for n in (1, 2))
    places.expire(NOW)
    assert (newest.exists(), other.exists()) == (True, False)


def test_a_payload_that_is_still_arriving_is_kept_whatever_its_size(home, monkeypatch):
    monkeypatch.setattr(places, "KEPT_BYTES", 150)
    whole = [make(home / "blobs" / (letter * 64), 400.0, 100) for letter in "ab"]
    arriving = make(home / "blobs" / f".{SHA}.0123456789ab", 10.0, 100)
    places.expire(NOW)
    assert [blob.exists() for blob in whole] == [True, True]
    arriving.unlink()
    places.expire(NOW)
    assert [blob.exists() for blob in whole].count(True) == 1


def test_on_a_slow_disk_it_comes_to_an_end(home, monkeypatch):
    old = make(home / "blobs" / SHA, 8 * DAY_S)
    monkeypatch.setattr(places, "_LOOK_S", -1.0)
    places.expire(NOW)
    assert old.exists(), "next time"


def test_a_user_without_a_home(monkeypatch):
    """Python leaves a `~` of which it knows nothing as it is."""
    monkeypatch.setenv("DISTMAGIC_HOME", "~no-such-user/distmagic")
    with pytest.raises(FileNotFoundError, match=r"^~no-such-user/distmagic is nowhere: HOME is not set"):
        places.home()


def test_whether_the_disk_takes_anything(home):
    assert places.write_error().startswith(f"[Errno 2] No such file or directory: '{home}/blobs/")
    (home / "blobs").mkdir(parents=True)
    assert places.write_error() == ""
    assert list((home / "blobs").iterdir()) == []


def test_links_are_not_followed(home, tmp_path):
    outside = make(tmp_path / "outside" / "precious", 100 * DAY_S)
    (home / "jobs").mkdir(parents=True)
    link = home / "jobs" / "link"
    link.symlink_to(outside.parent)
    os.utime(link, (NOW - 100 * DAY_S,) * 2, follow_symlinks=False)
    places.expire(NOW)
    assert outside.exists()
    assert not os.path.lexists(link)


def test_what_can_not_be_removed_makes_no_run_fail(home, monkeypatch):
    blob = make(home / "blobs" / "stuck", 100 * DAY_S)
    log = make(home / "jobs" / "stuck" / "0-a" / "log", 100 * DAY_S)
    refused = []

    def refuse(path, **more):
        refused.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(places.shutil, "rmtree", refuse)
    places.expire(NOW)
    assert refused == [home / "jobs" / "stuck", blob]
    assert log.exists()


def test_what_goes_at_the_same_time_makes_no_run_fail(home, monkeypatch):
    make(home / "blobs" / "there", 100 * DAY_S)
    old = make(home / "blobs" / "other", 100 * DAY_S)
    real, looked = Path.lstat, []

    def gone(self):
        if self.name == "there":
            looked.append(self)
            raise FileNotFoundError(2, "No such file or directory")
        return real(self)

    monkeypatch.setattr(Path, "lstat", gone)
    places.expire(NOW)
    assert looked == [home / "blobs" / "there"]
    monkeypatch.undo()
    assert not old.exists()


# ---- what dead agents left


@pytest.fixture
def deserted():
    path = places.make_run_dir("1121-000000-test0000", 0)
    yield path
    shutil.rmtree(path)


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path / "readers"))
    listener.listen(0)
    return listener


def is_dead(path: Path) -> bool:
    return path in places.dead_runs().get("1121-000000-test0000", ())


@pytest.mark.parametrize(("age_s", "dead"), [(0, False), (3600, True)])
def test_a_run_whose_agent_is_gone(deserted, age_s, dead):
    listening(deserted).close()
    os.utime(deserted, (1, time.time() - age_s))
    assert is_dead(deserted) is dead


def test_a_run_whose_agent_has_no_time_to_answer(deserted):
    with listening(deserted), socket.socket(socket.AF_UNIX) as first:
        os.utime(deserted, (1, 1))
        first.connect(str(deserted / "readers"))  # the queue is full now
        assert not is_dead(deserted)


def test_a_run_of_which_one_agent_lives(deserted):
    other = places.make_run_dir("1121-000000-test0000", 1)
    try:
        with listening(other):
            listening(deserted).close()
            for path in (deserted, other):
                os.utime(path, (1, 1))
            assert not is_dead(deserted)
    finally:
        shutil.rmtree(other)


def test_a_directory_that_others_may_enter_is_not_ours_to_judge(deserted):
    os.utime(deserted, (1, 1))
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
        os.utime(deserted, (1, 1))
        assert places.dead_runs()["1121-000000-test0000"] == [deserted]
        assert places.run_dirs("1121-000000-test0000") == (deserted,)
    finally:
        fakes[0].rmdir()
        fakes[1].unlink()


# ---- nobody else's business


def test_folders_are_made_private_under_any_umask(home):
    old = os.umask(0)
    try:
        places.make_private(home / "blobs")
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (home, home / "blobs")] == [0o700, 0o700]


def test_folders_that_are_open_to_others_are_shut(home):
    (home / "blobs").mkdir(parents=True)
    home.chmod(0o777)
    (home / "blobs").chmod(0o777)
    places.make_private(home / "blobs")
    assert [path.stat().st_mode & 0o777 for path in (home, home / "blobs")] == [0o755, 0o700]


@pytest.mark.needs("lab")
@pytest.mark.parametrize("which", [".", "blobs"])
def test_folders_of_somebody_else_are_refused(home, which):
    (home / "blobs").mkdir(parents=True)
    os.chown(home / which, 1, 1)
    with pytest.raises(PermissionError) as caught:
        places.make_private(home / "blobs")
    assert str(caught.value) == f"{home / which} belongs to another user (uid 1)"


def test_it_is_tidied_at_most_once_a_minute(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    called = []
    monkeypatch.setattr(places, "expire", lambda: called.append(1))
    places.tidy()  # there is no home yet: nothing to remember it by
    (tmp_path / "home").mkdir()
    places.tidy()
    places.tidy()
    assert len(called) == 2
    stamp = tmp_path / "home" / "tidied"
    assert stamp.stat().st_mode & 0o777 == 0o600
    for age_s in (61.0, -3600.0):  # the second: its clock was put back since
        os.utime(stamp, times=(time.time() - age_s,) * 2)
        places.tidy()
    assert len(called) == 4


def test_what_nobody_uses_of_what_was_sent(home):
    old, own = (make(home / "blobs" / name, 600.0, 100) for name in (SHA, "b" * 64))
    make(home / "blobs" / ("c" * 64), 30.0, 100)  # touched by an agent that lives
    assert places.unused(own.name, NOW) == [(old, 100)]
    places.remove([old, home / "gone"])
    assert (old.exists(), own.exists()) == (False, True)

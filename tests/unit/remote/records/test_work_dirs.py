"""Working directories: how files come into them, who uses them, and what goes again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.payload.folder import contents_of
from distmagic.payload.tree import packed
from distmagic.remote.records import (
    expiry,
    found_files,
    listing,
    places,
    work_dirs,
    work_sync,
)
from distmagic.remote.wire.protocol import WorkDir
from tests.lab.waiting import HANG_S

NAME = "train"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, whose blobs are also where trees are written."""
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    places.make_private(tmp_path / "home" / "blobs")
    return tmp_path / "home"


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def work_of(
    project: Path, home: Path, *, owned: tuple[str, ...] = ("",), **more
) -> WorkDir:
    """Return the working directory of a run that brings a folder; its blobs are delivered."""
    tree = packed(contents_of(project), owned, home / "blobs")
    for local in tree.packs:
        if local.is_users:
            (home / "blobs" / local.blob.sha256).write_bytes(local.path.read_bytes())
    more = {"name": NAME, "origin": "nb", **more}
    return WorkDir(manifest=tree.listed.blob.sha256, files=tree.files, **more)


def prepared(
    work: WorkDir, job: str = "j", node_rank: int = 0, *, is_over: bool = True
) -> Path:
    """Make a directory ready for a job, which is over at once unless it is not."""
    found = work_dirs.prepare(work, job, node_rank)
    if is_over:
        work_dirs.leave(found.path, job, node_rank)
    return found.path


def there(path: Path) -> dict[str, str]:
    return {
        one.relative_to(path).as_posix(): one.read_text() for one in sorted(path.rglob("*")) if one.is_file()
    }  # fmt: skip


def test_files_come_into_the_directory_and_only_what_changed_is_written_again(
    project, home
):
    write(project, a="1", d__b="2", d__c="3")
    (project / "run.sh").write_text("")
    (project / "run.sh").chmod(0o755)
    (project / "empty").mkdir()
    (project / "link").symlink_to("d/b")
    path = prepared(work_of(project, home))
    assert path == home / "work" / NAME
    assert there(path) == {"a": "1", "d/b": "2", "d/c": "3", "link": "2", "run.sh": ""}
    assert os.readlink(path / "link") == "d/b"
    assert (path / "empty").is_dir()
    assert os.access(path / "run.sh", os.X_OK)
    assert not os.access(path / "a", os.X_OK)
    before = {name: (path / name).stat().st_ino for name in ("a", "d/b", "d/c")}
    write(project, d__b="new")
    prepared(work_of(project, home), "k")
    assert there(path)["d/b"] == "new"
    after = {name: (path / name).stat().st_ino for name in before}
    assert [name for name in before if before[name] != after[name]] == ["d/b"], (
        "though all three share a pack"
    )


def test_what_is_gone_here_goes_there_and_what_ranks_wrote_stays(project, home):
    write(project, a="1", old__b="2", kept__c="3")
    path = prepared(work_of(project, home))
    write(path, snapshot="5", kept__log="6")
    (project / "a").unlink()
    shutil.rmtree(project / "old")
    (project / "kept" / "c").unlink()
    write(project, new="7")
    prepared(work_of(project, home), "k")
    assert there(path) == {"new": "7", "snapshot": "5", "kept/log": "6"}
    assert not (path / "old").exists()


def test_a_run_removes_only_what_it_owns(project, home, tmp_path):
    write(project, a="1", pkg__b="2")
    path = prepared(work_of(project, home))
    prepared(WorkDir(name=NAME, origin="nb"), "k")
    assert there(path) == {"a": "1", "pkg/b": "2"}, (
        "a cell without files changes nothing"
    )
    (project / "a").unlink()
    write(project, pkg__c="3")
    (project / "pkg" / "b").unlink()
    prepared(work_of(project, home, owned=("pkg",)), "l")
    assert there(path) == {"a": "1", "pkg/c": "3"}


def test_a_file_that_a_rank_has_removed_or_only_touched_comes_again(project, home):
    write(project, a="1", b="2", c="3")
    path = prepared(work_of(project, home))
    (path / "b").unlink()
    os.utime(path / "c", (1, 1))
    write(project, c="new")
    found = work_dirs.prepare(work_of(project, home), "k", 0)
    assert there(path) == {"a": "1", "b": "2", "c": "new"}
    assert found.notice == ""


STAYS = "kept as an earlier run left it: {} (--fresh empties the directory and sends the notebook's files)"


def noticed(work: WorkDir, job: str) -> str:
    """Make a directory ready for a job that is over at once; return what a user is told."""
    found = work_dirs.prepare(work, job, 0)
    work_dirs.leave(found.path, job, 0)
    return found.notice


LARGE = "x" * (1 << 20)


@pytest.mark.parametrize("old", ["", LARGE], ids=["small", "large"])
def test_what_a_run_made_of_a_file_stays_until_a_fresh_run(project, home, old):
    write(project, train="1", snapshot=old + "old")
    path = prepared(work_of(project, home))
    write(path, snapshot=old + "newer")
    assert noticed(work_of(project, home), "k") == STAYS.format("snapshot")
    # A neighbour in its pack changes, and it is as old as before.
    write(project, train="2")
    assert noticed(work_of(project, home), "l") == STAYS.format("snapshot")
    assert there(path) == {"train": "2", "snapshot": old + "newer"}
    # Fetched by now: it is the same here and there.
    write(project, snapshot=old + "newer")
    assert noticed(work_of(project, home), "m") == ""
    # Both go on.
    write(project, snapshot=old + "mine")
    write(path, snapshot=old + "its own")
    for job in ("n", "o"):
        assert noticed(work_of(project, home), job) == STAYS.format("snapshot")
        assert there(path) == {"train": "2", "snapshot": old + "its own"}
    assert noticed(replace(work_of(project, home), is_fresh=True), "p") == ""
    assert there(path) == {"train": "2", "snapshot": old + "mine"}


def test_what_a_run_wrote_where_a_file_comes_for_the_first_time_stays(project, home):
    path = prepared(work_of(project, home))
    write(path, out__a="its", out__b="same", out__c="its", out__d="its", out__e="its")
    write(project, out__a="1", out__b="same", out__c="3", out__d="4", out__e="5")
    for job in ("k", "l"):
        notice = noticed(work_of(project, home), job)
        assert notice == STAYS.format("out/a, out/c, out/d, ...")
    made = dict.fromkeys(("out/a", "out/c", "out/d", "out/e"), "its")
    assert there(path) == {**made, "out/b": "same"}
    (project / "out" / "b").write_text("2")
    for name in "acde":
        (project / "out" / name).unlink()
    assert noticed(work_of(project, home), "m") == ""
    assert there(path) == {**made, "out/b": "2"}


def test_what_a_run_made_of_a_link_stays_until_a_fresh_run(project, home):
    write(project, a="1", b="2")
    (project / "latest").symlink_to("a")
    (project / "other").symlink_to("a")
    path = prepared(work_of(project, home))
    (path / "latest").unlink()
    (path / "latest").symlink_to("b")
    (path / "other").unlink()
    write(path, other="its")
    for job in ("k", "l"):
        assert noticed(work_of(project, home), job) == STAYS.format("latest, other")
    assert os.readlink(path / "latest") == "b"
    (project / "other").unlink()
    (project / "other").symlink_to("b")
    for job in ("m", "n"):
        assert noticed(work_of(project, home), job) == STAYS.format("latest, other")
    assert (path / "other").read_text() == "its"
    assert noticed(replace(work_of(project, home), is_fresh=True), "o") == ""
    assert [os.readlink(path / name) for name in ("latest", "other")] == ["a", "b"]


def test_what_a_run_made_of_a_file_stays_when_that_is_gone_here(project, home):
    write(project, a="1", snapshot="old")
    (project / "latest").symlink_to("a")
    path = prepared(work_of(project, home))
    write(path, snapshot="newer")
    (path / "latest").unlink()
    (path / "latest").symlink_to("snapshot")
    for name in ("a", "snapshot", "latest"):
        (project / name).unlink()
    assert noticed(work_of(project, home), "k") == ""
    assert there(path) == {"snapshot": "newer", "latest": "newer"}


def test_what_an_interrupted_process_had_written_is_not_taken_for_the_work_of_a_run(
    project, home, monkeypatch
):
    write(project, a="1", b="1")
    path = prepared(work_of(project, home))
    write(project, a="2", b="2")
    forget, calls = work_sync.FileSync._forget_compiled, []

    def is_interrupted(self: work_sync.FileSync, name: str) -> None:
        calls.append(name)
        if name == "b":
            raise KeyboardInterrupt
        forget(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(work_sync.FileSync, "_forget_compiled", is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(work_of(project, home), "k")
    assert there(path) == {"a": "2", "b": "1"}
    write(project, a="1", b="1")
    assert noticed(work_of(project, home), "l") == ""
    assert there(path) == {"a": "1", "b": "1"}


@pytest.mark.parametrize("old", ["", LARGE], ids=["small", "large"])
def test_a_file_that_stays_is_still_that_of_the_run_after_errors_in_the_middle(
    project, home, old, golden
):
    write(project, a="1", snapshot=old + "old")
    path = prepared(work_of(project, home))
    write(path, snapshot=old + "new", out__x="its")
    write(project, a="2", out="file")
    for job in ("k", "l"):
        with golden.raises(OSError):
            prepared(work_of(project, home), job)
    shutil.rmtree(path / "out")
    for job in ("m", "n"):
        assert noticed(work_of(project, home), job) == STAYS.format("snapshot")
    assert there(path) == {"a": "2", "out": "file", "snapshot": old + "new"}


@pytest.mark.parametrize("old", ["", LARGE], ids=["small", "large"])
def test_what_came_before_an_error_in_the_middle_counts_as_brought(
    project, home, old, golden
):
    write(project, a=old + "1", b="1", c="1", gone=old)
    for name in ("latest", "now_a_file"):
        (project / name).symlink_to("b")
    path = prepared(work_of(project, home))
    (path / "gone").unlink()
    write(path, out__x="its", **{"0__x": "its"})
    # All of these come before what is in the way.
    for name in ("latest", "now_a_file"):
        (project / name).unlink()
    (project / "latest").symlink_to("c")
    write(project, a=old + "2", new=old + "2", now_a_file="2", out="file")
    with golden.raises(OSError):
        prepared(work_of(project, home), "k")
    # Now nothing comes before the error.
    write(project, a=old + "3", new=old + "3", now_a_file="3", **{"0": old + "file"})
    with golden.raises(OSError):
        prepared(work_of(project, home), "l")
    assert there(path)["a"] == old + "2"
    shutil.rmtree(path / "0")
    for name in ("b", "new", "out", "latest"):
        (project / name).unlink()
    (project / "latest").symlink_to("a")
    assert noticed(work_of(project, home), "m") == ""
    assert os.readlink(path / "latest") == "a"
    assert there(path) == {
        "0": old + "file",
        "a": old + "3",
        "c": "1",
        "gone": old,
        "latest": old + "3",
        "now_a_file": "3",
        "out/x": "its",
    }


def test_a_file_is_read_only_where_its_size_and_its_times_do_not_tell(
    project, home, monkeypatch
):
    read: list[str] = []
    digest_of = found_files.digest_of

    def noted(file: Path) -> str:
        read.append(file.name)
        return digest_of(file)

    monkeypatch.setattr(found_files, "digest_of", noted)
    write(project, grown="1", longer=LARGE, same=LARGE + "1", touched=LARGE)
    path = prepared(work_of(project, home))
    write(path, grown="12", longer=LARGE + "1", same=LARGE + "2")
    os.utime(path / "touched", (1, 1))
    for job in ("k", "l"):
        assert noticed(work_of(project, home), job) == STAYS.format(
            "longer, same, touched, ..."
        )
    for name in ("grown", "longer", "same", "touched"):
        (project / name).unlink()
    write(project, other="1")
    assert noticed(work_of(project, home), "m") == ""
    assert set(there(path)) == {"grown", "longer", "other", "same", "touched"}
    assert read == []


def test_a_file_whose_mode_is_not_ours_to_change_is_written_anew(
    project, home, monkeypatch
):
    write(project, run="1")
    path = prepared(work_of(project, home))
    write(path, new="2")
    write(project, new="2")
    for name in ("run", "new"):
        (project / name).chmod(0o755)

    def is_refused(*_: object) -> None:
        raise PermissionError

    work = work_of(project, home)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", is_refused)
        assert noticed(work, "k") == ""
    assert there(path) == {"new": "2", "run": "1"}
    for name in ("run", "new"):
        assert os.access(path / name, os.X_OK)


def test_byte_code_of_a_module_that_changed_is_removed(project, home):
    write(project, mod="", pkg__mod="")
    for name in ("mod", "pkg/mod"):
        (project / name).rename(project / f"{name}.py")
    path = prepared(work_of(project, home))
    compiled = path / "pkg" / "__pycache__"
    write(compiled, **{"mod.cpython-311.pyc": "", "other.cpython-311.pyc": ""})
    (project / "pkg" / "mod.py").write_text("new")
    prepared(work_of(project, home), "k")
    assert [one.name for one in compiled.iterdir()] == ["other.cpython-311.pyc"]


def test_a_large_file_comes_as_it_is(project, home):
    write(project, large="x" * (1 << 20) + "end")
    path = prepared(work_of(project, home))
    assert (path / "large").read_text().endswith("xend")


def test_hostile_names_come_as_they_are(project, home):
    names = [b"new\nline", b"caf\xe9", b"-rf", b"a b'\"$(x)", b"x" * 255]
    for name in names:
        Path(os.fsdecode(os.fsencode(project) + b"/" + name)).write_text("")
    path = prepared(work_of(project, home))
    assert sorted(os.listdir(os.fsencode(path))) == sorted(names)


def test_a_link_that_a_rank_has_made_is_not_followed(project, home, tmp_path, golden):
    write(project, data__x="1")
    path = prepared(work_of(project, home))
    outside = tmp_path / "outside"
    write(outside, x="mine", y="mine")
    (path / "data" / "x").unlink()
    (path / "data").rmdir()
    (path / "data").symlink_to(outside)
    with golden.raises(OSError):
        prepared(work_of(project, home), "k")
    shutil.rmtree(project / "data")
    write(project, other="2")
    prepared(work_of(project, home), "l")
    assert there(outside) == {"x": "mine", "y": "mine"}


def test_a_folder_in_the_way_of_a_file_is_named(project, home, golden):
    path = prepared(work_of(project, home))
    write(path, out__result="1")
    write(project, out="file")
    with golden.raises(OSError):
        prepared(work_of(project, home), "k")
    prepared(work_of(project, home, is_fresh=True), "l")
    assert there(path) == {"out": "file"}


def test_fresh_begins_with_an_empty_directory_once_for_all_nodes_of_a_job(
    project, home
):
    write(project, a="1")
    path = prepared(work_of(project, home))
    write(path, snapshot="5")
    fresh = work_of(project, home, is_fresh=True)
    prepared(fresh, "k", 0, is_over=False)
    assert there(path) == {"a": "1"}
    write(path, snapshot="6")
    assert prepared(fresh, "k", 1) == path
    assert there(path) == {"a": "1", "snapshot": "6"}, (
        "the second node of the job finds it ready"
    )


def test_another_notebook_of_the_same_name_gets_another_directory(
    project, home, golden
):
    write(project, a="1")
    assert prepared(work_of(project, home, origin="here:/a.ipynb")).name == "train"
    assert (
        prepared(work_of(project, home, origin="here:/b.ipynb"), "k").name == "train-2"
    )
    assert prepared(work_of(project, home, origin="here:/a.ipynb"), "l").name == "train"
    named = work_of(project, home, origin="")  # a name that the user has given
    found = work_dirs.prepare(named, "m", 0)
    assert found.path.name == "train-3"
    golden(found.notice)


def test_a_directory_that_a_user_has_named_is_for_those_who_name_it_alone(
    project, home
):
    write(project, a="1")
    named = prepared(work_of(project, home, origin=""))
    write(named, weights="5")
    assert prepared(work_of(project, home, origin=""), "k") == named
    other = prepared(work_of(project, home, origin="here:/b.ipynb", is_fresh=True), "l")
    assert other.name == "train-2"
    assert there(named)["weights"] == "5"
    origins = {one.name: one.origin for one in work_dirs.kept()}
    assert origins == {"train": "", "train-2": "here:/b.ipynb"}


def test_a_directory_remembers_who_began_the_jobs_that_used_it(project, home):
    work = work_of(project, home)
    for job, owner in (("j", "a@x:/nb"), ("k", "b@x:/nb"), ("l", "a@x:/nb"), ("m", "")):
        work_dirs.leave(work_dirs.prepare(work, job, 0, owner).path, job, 0)
    (kept,) = work_dirs.kept()
    assert kept.owners == ("a@x:/nb", "b@x:/nb")
    for number in range(50):
        name = f"script (process {number})"
        work_dirs.prepare(work, f"p{number}", 0, name)
    assert len(next(work_dirs.kept()).owners) == 20


def test_a_directory_that_another_host_removes_at_that_moment_is_made_anew(
    project, home, monkeypatch
):
    """An expired one, when the first run for weeks begins on hosts that share a home."""
    write(project, a="1")
    real = work_dirs._free_directory

    def just_removed(*args):
        found = real(*args)
        shutil.rmtree(found[0].about)
        return found

    monkeypatch.setattr(work_dirs, "_free_directory", just_removed)
    assert there(prepared(work_of(project, home))) == there(project)
    assert work_dirs.remove(NAME)


def test_files_do_not_change_under_a_job_that_runs(project, home, monkeypatch, golden):
    monkeypatch.setattr(listing, "is_running", lambda job, node_rank: job == "one")
    write(project, a="1")
    first = work_of(project, home)
    path = prepared(first, "one", is_over=False)
    assert prepared(first, "same files") == path
    write(path, a="changed by the job")
    assert prepared(first, "same again") == path
    assert prepared(WorkDir(name=NAME, origin="nb"), "no files") == path
    assert there(path) == {"a": "changed by the job"}
    write(project, a="2")
    for work in (work_of(project, home), replace(first, is_fresh=True)):
        found = work_dirs.prepare(work, "two", 0)
        assert found.path.name == "train-2"
        golden(found.notice)
        work_dirs.leave(found.path, "two", 0)
    work_dirs.leave(path, "one", 0)
    assert prepared(work_of(project, home), "three") == path
    assert there(path) == {"a": "changed by the job"}


def test_a_job_that_died_holds_nothing(project, home, monkeypatch):
    write(project, a="1")
    path = prepared(work_of(project, home), "dead", is_over=False)
    (mark,) = (path.with_name(".train") / "users").iterdir()
    write(project, a="2")
    changed = work_of(project, home)
    assert prepared(changed, "k").name == "train-2", "it may be about to start"
    mark.write_text(str(time.time() - 21))
    assert prepared(changed, "l") == path
    mark.with_name("far.0.another-host").touch()
    os.utime(mark.with_name("far.0.another-host"), (time.time() - 90,) * 2)
    write(project, a="3")
    assert prepared(work_of(project, home), "m").name == "train-2", (
        "on another host nobody can look"
    )
    os.utime(mark.with_name("far.0.another-host"), (time.time() - 130,) * 2)
    assert prepared(work_of(project, home), "n") == path
    assert mark.with_name("far.0.another-host").exists(), "it may be there again"


def test_files_of_a_job_that_died_while_it_wrote_them_are_in_no_run_of_the_earlier_files(
    project, home, monkeypatch
):
    write(project, a="1", b="1")
    before = work_of(project, home)
    prepared(before)
    write(project, a="2", b="2")
    after, died = work_of(project, home), RuntimeError("no power")

    def loses_power(*_: object) -> None:
        (home / "work" / NAME / "a").write_text("2")
        raise died

    with monkeypatch.context() as patched:
        patched.setattr(work_sync.FileSync, "_write_files", loses_power)
        patched.setattr(work_sync.FileSync, "_remember", lambda *_: None)
        patched.setattr(work_dirs, "leave", lambda *_: None)
        with pytest.raises(RuntimeError):
            work_dirs.prepare(after, "died", 0)
    assert there(prepared(before, "next")) == {"a": "1", "b": "1"}


@pytest.mark.parametrize("has_files", [True, False])
def test_a_job_that_marked_a_directory_and_died_before_it_was_made_stops_no_other(
    project, home, has_files
):
    write(project, train="1")
    work = work_of(project, home) if has_files else WorkDir(name=NAME, origin="nb")
    prepared(work, "died", is_over=False)
    shutil.rmtree(home / "work" / NAME)
    directory = prepared(work, "next")
    assert directory.is_dir()
    assert there(directory) == ({"train": "1"} if has_files else {})


@pytest.mark.parametrize("ahead_s", [-3600.0, 180.0])
@pytest.mark.parametrize("fresh", [False, True])
def test_the_own_clock_says_nothing_of_a_job_on_another_host_of_the_home(
    project, home, monkeypatch, ahead_s, fresh
):
    """Files are dated by the server of the home."""
    write(project, a="1")
    path = prepared(work_of(project, home), "far", is_over=False)
    write(path, snapshot="5")
    (mark,) = (path.with_name(".train") / "users").iterdir()
    mark = mark.rename(mark.with_name("far.0.another-host"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    write(project, a="2")
    changed = work_of(project, home, is_fresh=fresh)
    assert prepared(changed, "here").name == "train-2"
    assert there(path) == {"a": "1", "snapshot": "5"}
    with pytest.raises(OSError, match="job far "):
        work_dirs.remove(NAME)
    assert [one.is_used for one in work_dirs.kept()] == [True, False]
    expiry.expire(places.now_at(home))
    assert mark.exists()
    assert there(path) == {"a": "1", "snapshot": "5"}


def test_fresh_empties_a_directory_once_for_a_job_on_each_host(project, home):
    """A host that was cut off comes back to an elastic job as another node, and what its ranks wrote is there."""
    write(project, a="1")
    fresh = work_of(project, home, is_fresh=True)
    write(prepared(fresh, "before"), old="0")
    path = prepared(fresh, "job", 1)
    assert there(path) == {"a": "1"}
    write(path, snapshot="5")
    assert prepared(fresh, "job", 2) == path
    assert there(path) == {"a": "1", "snapshot": "5"}
    assert there(prepared(fresh, "next")) == {"a": "1"}


def test_a_mark_that_went_with_the_home_comes_again(project, home):
    path = prepared(work_of(project, home), is_over=False)
    shutil.rmtree(path.with_name(".train"))
    work_dirs.touch(path, "j", 0)
    (mark,) = (path.with_name(".train") / "users").iterdir()
    assert mark.name.startswith("j.0.")


def test_an_agent_holds_its_directory(project, home):
    path = prepared(work_of(project, home), is_over=False)
    (mark,) = (path.with_name(".train") / "users").iterdir()
    for one in (mark, path.with_name(".train")):
        os.utime(one, (1, 1))
    work_dirs.touch(path, "j", 0)
    assert all(
        time.time() - one.stat().st_mtime < 60
        for one in (mark, path.with_name(".train"))
    )


def test_nodes_of_one_home_that_come_at_once(project, home):
    for number in range(300):
        write(project, **{f"d{number % 7}__f{number}": f"{number}"})
    work = work_of(project, home, is_fresh=True)
    found: list[Path] = []

    def node(node_rank: int) -> None:
        found.append(work_dirs.prepare(work, "j", node_rank).path)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [home / "work" / NAME] * 6
    assert len(there(found[0])) == 300
    assert not list((home / "work" / ".train").glob("incoming*"))


def test_hosts_of_one_home_whose_locks_are_their_own_share_no_half_file(
    project, home, monkeypatch
):
    """As NFS mounted with nolock: two nodes of a job bring their files at the same time."""
    monkeypatch.setattr(work_dirs.fcntl, "flock", lambda *_: None)
    for number in range(100):
        write(project, **{f"d{number % 7}__f{number}": f"{number}"})
    work = work_of(project, home)
    for turn in range(5):
        errors: list[BaseException] = []
        both = threading.Barrier(2)

        def node(node_rank: int) -> None:
            both.wait()  # noqa: B023
            try:
                work_dirs.prepare(replace(work, name=f"t{turn}"), f"j{turn}", node_rank)  # noqa: B023
            except OSError as error:
                errors.append(error)  # noqa: B023

        threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(there(home / "work" / f"t{turn}")) == 100


def test_two_jobs_of_hosts_whose_locks_are_their_own_do_not_share_a_directory(
    project, home, monkeypatch
):
    """One comes while the other's files are on their way; a second node of that one brings them as well."""
    monkeypatch.setattr(work_dirs.fcntl, "flock", lambda *_: None)
    write(project, a="1")
    first = work_of(project, home)
    write(project, a="2")
    second = work_of(project, home)
    bring = work_sync.FileSync.bring
    found: list[Path] = []

    def others_come(self, sha256):
        with monkeypatch.context() as others:
            others.setattr(work_sync.FileSync, "bring", bring)
            others.setattr(places, "host_id", lambda: "another0")
            found.append(work_dirs.prepare(second, "second", 0).path)
            found.append(work_dirs.prepare(first, "first", 1).path)
            assert there(found[1]) == {"a": "1"}
        return bring(self, sha256)

    monkeypatch.setattr(work_sync.FileSync, "bring", others_come)
    path = prepared(first, "first", is_over=False)
    assert [one.name for one in (path, *found)] == ["train", "train-2", "train"]
    assert (there(path), there(found[0])) == ({"a": "1"}, {"a": "2"})


def test_hosts_whose_locks_are_their_own_empty_a_directory_once(
    project, home, monkeypatch
):
    """The second one looks while the first one empties it: what the first one's ranks write then stays."""
    monkeypatch.setattr(work_dirs.fcntl, "flock", lambda *_: None)
    write(project, a="1")
    work = replace(work_of(project, home), is_fresh=True)
    empty, read = work_sync.FileSync.empty, work_dirs._Directory._read
    is_written, has_looked, begun = threading.Event(), threading.Event(), []
    second = threading.Thread(target=work_dirs.prepare, args=(work, "j", 1))

    def look(self, name):
        found = read(self, name)
        if name == "fresh" and threading.current_thread() is second:
            has_looked.set()
        return found

    def empty_slowly(self):
        if threading.current_thread() is second:
            assert is_written.wait(HANG_S)
        else:
            begun.append(second.start())
            assert has_looked.wait(HANG_S)
        empty(self)

    monkeypatch.setattr(work_dirs._Directory, "_read", look)
    monkeypatch.setattr(work_sync.FileSync, "empty", empty_slowly)
    path = work_dirs.prepare(work, "j", 0).path
    (path / "snapshot").write_text("of the first rank")
    is_written.set()
    second.join()
    assert begun
    assert there(path) == {"a": "1", "snapshot": "of the first rank"}


def test_one_whose_files_do_not_come_uses_no_directory(project, home, monkeypatch):
    write(project, a="1")
    work = work_of(project, home)

    def fail(*_):
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as failing:
        failing.setattr(work_sync.FileSync, "bring", fail)
        with pytest.raises(OSError, match="no"):
            work_dirs.prepare(work, "j", 0)
    assert list((home / "work" / ".train" / "users").iterdir()) == []


def test_ranks_may_begin_in_a_folder_of_it(project, home):
    write(project, data__x="1")
    path = prepared(work_of(project, home, inside="nb/deep"))
    assert (path / "nb" / "deep").is_dir()


def test_what_was_torn_by_a_killed_process_is_mended(project, home):
    write(project, a="1")
    path = prepared(work_of(project, home))
    about = path.with_name(".train")
    write(about, incoming__half="")
    os.utime(about / "incoming", (1, 1))
    (about / "files.json").write_text('{"manifest": "x", "fil')
    prepared(work_of(project, home), "k")
    assert there(path) == {"a": "1"}
    assert not (about / "incoming").exists()


# ---- what is kept


def test_kept_directories_are_listed_and_removed_unless_a_job_uses_them(
    project, home, golden
):
    write(project, a="12345")
    path = prepared(work_of(project, home), is_over=False)
    prepared(work_of(project, home, name="other"), "k")
    kept = {one.name: one for one in work_dirs.kept()}
    assert {
        name: (one.size_bytes, one.is_used, one.origin) for name, one in kept.items()
    } == {"other": (5, False, "nb"), "train": (5, True, "nb")}
    with golden.raises(OSError):
        work_dirs.remove(NAME)
    assert work_dirs.remove("other") == 5
    assert work_dirs.remove("other") == 0
    assert os.listdir(home / "work") in ([NAME, ".train"], [".train", NAME])
    work_dirs.leave(path, "j", 0)
    work_dirs.remove(NAME)
    assert os.listdir(home / "work") == []


@pytest.mark.parametrize("name", ["", "../x", ".train", "a/b"])
def test_only_working_directories_are_removed(name):
    with pytest.raises(ValueError, match="is not a working directory"):
        work_dirs.remove(name)


def test_a_directory_that_nobody_has_used_for_a_week_goes(project, home):
    path = prepared(work_of(project, home))
    used = prepared(work_of(project, home, name="used"), "u", is_over=False)
    now = time.time()
    for one in (path, used):
        os.utime(
            one.with_name(f".{one.name}"), (now - expiry.KEPT_DAYS * 86400 - 1,) * 2
        )
    expiry.expire(now - 2)
    assert path.exists(), "not yet"
    expiry.expire(now)
    assert not path.exists()
    assert not path.with_name(".train").exists()
    assert used.exists(), "a job uses it"


def test_an_origin_is_read_as_it_was_written_whatever_the_host_s_locale(monkeypatch):
    """Else each run of a notebook with such a name would get a new directory."""
    read = Path.read_text

    def in_its_locale(path, encoding="ascii", errors=None):
        return read(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", in_its_locale)
    named = WorkDir(name=NAME, origin="ann@laptop:/home/ann/übung.ipynb")
    assert prepared(named, "j") == prepared(named, "k")
    assert [one.origin for one in work_dirs.kept()] == [named.origin]

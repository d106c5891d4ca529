"""What of a folder travels: ignore files, links, hostile names, sizes."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from distmagic.errors import PayloadError, PayloadTooLarge
from distmagic.payload import folder as folders
from distmagic.payload.folder import check_size, contents_of
from distmagic.payload.work_files import may_travel
from tests.builders.shell import completed


def write(folder: Path, **texts: str) -> None:
    """Write files; `__` in a name stands for a slash, `_dot_` for a dot."""
    for name, text in texts.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def files_of(folder: Path) -> list[str]:
    return sorted(contents_of(folder).files)


def test_all_files_travel_hidden_ones_too(project):
    write(project, train_dot_py="1", data__x_dot_txt="22", _dot_env="3")
    (project / "run.sh").write_text("")
    (project / "run.sh").chmod(0o755)
    (project / "checkpoints").mkdir()
    found = contents_of(project)
    assert sorted(found.files) == [".env", "data/x.txt", "run.sh", "train.py"]
    assert found.size_bytes == 4
    assert [path for path, file in found.files.items() if file.is_executable] == [
        "run.sh"
    ]
    assert found.folders == ["checkpoints"]


def test_what_is_of_no_use_on_a_host_never_travels(project):
    write(
        project,
        _dot_git__config="",
        a____pycache____a_dot_pyc="",
        venv__pyvenv_dot_cfg="",
        venv__bin__python="",
        b="",
    )
    (project / "a" / "__pycache__").mkdir(parents=True)
    (project / "a" / "__pycache__" / "a.pyc").write_text("")
    assert [path for path in files_of(project) if "pyc" not in path] == ["b"]
    assert not any("__pycache__" in path for path in files_of(project))


def test_keys_and_passwords_at_the_top_of_a_folder_never_travel(project, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(project / "kept" / "here"))
    for name in (
        ".ssh/id_ed25519",
        ".aws/credentials",
        ".gnupg/key",
        ".kube/config",
        ".docker/config.json",
        ".docker/Dockerfile",
        ".netrc",
        ".config/gcloud/token",
        ".config/tool",
        ".distmagic/blobs/x",
        "kept/here/blobs/x",
        "below/.netrc",
        "train.py",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / ".distmagicignore").write_text("!.ssh/\n!.netrc\n")
    found = contents_of(project)
    assert sorted(found.files) == [
        ".config/tool",
        ".distmagicignore",
        ".docker/Dockerfile",
        "below/.netrc",
        "train.py",
    ]
    assert sorted(found.private) == [
        ".aws",
        ".config/gcloud",
        ".distmagic",
        ".docker/config.json",
        ".gnupg",
        ".kube/config",
        ".netrc",
        ".ssh",
        "kept/here",
    ]


def test_the_ignore_files_count_as_in_git(project):
    write(
        project,
        a_dot_log="",
        b_dot_txt="",
        data__c_dot_log="",
        data__keep_dot_log="",
        out__d="",
        deep__out__e="",
    )
    (project / ".gitignore").write_text("*.log\n/out/\n")
    (project / "data" / ".gitignore").write_text("!keep.log\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    listed = completed(["git", "-C", str(project), "ls-files", "--others", "--exclude-standard"])  # fmt: skip
    assert files_of(project) == sorted(listed.stdout.split())
    assert "data/keep.log" in files_of(project)


def test_an_invalid_line_of_an_ignore_file_matches_nothing_as_in_git(project):
    write(project, a_dot_log="", build__b="", data__c="", keep_dot_log="")
    lines = ["!", "build\\", "[z-a]", "*.log", "!keep.log", "[a-\\]", "\\"]
    (project / ".gitignore").write_text("\n".join(lines))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    listed = completed(["git", "-C", str(project), "ls-files", "--others", "--exclude-standard"])  # fmt: skip
    assert files_of(project) == sorted(listed.stdout.split())
    assert "a.log" not in files_of(project)
    # The file of a parent folder counts, too.
    assert files_of(project / "data") == ["c"]
    assert may_travel(project, 1 << 20)


def test_distmagicignore_comes_after_gitignore_and_brings_back_what_git_ignores(
    project,
):
    write(project, data__x_dot_bin="", secret="", train="")
    (project / ".gitignore").write_text("data/\n")
    (project / ".distmagicignore").write_text("!data/\nsecret\n")
    assert files_of(project) == [
        ".distmagicignore",
        ".gitignore",
        "data/x.bin",
        "train",
    ]


def test_a_folder_inside_a_repository_follows_the_ignore_files_above_it(project):
    write(project, _dot_git__HEAD="", src__a_dot_log="", src__b="", build__c="")
    (project / ".gitignore").write_text("*.log\nbuild/\n")
    assert files_of(project / "src") == ["b"]
    assert files_of(project / "build") == ["c"], "who names a folder means it"


def test_links_stay_inside_or_stay_here(project, tmp_path):
    outside = tmp_path / "outside"
    write(outside, x="secret")
    write(project, data__x="")
    links = {
        "to_folder": "data", "to_file": "data/x", "data/up": "../data/x", "broken": "nowhere", "self": "self",
        "out": "../outside", "abs_out": str(outside / "x"), "abs_in": str(project / "data"), "by_out": "out/x",
        "loop_a": "loop_b", "loop_b": "loop_a", "data/around": "..", "climb": "data/../../project/data",
    }  # fmt: skip
    for name, target in links.items():
        (project / name).symlink_to(target)
    found = contents_of(project)
    assert list(found.files) == ["data/x"], "no link is followed"
    assert sorted(found.left_out) == ["abs_out", "by_out", "out"]
    assert found.links == {
        "to_folder": "data", "to_file": "data/x", "data/up": "x", "broken": "nowhere", "self": "self",
        "climb": "data", "abs_in": "data", "loop_a": "loop_a", "loop_b": "loop_b", "data/around": "..",
    }  # fmt: skip


def test_sockets_and_pipes_stay_here(project):
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(project / "socket"))
        assert files_of(project) == []


def test_names_that_no_text_can_hold_travel(project):
    names = [b"new\nline", b"caf\xe9", b"-rf", b"a b'\"$(x)", b"\xff\xfe", b"x" * 255]
    for name in names:
        Path(os.fsdecode(os.fsencode(project) + b"/" + name)).write_text("")
    assert sorted(os.fsencode(path) for path in contents_of(project).files) == sorted(
        names
    )


def test_a_folder_with_too_many_files_is_refused(project, monkeypatch, golden):
    monkeypatch.setattr(folders, "MAX_FILES", 2)
    write(project, a="", b="", c="")
    with golden.raises(PayloadError):
        contents_of(project)


def test_a_folder_above_the_limit_names_its_largest_files(project, golden):
    write(project, a="x" * 5000, b="x" * 3_000_000, c="", d="x" * 10)
    found = contents_of(project)
    check_size(found, found.size_bytes, "The folder f")
    with golden.raises(PayloadTooLarge):
        check_size(found, found.size_bytes - 1, "The folder f")

"""What a run brings: where a folder's files go, local packages with their data, and what a change costs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.errors import PayloadError, PayloadTooLarge, UsageError
from distmagic.payload import blobs, folder, local_modules, tree, work_files
from distmagic.payload.blobs import in_use
from distmagic.payload.folder import contents_of
from distmagic.payload.local_modules import LocalModule
from distmagic.payload.pack import Payload
from distmagic.payload.program import pack_program
from distmagic.payload.tree import packed
from distmagic.payload.work_files import check_folder, place_of, with_tree
from distmagic.remote.records import manifest
from distmagic.remote.records.manifest import Manifest
from distmagic.remote.values import call
from distmagic.request.flags import Program


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    return blobs.folder()


def write(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def payload(**more) -> Payload:
    call, code = (blobs.keep(data, blobs.folder()) for data in (b"call", b"code"))
    return Payload(call=call, code=code, **more)


def listed(made: Payload) -> Manifest:
    assert made.tree is not None
    return manifest.decode(made.tree.listed.path.read_bytes())


def paths(made: Payload) -> list[str]:
    return [file.path for file in listed(made).files]


@pytest.mark.parametrize(
    ("folder", "current", "place"),
    [
        ("/p", "/p", ("", "")),
        ("/p/src/data", "/p", ("src/data", "")),
        ("/p", "/p/nb", ("", "nb")),
        ("/data", "/p", ("", "")),
    ],
)
def test_relative_paths_mean_the_same_on_the_hosts(folder, current, place):
    assert place_of(Path(folder), Path(current)) == place


def test_a_named_folder_is_brought_to_its_place(project):
    write(project, "data/x", "train.py")
    made = with_tree(payload(), str(project / "data"), project)
    assert paths(made) == ["data/x"]
    assert listed(made).owned == ("data",)
    above = with_tree(payload(), str(project), project / "data")
    assert (paths(above), above.tree.inside, listed(above).owned) == (
        ["data/x", "train.py"],
        "data",
        ("",),
    )


def test_a_call_without_files_brings_none(project):
    assert with_tree(payload(), None, project).tree is None


def test_a_local_package_comes_with_its_data_and_with_python_files_that_git_ignores(
    project,
):
    write(
        project,
        "pkg/__init__.py",
        "pkg/table.csv",
        "pkg/_version.py",
        "pkg/big.log",
        "mod.py",
        "other.txt",
    )
    (project / "pkg" / ".gitignore").write_text("_version.py\n*.log\n")
    modules = (
        LocalModule(name="mod", file=project / "mod.py"),
        LocalModule(name="pkg", places=(project / "pkg",)),
    )
    made = with_tree(payload(modules=modules), None, project)
    assert paths(made) == [
        "mod.py",
        "pkg/.gitignore",
        "pkg/__init__.py",
        "pkg/_version.py",
        "pkg/table.csv",
    ]
    assert listed(made).owned == ("mod.py", "pkg")


def test_links_of_a_local_package_are_sent_once(project, scratch):
    write(project, "common.py", "pkg/__init__.py", "pkg/v1.py", "pkg/deep/_v.py")
    (project / "pkg/.gitignore").write_text("_v.py\n")
    (project / "pkg/now.py").symlink_to("v1.py")
    (project / "pkg/_version.py").symlink_to("deep/_v.py")
    (project / "pkg/shared.py").symlink_to("../common.py")
    (project / "pkg/out").symlink_to("/etc")
    modules = (LocalModule(name="pkg", places=(project / "pkg",)),)
    made = with_tree(payload(modules=modules), None, project)
    inner = [".gitignore", "__init__.py", "deep/_v.py", "shared.py", "v1.py"]
    assert paths(made) == [f"pkg/{name}" for name in inner]
    now = ("pkg/now.py", "v1.py")
    assert listed(made).links == (("pkg/_version.py", "deep/_v.py"), now)
    assert "not sent: pkg/out (" in made.notice
    assert "shared" not in made.notice
    # In a folder that is sent, too, this link stays inside.
    made = with_tree(payload(modules=modules), str(project), project)
    assert ("pkg/shared.py", "../common.py") in listed(made).links
    assert "pkg/shared.py" not in paths(made)
    assert "not sent: pkg/out (" in made.notice


def test_a_module_that_is_a_link_of_the_folder_is_sent_where_it_leads(project, scratch):
    write(project, "src/pkg/__init__.py", "src/pkg/_version.py", "src/mod.py")
    (project / ".gitignore").write_text("_version.py\n")
    (project / "pkg").symlink_to("src/pkg")
    (project / "mod.py").symlink_to("src/mod.py")
    modules = (
        LocalModule(name="mod", file=project / "mod.py"),
        LocalModule(name="pkg", places=(project / "pkg",)),
    )
    made = with_tree(payload(modules=modules), str(project), project)
    assert listed(made).links == (("mod.py", "src/mod.py"), ("pkg", "src/pkg"))
    inner = ["src/mod.py", "src/pkg/__init__.py", "src/pkg/_version.py"]
    assert paths(made) == [".gitignore", *inner]


def test_a_lock_of_an_editor_in_a_local_package_is_no_module(
    project, scratch, monkeypatch
):
    monkeypatch.syspath_prepend(str(project))
    write(project, "locked_pkg/__init__.py", "locked_pkg/train.py")
    # As Emacs makes it while train.py has unsaved changes.
    (project / "locked_pkg/.#train.py").symlink_to("ann@laptop.1234:1700000000")
    (project / "locked_pkg/gone.py").symlink_to("nowhere.py")
    modules = local_modules.found(["locked_pkg"])
    made = with_tree(payload(modules=modules), None, project)
    assert paths(made) == ["locked_pkg/__init__.py", "locked_pkg/train.py"]


def test_a_module_that_can_not_be_read_is_named(project, scratch, monkeypatch, golden):
    monkeypatch.syspath_prepend(str(project))
    write(project, "unread_pkg/__init__.py", "train.py", text="import unread_mod")
    # A file that exists, and that even root can't read.
    (project / "unread_pkg/bad.py").symlink_to("/proc/self/mem")
    (project / "unread_mod.py").symlink_to("/proc/self/mem")
    for name in ("unread_pkg", "unread_mod"):
        with golden.raises(PayloadError):
            local_modules.found([name])
    with golden.raises(PayloadError):
        script_of(project, "train.py")


@pytest.mark.parametrize("name", ["nowhere", "~no-such-user/nowhere"])
def test_a_folder_that_is_not_there_is_named(project, name, golden):
    with golden.raises(UsageError):
        with_tree(payload(), name, project)


def test_more_than_the_limit_is_refused_before_anything_is_read(
    project, scratch, golden
):
    with (project / "hole").open("wb") as file:
        file.truncate(2 << 30)
    with golden.raises(PayloadTooLarge):
        with_tree(payload(limit_bytes=1000), str(project), project)
    assert len(list(scratch.iterdir())) == 2


def test_links_that_lead_out_are_told(project, golden):
    write(project, "x")
    for name in "abcd":
        (project / name).symlink_to("/etc")
    made = with_tree(payload(), str(project), project)
    golden(made.notice)
    (project / "one").mkdir()
    (project / "one" / "a").symlink_to("/etc")
    made = with_tree(payload(), str(project / "one"), project)
    golden(made.notice)


def test_keys_that_stay_here_are_told(project, golden):
    write(project, "train.py", ".ssh/id_ed25519", ".netrc")
    made = with_tree(payload(), str(project), project)
    assert paths(made) == ["train.py"]
    golden(made.notice)


@pytest.mark.parametrize(
    ("home", "what"), [(".", "is"), ("users/ada", "has in it")], ids=["it", "above it"]
)
def test_a_home_directory_is_not_sent(project, monkeypatch, home, what, golden):
    write(project, "train.py", "users/ada/.ssh/id_ed25519")
    monkeypatch.setenv("HOME", str(project / home))
    with golden.raises(UsageError):
        with_tree(payload(), str(project), project)
    made, _ = script_of(project, "train.py")
    with golden.raises(UsageError):
        with_tree(made, None, project)
    # Before anybody waits for hosts, too.
    with pytest.raises(UsageError):
        check_folder(payload(), str(project))
    with pytest.raises(UsageError):
        check_folder(made, None)
    write(project, ".distmagicignore", text="*\n!train.py\n")
    assert paths(with_tree(made, None, project)) == ["train.py"]


def test_a_user_without_a_home_may_send_any_folder(project, monkeypatch):
    """In a container whose user nobody knows `~` stands for nothing."""
    write(project, "train.py")
    monkeypatch.setenv("DISTMAGIC_HOME", str(project.parent / "home"))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert paths(with_tree(payload(), str(project), project)) == ["train.py"]


def test_a_folder_below_the_home_directory_is_sent(project, monkeypatch):
    write(project, "train.py")
    monkeypatch.setenv("HOME", str(project.parent))
    assert paths(with_tree(payload(), str(project), project)) == ["train.py"]


def test_files_that_git_ignores_and_the_code_names_are_said(project, golden):
    text = "open('data/train.bin'); open(f'{folder}/meta.pkl')"
    write(project, "train.py", text=text)
    write(project, "data/train.bin", "data/meta.pkl", "data/other.bin", "mine.bin")
    write(project, ".gitignore", text="*.bin\n*.pkl\n")
    made = with_tree(payload(folder=project), None, project)
    assert paths(made) == [".gitignore", "train.py"]
    golden(made.notice)
    write(project, ".distmagicignore", text="*.pkl\n")  # as the user wants it
    made = with_tree(payload(folder=project), None, project)
    assert made.notice.startswith("not sent: data/train.bin (.gitignore excludes it")
    write(project, ".distmagicignore", text="*.pkl\n!data/train.bin\n")
    made = with_tree(payload(folder=project), None, project)
    assert (made.notice, "data/train.bin" in paths(made)) == ("", True)


# ---- packs


def sent(before: tree.Tree, after: tree.Tree) -> int:
    """Return the bytes that a host lacks of a tree when it has another one."""
    there = {local.blob.sha256 for local in before.blobs}
    return sum(
        local.blob.size_bytes for local in after.blobs if local.blob.sha256 not in there
    )


def test_a_change_of_one_file_sends_one_pack_and_the_list(project, scratch):
    for number in range(2000):
        write(project, f"src/{number % 20}/file{number}.txt", text=f"{number}\n" * 100)
    before = packed(contents_of(project), [""], scratch)
    assert (before.files, before.size_bytes) == (2000, contents_of(project).size_bytes)
    assert 10 < len(before.packs) < 80
    write(project, "src/7/file1007.txt", text="changed")
    changed = packed(contents_of(project), [""], scratch)
    write(project, "src/7/a new file.txt", text="new")
    grown = packed(contents_of(project), [""], scratch)
    largest = max(local.blob.size_bytes for local in before.packs)
    assert sent(before, changed) <= largest + changed.listed.blob.size_bytes
    assert sent(changed, grown) <= 2 * largest + grown.listed.blob.size_bytes
    assert packed(contents_of(project), [""], scratch) == grown, (
        "the same files give the same blobs"
    )


def test_a_large_file_is_sent_as_it_lies_and_stays_untouched(project, scratch):
    write(project, "large", "twin", text="x" * (1 << 20))
    write(project, "small", text="y")
    before = (project / "large").stat().st_mtime_ns
    made = packed(contents_of(project), [""], scratch)
    assert [local.path.name for local in made.packs if local.is_users] == ["large"], (
        "equal files are sent once"
    )
    assert len(made.packs) == 2
    found = manifest.decode(made.listed.path.read_bytes())
    large, small = (local.blob.sha256 for local in made.packs)
    packs = {file.path: (file.offset, found.packs[file.pack]) for file in found.files}
    assert packs == {"large": (0, large), "small": (0, small), "twin": (0, large)}
    with in_use([local for local in made.packs if local.is_users]):
        pass
    assert (project / "large").stat().st_mtime_ns == before


def test_equal_packs_are_listed_each_with_its_own_place(project, scratch, monkeypatch):
    monkeypatch.setattr(tree, "_ONE_IN", 1)  # each file is a pack
    write(project, "a", "b", text="same")
    made = packed(contents_of(project), [""], scratch)
    assert len(made.packs) == 1
    found = manifest.decode(made.listed.path.read_bytes())
    assert [(file.path, file.offset) for file in found.files] == [("a", 0), ("b", 0)]


def test_more_large_files_than_a_message_can_name_are_refused(
    project, scratch, monkeypatch, golden
):
    monkeypatch.setattr(tree, "_MOST_PACKS", 1)
    monkeypatch.setattr(tree, "LARGE_BYTES", 1)
    write(project, "a", text="1")
    write(project, "b", text="2")
    with golden.raises(PayloadError):
        packed(contents_of(project), [""], scratch)


# ---- scripts


def script_of(
    project: Path, target: str, *, sync: str | None = None, current: Path | None = None
):
    program = Program(target=target, args=("50",))
    made = pack_program(
        program, sync=sync, current=current or project, limit_bytes=1 << 20
    )
    found = call.load(made.call.path, __import__("types").ModuleType("__main__"))
    assert isinstance(found, call.Script)
    return made, found


def test_a_script_brings_the_current_directory_and_lies_where_it_lies_here(project):
    write(project, "src/train.py", "src/helper.py", "data/x")
    made, script = script_of(project, "src/train.py")
    assert (made.folder, made.name, made.script) == (
        project,
        "train",
        project / "src/train.py",
    )
    assert script == call.Script(
        "src/train.py",
        ("50",),
        shown="src/train.py",
        origin=str(project / "src/train.py"),
    )
    assert paths(with_tree(made, None, project)) == [
        "data/x",
        "src/helper.py",
        "src/train.py",
    ]


@pytest.mark.parametrize("kind", ["home", "too large", "can't be read"])
def test_a_script_brings_its_own_folder_where_the_current_directory_can_not_travel(
    project, kind, monkeypatch
):
    write(project, "src/train.py", "data/x")
    if kind == "home":
        monkeypatch.setenv("HOME", str(project))
    elif kind == "too large":
        write(project, "data/large", text="x" * (1 << 20))
    else:
        monkeypatch.setattr(folder, "MAX_FILES", 1)
    made, script = script_of(project, "src/train.py")
    assert made.folder == project / "src"
    assert script.shown == script.path == "src/train.py"


def program_of(project: Path, program: Program) -> tuple[Payload, call.Script]:
    made = pack_program(program, sync=None, current=project, limit_bytes=1 << 20)
    found = call.load(made.call.path, __import__("types").ModuleType("__main__"))
    assert isinstance(found, call.Script)
    return made, found


@pytest.mark.parametrize(("on_path", "root"), [("src", "src"), ("", ""), (None, "")])
def test_a_package_of_the_folder_is_imported_from_its_place_there(
    project, monkeypatch, on_path, root
):
    """As an editable install or PYTHONPATH has it; or it lies in the current directory alone."""
    monkeypatch.syspath_prepend(str(project / (on_path or "nowhere")))
    write(project, "scripts/train.py", text="import helper")
    write(project, "scripts/helper.py", text="import dm_test_pkg.part")
    write(project, f"{root}/dm_test_pkg/__init__.py".lstrip("/"))
    for program in (
        Program(target="scripts/train.py"),
        Program(target="dm_test_pkg.train", is_module=True),
    ):
        made, script = program_of(project, program)
        assert made.modules == ()
        found_by_itself = program.is_module and not root
        assert script.roots == made.roots == (() if found_by_itself else (root or ".",))


@pytest.mark.parametrize("is_module", [False, True])
def test_a_package_of_elsewhere_travels_besides(
    project, monkeypatch, tmp_path, is_module
):
    write(tmp_path / "other", "dm_test_pkg/__init__.py", "dm_test_pkg/data.txt")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    write(project, "train.py", text="def f():\n    from dm_test_pkg import x")
    target = "dm_test_pkg" if is_module else "train.py"
    made, script = program_of(project, Program(target=target, is_module=is_module))
    (place,) = script.roots
    assert paths(with_tree(made, None, project)) == [
        f"{place}/dm_test_pkg/__init__.py",
        f"{place}/dm_test_pkg/data.txt",
        "train.py",
    ]


@pytest.mark.parametrize("files", [("dm_test_pkg/__init__.py",), ("dm_test_pkg.py",)])
def test_what_pip_has_installed_to_a_folder_of_its_own_is_no_local_package(
    project, monkeypatch, files
):
    target = project / "lib"
    write(target, *files, text="")
    monkeypatch.syspath_prepend(str(target))
    assert [one.name for one in local_modules.found(["dm_test_pkg"])] == ["dm_test_pkg"]
    record = "".join(f"{name},sha256=,1\n" for name in files)
    write(target, "dm_test-1.0.dist-info/RECORD", text=record)
    write(target, "mine.py")
    local_modules._is_recorded.cache_clear()
    assert local_modules.found(["dm_test_pkg"]) == ()
    assert [one.name for one in local_modules.found(["mine"])] == ["mine"]


def test_a_script_elsewhere_is_called_by_its_whole_path(project, scratch):
    write(project, "train.py")
    target = str(project / "train.py")
    _, script = script_of(project, target, current=scratch)
    assert script == call.Script("train.py", ("50",), origin=target)
    _, below = script_of(project, target)
    assert below.shown == "", "it was named by its whole path"


def test_a_folder_may_have_the_name_of_a_home_that_is_not_there(project):
    write(project, "~no-such-user/train.py")
    _, script = script_of(project, "~no-such-user/train.py")
    assert script.shown == "~no-such-user/train.py"


def test_a_fresh_run_says_which_snapshots_come_along(project):
    write(project, "train.py", "out/snapshot.pt", "model.safetensors", "notes.txt")
    made, _ = script_of(project, "train.py")
    assert with_tree(made, None, project).notice == ""
    fresh = with_tree(made, None, project, is_fresh=True)
    assert "--fresh" in fresh.notice
    assert "model.safetensors, out/snapshot.pt" in fresh.notice
    assert "notes.txt" not in fresh.notice


def test_much_that_nobody_has_named_is_told(project, monkeypatch):
    monkeypatch.setattr(work_files, "_LARGE_BYTES", 2_000)
    write(project, "train.py")
    (project / "data.bin").write_bytes(bytes(3_000))
    made, _ = script_of(project, "train.py")
    told = with_tree(made, None, project).notice
    assert "3.0 kB in 2 files" in told
    assert ".distmagicignore" in told
    assert with_tree(made, str(project), project).notice == ""


@pytest.mark.parametrize("name", ["study.ipynb", "run.sh"])
def test_what_is_no_program_of_python_is_refused(project, name, golden):
    write(project, name)
    with golden.raises(UsageError):
        script_of(project, name)


@pytest.mark.parametrize("text", ["from tool.cli import main\nmain()\n", "main()\n"])
def test_a_command_of_an_environment_stays_here(project, text, golden):
    write(project, ".venv/pyvenv.cfg")
    (project / ".venv/bin").mkdir()
    (project / ".venv/bin/tool").write_text(text)
    with golden.raises(UsageError):
        script_of(project, ".venv/bin/tool")


def test_a_command_of_this_environment_is_named_by_its_module(
    project, golden, monkeypatch
):
    write(project, "bin/python", "bin/accelerate")
    text = "from accelerate.commands.accelerate_cli import main\nmain()\n"
    (project / "bin/accelerate").write_text(text)
    monkeypatch.setattr(sys, "executable", str(project / "bin/python"))
    with golden.raises(UsageError):
        script_of(project, "accelerate")


def test_a_script_must_be_there_and_in_the_folder_that_travels(
    project, tmp_path, golden
):
    write(project, "train.py", "data/x")
    for target in ("nothing.py", "~no-such-user/train.py"):
        with golden.raises(UsageError):
            script_of(project, target)
    with golden.raises(UsageError):
        script_of(project, "data")
    with golden.raises(UsageError):
        script_of(project, "train.py", sync=str(project / "data"))
    (project / ".gitignore").write_text("train.py\n")
    made, _ = script_of(project, "train.py")
    with golden.raises(PayloadError):
        with_tree(made, None, project)


def test_a_module_brings_the_current_directory(project):
    write(project, "pkg/__init__.py", "x.txt")
    installed = Program(target="timeit", is_module=True)
    for limit_bytes, brought in ((1 << 20, project), (1, None)):
        made = pack_program(
            installed, sync=None, current=project, limit_bytes=limit_bytes
        )
        assert made.folder == brought
    own = Program(target="pkg.train", args=("1",), is_module=True)
    made = pack_program(own, sync=None, current=project, limit_bytes=1 << 20)
    assert (made.folder, made.name, made.script) == (project, "pkg.train", None)
    assert paths(replace(with_tree(made, None, project))) == [
        "pkg/__init__.py",
        "x.txt",
    ]

"""What the notebook knows better than a host that lacks a file or a module."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path

import pytest

from distmagic.payload.folder import contents_of
from distmagic.remote.wire import protocol as p
from distmagic.session.local_hints import local_hint
from tests.builders.events import begun, ended

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def hint(kind: str, message: str, folder: Path) -> str:
    failure = p.Failure(type=kind, message=message, traceback="Traceback")
    return local_hint(
        begun(ended(3, 1, outcome="raised", code=1, failure=failure)), folder
    )


def missing(path: str) -> str:
    return f"[Errno 2] No such file or directory: {path!r}"


@pytest.mark.parametrize("written", ["data/x.csv", "./data/x.csv", "data/it's.csv"])
def test_a_file_that_lies_here_is_named(written, tmp_path, golden):
    (tmp_path / "data").mkdir()
    (tmp_path / written).write_text("1")
    golden(hint("FileNotFoundError", missing(written), tmp_path))


@pytest.mark.parametrize(
    ("ignoring", "text", "written", "line", "told"),
    [
        (".", "*.bin\n", "data/of it/train.bin", "!/data/of it/", "."),
        (".", "*.bin\n", "train.bin", "!/train.bin", "."),
        (".", "/data/\n", "data/words/train.bin", "!/data/", "."),
        ("data", "words/*\n", "data/words/train.bin", "!/words/", "data"),
        ("..", "*.bin\n", "data/train.bin", "!/data/", "."),
    ],
)
def test_a_file_that_git_ignores_is_told_with_the_line_that_sends_it(
    tmp_path, ignoring, text, written, line, told, golden
):
    (tmp_path / ".git").mkdir()
    here = tmp_path / "project"
    file = here / written
    file.parent.mkdir(parents=True)
    file.write_text("1")
    (here / ignoring / ".gitignore").write_text(text)
    lines = (here / told / ".distmagicignore").resolve()
    golden(hint("FileNotFoundError", missing(written), here))
    assert written not in contents_of(here).files
    lines.write_text(line)
    assert written in contents_of(here).files
    assert "--sync ." in hint("FileNotFoundError", missing(written), here)


def test_a_file_in_the_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.csv").write_text("1")
    assert hint("FileNotFoundError", missing("~/x.csv"), tmp_path / "other").startswith(
        "~/x.csv is on this machine"
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("FileNotFoundError", missing("data/y.csv")),
        ("FileNotFoundError", missing("x" * 5000)),
        ("FileNotFoundError", missing("a\0b").replace("\\x00", "\0")),
        ("FileNotFoundError", missing("~nobody-of-this-name/x")),
        ("FileNotFoundError", "no"),
        ("RuntimeError", missing("here.csv")),
        ("ModuleNotFoundError", "No module named 'json'"),
        ("ModuleNotFoundError", "No module named 'sys'"),
        ("ParcelError", "The value needs the module 'pytest', which this Python lacks"),
        ("ModuleNotFoundError", "No module named '.x'"),
    ],
)
def test_nothing_is_said_of_files_that_are_not_here_and_of_pythons_own_modules(
    kind, message, tmp_path
):
    (tmp_path / "here.csv").write_text("1")
    assert hint(kind, message, tmp_path) == ""


@pytest.mark.parametrize("name", ["pytest", "not_a_module_anywhere.inner"])
def test_of_a_package_that_a_host_lacks_the_cure_is_told(name, tmp_path, golden):
    golden(hint("ModuleNotFoundError", f"No module named '{name}'", tmp_path))


def test_nothing_is_said_of_a_run_without_such_a_failure(tmp_path):
    assert local_hint(begun(), tmp_path) == ""
    assert local_hint(begun(ended(3, 1, outcome="exited", code=1)), tmp_path) == ""


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_beside_the_notebook_is_to_be_imported_by_its_name(beside, golden):
    (beside / "dm_test_helper.py").write_text("")
    (beside / "dm_test_package").mkdir()
    (beside / "dm_test_package" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    for top in ("dm_test_helper", "dm_test_package"):
        golden(hint("ModuleNotFoundError", f"No module named '{top}'", beside))


def test_a_compiled_module_is_to_be_built_there(beside, golden):
    (beside / f"dm_test_fast{SUFFIX}").write_text("")
    (beside / "dm_test_pack").mkdir()
    (beside / "dm_test_pack" / "__init__.py").write_text("")
    (beside / "dm_test_pack" / f"fast{SUFFIX}").write_text("")
    importlib.invalidate_caches()
    for name in ("dm_test_fast", "dm_test_pack.fast"):
        message = f"The value needs the module '{name}', which this Python lacks.\nInstall it."
        golden(hint("ParcelError", message, beside).replace(SUFFIX, ".so"))


@pytest.mark.parametrize(
    ("kind", "message", "traceback"),
    [
        ("NameError", "name 'Net' is not defined", ""),
        ("AttributeError", "module '__main__' has no attribute 'Net'", ""),
        ("AttributeError", "Can't get attribute 'Net' on <module '__main__' (built-in)>", ""),
        ("KeyError", "'Net'", "return globals()[name]()"),
    ],
)  # fmt: skip
def test_a_name_of_the_notebook_that_only_a_text_has(
    kind, message, traceback, monkeypatch, golden
):
    assert not name_hint(kind, message, traceback)
    monkeypatch.setattr(sys.modules["__main__"], "Net", object(), raising=False)
    told = name_hint(kind, message, traceback)
    golden(told)


def test_an_error_that_is_called_as_a_name_of_the_notebook_is_no_missing_name(
    monkeypatch,
):
    monkeypatch.setattr(sys.modules["__main__"], "labels", [], raising=False)
    assert not name_hint("KeyError", "'labels'", 'batch["labels"]')
    message = "'Net' object has no attribute 'labels'"
    assert not name_hint("AttributeError", message, "net.labels")


def name_hint(kind: str, message: str, traceback: str) -> str:
    failure = p.Failure(type=kind, message=message, traceback=traceback)
    end = ended(3, 1, outcome="raised", code=1, failure=failure)
    return local_hint(begun(end), Path())

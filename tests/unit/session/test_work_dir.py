"""What the working directory of a run is called."""

import getpass
import socket
import sys
import types
import typing
from dataclasses import replace

import pytest

from distmagic.connection.limits import LIMITS
from distmagic.names import own_origin, work_dir
from distmagic.payload import blobs
from distmagic.payload.pack import Payload
from distmagic.remote.wire.bounds import Name
from distmagic.remote.wire.protocol import WorkDir
from distmagic.request.spec import JobSpec

HERE = f"ann@{socket.gethostname()}"


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


def test_the_user_may_name_it_and_every_run_of_that_name_shares_it():
    assert work_dir(JobSpec(name="bert", fresh=True)) == WorkDir(
        name="bert", is_fresh=True
    )


def test_it_is_called_after_the_notebook(kernel):
    kernel("/tmp/kernel-77.json", "/nb/My first try (2).ipynb")
    assert work_dir(JobSpec()) == WorkDir(
        name="My_first_try_2_", origin=f"{HERE}:/nb/My first try (2).ipynb"
    )
    assert own_origin() == f"{HERE}:/nb/My first try (2).ipynb"


def test_one_notebook_of_two_people_is_two(kernel, monkeypatch):
    kernel("/tmp/kernel-77.json", "/srv/shared/train.ipynb")
    of_ann = work_dir(JobSpec()).origin, own_origin()
    monkeypatch.setattr(getpass, "getuser", lambda: "bob")
    of_bob = work_dir(JobSpec()).origin, own_origin()
    assert of_ann == (f"{HERE}:/srv/shared/train.ipynb",) * 2
    assert of_bob == tuple(text.replace("ann@", "bob@") for text in of_ann)


def test_its_origin_is_told_as_hosts_list_it(kernel):
    kernel("/tmp/kernel-77.json", "/nb/\x1b[2J" + "long/" * 300 + "try.ipynb")
    origin = own_origin()
    _, kind, most = typing.get_args(Name)
    assert LIMITS[kind](most)(origin) == origin
    assert work_dir(JobSpec()).origin == origin


def test_a_notebook_of_vs_code_is_known_too(kernel):
    kernel("/tmp/kernel-v3abc.json", vscode="/nb/try.ipynb")
    assert work_dir(JobSpec()) == WorkDir(name="try", origin=f"{HERE}:/nb/try.ipynb")


@pytest.mark.parametrize(
    ("connection_file", "path"),
    [
        ("/tmp/tmpq8x2.json", "/nb/outer.ipynb"),
        ("/tmp/kernel-77.json", "/nb/console-1-5f0c2a"),
    ],
    ids=["executed within another notebook", "console"],
)
def test_what_is_no_notebook_of_its_own_is_called_after_the_current_directory(
    kernel, monkeypatch, tmp_path, connection_file, path
):
    monkeypatch.chdir(tmp_path)
    kernel(connection_file, path)
    assert own_origin() == f"{HERE}:{tmp_path}"


def test_it_is_called_after_the_script(tmp_path):
    payload = Payload(
        call=blobs.keep(b"", tmp_path), code=blobs.keep(b"", tmp_path), name="train"
    )
    script = replace(payload, script=tmp_path / "train.py")
    assert work_dir(JobSpec(), script) == WorkDir(
        name="train", origin=f"{HERE}:{tmp_path}/train.py"
    )


def test_it_is_called_after_the_program_that_calls_us(monkeypatch):
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", "/my/tools/sweep.py", raising=False
    )
    assert work_dir(JobSpec()).name == "sweep"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/lib/pytest/__main__.py")
    assert work_dir(JobSpec()).name == "pytest"


def test_without_a_name_it_is_called_after_the_current_directory(monkeypatch, tmp_path):
    (tmp_path / "...").mkdir()
    (tmp_path / "proj").mkdir()
    monkeypatch.chdir(tmp_path / "proj")
    assert work_dir(JobSpec()) == WorkDir(name="proj", origin=f"{HERE}:{tmp_path}/proj")
    monkeypatch.chdir(tmp_path / "...")
    assert work_dir(JobSpec()).name == "run"

"""Under which name hosts know who began a job."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys

import pytest

from distmagic import names as owners
from distmagic.connection import limits
from distmagic.names import owner
from distmagic.remote.wire import codec
from distmagic.remote.wire import protocol as p
from tests import REPOSITORY
from tests.builders.shell import completed

ME = f"{getpass.getuser()}@{socket.gethostname()}"
SERVERS_FILE = "/run/user/1/jupyter/kernel-5f0c2a.json"


def test_a_notebook_of_jupyter_is_the_same_in_every_kernel_that_it_gets(kernel):
    first = kernel(SERVERS_FILE, "/home/me/train.ipynb")
    assert first == f"{ME}:/home/me/train.ipynb"
    assert (
        kernel("/run/user/1/jupyter/kernel-0b77e1.json", "/home/me/train.ipynb")
        == first
    )
    assert kernel(SERVERS_FILE, "/home/me/other.ipynb") != first


def test_a_notebook_of_vs_code_is_known_by_its_path(kernel):
    assert (
        kernel("/tmp/kernel-v3abc.json", vscode="/home/me/train.ipynb")
        == f"{ME}:/home/me/train.ipynb"
    )


def test_a_kernel_without_a_notebook_s_name_is_the_same_after_a_restart(kernel):
    """Jupyter restarts a kernel with its connection file."""
    assert kernel(SERVERS_FILE) == f"{ME}:notebook (kernel 5f0c2a)"
    assert kernel("/tmp/kernel-77.json") == f"{ME}:notebook (kernel 77)"


def test_a_notebook_that_is_executed_from_within_another_one_is_not_that_one(kernel):
    """It inherits the variables of the outer one's kernel; nbclient and papermill choose another connection file."""
    assert (
        kernel("/tmp/tmpq8x2.json", "/home/me/outer.ipynb")
        == f"{ME}:notebook (kernel tmpq8x2)"
    )


@pytest.mark.parametrize(
    "path", ["/home/me/\x1b[2J\u202etrain.ipynb", "/deep" * 400 + "/train.ipynb"]
)
def test_a_name_is_one_that_comes_back_from_hosts_as_it_is(kernel, path):
    name = kernel(SERVERS_FILE, path)
    terms = p.JobTerms(lease_s=60.0, owner=name)
    found = limits.DECODER.from_plain(p.JobTerms, codec.plain(terms))
    assert found.owner == name


def test_a_user_without_a_name(kernel, monkeypatch):
    def no_user() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(owners.getpass, "getuser", no_user)
    assert (
        kernel(SERVERS_FILE, "/train.ipynb") == f"{socket.gethostname()}:/train.ipynb"
    )


SCRIPT = "from distmagic.names import owner; print(owner()); print(owner())"


def names_of(*argv: str) -> list[str]:
    """Run a program as a child of a notebook's kernel; return the two lines that it prints."""
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JPY_SESSION_NAME": "/home/me/train.ipynb",
    }
    ran = completed([sys.executable, *argv], env=env)
    return ran.stdout.splitlines()


def test_each_process_of_a_script_is_an_owner_of_its_own_also_below_a_notebook(
    tmp_path,
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first, second = names_of(str(script)), names_of(str(script))
    assert first[0] == first[1]
    assert first[0] != second[0]
    assert re.fullmatch(
        re.escape(ME) + r":train\.py \(process \d+-[0-9a-f]{6}\)", first[0]
    )


@pytest.mark.parametrize("argv", [("-c", SCRIPT), ("-m", "train")], ids=["-c", "-m"])
def test_a_process_without_a_script_has_a_name(tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__main__.py").write_text(SCRIPT)
    name = "python" if argv[0] == "-c" else "train"
    assert names_of(*argv)[0].startswith(f"{ME}:{name} (process ")


def test_a_forked_child_is_another_owner(monkeypatch):
    mine = owner()
    monkeypatch.setattr(owners.os, "getpid", lambda: -1)
    assert owner() != mine

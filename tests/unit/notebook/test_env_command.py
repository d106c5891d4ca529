"""`%distributed env sync`, over a fake session: what is asked for, what is printed, and which Python cells use then."""

import pytest

from distmagic.errors import PreflightError
from distmagic.notebook.completion import Completer
from distmagic.remote.wire.protocol import EnvironmentReady
from distmagic.session.housekeeping import Synced

READY = EnvironmentReady(
    python="/home/me/.distmagic/envs/.1/bin/python", was_there=False, elapsed_s=61.4
)


@pytest.fixture
def requirements(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("torch==2.9.0\n./mine\n")
    return tmp_path / "train.txt"


def test_cells_use_the_environment_where_it_was_made(lab, capsys, requirements, golden):
    lab.value("%distributed hosts gpu-a gpu-b")
    lab.session.synced = Synced(
        ready={"gpu-a": READY},
        error=PreflightError("gpu-b", "apex could not be installed."),
    )
    capsys.readouterr()
    error = lab.error("%distributed env sync --requirements train.txt")
    golden(error)
    assert "sync train: torch==2.9.0" in lab.session.log
    captured = capsys.readouterr()
    golden(*captured.out.splitlines()[:3])
    assert captured.err.splitlines() == [
        "gpu-a: Downloading torch, 3 s",
        "gpu-a: waiting, 9 s",
    ]
    lab.run("%%distributed\nint()")
    assert lab.session.access.pythons == (("gpu-a", READY.python),)
    lab.run("%%distributed --python gpu-a=/other --python gpu-b=/b\nint()")
    assert dict(lab.session.access.pythons) == {"gpu-a": "/other", "gpu-b": "/b"}
    lab.run("%%distributed --python /all\nint()")
    assert lab.session.access.pythons == (("", "/all"),)
    # It is never made by a Python that was made so.
    lab.session.synced = Synced(ready={})
    lab.value(
        "%distributed env sync --hosts=gpu-a --requirements=train.txt --name mine"
    )
    assert lab.session.access.pythons == ()
    assert [host.name for host in lab.session.hosts] == ["gpu-a"]
    assert "sync mine: torch==2.9.0" in lab.session.log


def test_an_environment_that_is_there_is_told_as_such(lab, capsys, requirements):
    found = EnvironmentReady(python="/x/python", was_there=True, elapsed_s=0.1)
    lab.session.synced = Synced(ready={"gpu-a": found})
    lab.value("%distributed hosts gpu-a")
    lab.value("%distributed env sync --requirements train.txt")
    told = "gpu-a: the environment train existed already (0 s): /x/python\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "",
        "make",
        "sync --fast",
        "sync --name",
        "sync --name a --name b",
        "sync --lock a --requirements b",
        "sync --requirements nowhere.txt",
        "sync --lock ~no-such-user/uv.lock",
        "sync --requirements train.txt --name a/b",
    ],
)
def test_a_wrong_line_says_what_to_write(lab, requirements, line, golden):
    lab.value("%distributed hosts gpu-a")
    error = lab.error(f"%distributed env {line}")
    golden(str(error).partition("\n")[0])


def test_the_tab_key_completes_it(requirements):
    completer = Completer(hosts=lambda: ["gpu-a"], jobs=list)
    for line, offered in (
        ("%distributed env ", ["sync"]),
        ("%distributed env sync ", ["--hosts", "--requirements", "--lock", "--name"]),
        ("%distributed env sync --name ", []),
        ("%distributed env sync --", ["--hosts", "--requirements", "--lock", "--name"]),
        ("%distributed env sync --hosts g", ["gpu-a"]),
        ("%distributed env sync --lock ", ["train.txt"]),
        ("%distributed env sync --requirements ", ["train.txt"]),
    ):
        assert completer.candidates(line) == offered

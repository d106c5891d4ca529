"""`%distributed get | put`, over a fake session: which folder of which host, and what is printed."""

import pwd
from pathlib import Path

import pytest

from distmagic.notebook.file_commands import split_pattern
from distmagic.session import spreading


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("model.pt", ("~", "model.pt")),
        ("runs/model.pt", ("runs", "model.pt")),
        ("runs/", ("~", "runs")),
        ("runs/*/model.pt", ("runs", "*/model.pt")),
        ("/data/**/x?.pt", ("/data", "**/x?.pt")),
        ("/data", ("/", "data")),
        ("~/a/[ab]", ("~/a", "[ab]")),
        ("*", ("~", "*")),
    ],
)
def test_a_path_is_a_folder_and_what_is_wanted_of_it(path, parts):
    assert split_pattern(path) == parts


def test_get_fetches_to_the_current_directory_or_to_the_one_that_is_named(lab, capsys):
    lab.value("%distributed hosts gpu-a gpu-b")
    lab.session.log.clear()
    capsys.readouterr()
    lab.value("%distributed get gpu-b runs/*.pt")
    lab.value("%distributed get gpu-b /data/x ~/here")
    assert [entry for entry in lab.session.log if entry != "reach"] == [
        "folder runs of gpu-b",
        "fetch *.pt to .",
        "folder /data of gpu-b",
        f"fetch x to {Path.home() / 'here'}",
    ]
    assert capsys.readouterr().out == f"a.pt\n{Path.home() / 'here'}/a.pt\n"


@pytest.mark.parametrize("to", ["~nobody-of-this-name/models", "~", "~/models"])
def test_get_makes_no_folder_that_is_called_as_a_home_is_written(
    lab, monkeypatch, to, golden
):
    if to.partition("/")[0] == "~":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError: no entry
    error = lab.error(f"%distributed get gpu-a runs/model.pt {to}")
    golden(error)
    assert lab.session.log == []


def test_get_takes_a_folder_that_begins_with_a_tilde_if_it_is_meant(lab):
    lab.value("%distributed get gpu-a runs/model.pt ./~here")
    assert "fetch model.pt to ~here" in lab.session.log


def test_put_sends_to_the_home_or_to_the_folder_that_is_named(lab, capsys):
    lab.value("%distributed put gpu-c model.pt")
    lab.value("%distributed put gpu-c data/model.pt /scratch")
    assert [entry for entry in lab.session.log if entry != "reach"] == [
        "folder ~ of gpu-c",
        "send model.pt",
        "folder /scratch of gpu-c",
        "send data/model.pt",
    ]
    assert capsys.readouterr().out == "gpu-c:~/model.pt\ngpu-c:/scratch/model.pt\n"


def test_put_all_sends_what_fits_a_pattern_to_every_host(
    lab, monkeypatch, tmp_path, capsys, golden
):
    for host in ("gpu-a", "gpu-b"):
        (tmp_path / "back" / host / "ck").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    asked = []

    def put(first_links, sources, to):
        asked.append((first_links.fleet.names, sources, to))
        return 3, 12_345_678

    monkeypatch.setattr(spreading, "put", put)
    lab.value("%distributed hosts gpu-a gpu-b")
    capsys.readouterr()
    lab.value("%distributed put --all back/*/ck /scratch")
    lab.value("%distributed put back --all")
    both = ("gpu-a", "gpu-b")
    assert asked == [
        (both, [Path("back/gpu-a/ck"), Path("back/gpu-b/ck")], "/scratch"),
        (both, [Path("back")], "~"),
    ]
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    [
        "get gpu-a",
        "get gpu-a a b c",
        "get gpu-a ~",
        "get gpu-a runs/..",
        "get a,b x",
        "put gpu-a",
        "put --all",
        "put data /scratch more --all",
        "put --all no-such-file",
    ],
)
def test_a_wrong_line_says_what_to_write(lab, line, golden):
    golden(str(lab.error(f"%distributed {line}")).partition("\n")[0])

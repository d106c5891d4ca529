"""SING Cloud's image and entry point; the latter is run on several hosts in tests/e2e/test_exports.py."""

from __future__ import annotations

import json
import socket

import pytest

from distmagic.errors import UsageError
from distmagic.exports import systems
from distmagic.systems.sing import sing_entry
from tests import REPOSITORY
from tests.builders.exports import HOSTILE, PLAIN, job, shown, texts

GOLDEN = REPOSITORY / "tests/golden/exports"
TWO = {"SING_RANK": "1", "SING_WORLD_SIZE": "2"}
NAMED = {"SING_JOB_NAME": "test", "SING_HOSTNAME_SUFFIX": "svc.local"}


def test_the_files_of_a_job():
    whole = job(
        "sing",
        nodes=2,
        image="registry.local/torch:2.13",
        options=(("gpus-per-node", "4"),),
        setup="pip install 'a b'\necho $HOME",
        spec={"env": (("LR", "0.1"), ("HF_TOKEN", "it's $x"))},
    )
    files = [file for file in systems.files(whole) if file.path != "dist.py"]
    assert shown(tuple(files)) == (GOLDEN / "sing.txt").read_text()


def test_hostile_values_are_in_the_settings_as_they_are():
    program = type(PLAIN)(files=PLAIN.files, words=("cell.py", *HOSTILE))
    env = tuple((f"MY_{place}", value) for place, value in enumerate(HOSTILE))
    found = texts(systems.files(job("sing", program=program, spec={"env": env})))
    settings = json.loads(found["settings.json"])
    assert settings["environment"] == dict(env)
    words = [
        sing_entry.filled(
            word,
            {"NODE": "0", "NODES": "1", "MASTER": "m", "RANKS": "1", "IS_HOST": "1"},
        )
        for word in settings["command"]
    ]
    assert words[-len(HOSTILE) - 1 :] == ["cell.py", *HOSTILE]
    assert "--master-addr=m" in words


def test_a_setup_is_one_line_of_the_dockerfile_whatever_is_in_it():
    for value in HOSTILE[:-4]:
        lines = texts(systems.files(job("sing", setup=value)))[
            "Dockerfile"
        ].splitlines()
        runs = [line for line in lines if line.startswith("RUN ")]
        assert [json.loads(line.removeprefix("RUN ")) for line in runs] == (
            [["bash", "-c", value]] if value else []
        )
        assert len(lines) == 6 + len(runs)


def test_a_home_that_an_image_does_not_have(golden):
    with golden.raises(UsageError):
        systems.files(job("sing", python="~/venv/bin/python"))


def test_a_secret_with_a_line_break(golden):
    with golden.raises(UsageError):
        systems.files(job("sing", spec={"env": (("A_TOKEN", "a\nb"),)}))


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({**TWO, "SING_MASTER_ADDR": "m", **NAMED}, (1, 2, "m")),
        ({**TWO, **NAMED}, (1, 2, "test-0.svc.local")),
        ({"SING_RANK": "0", "SING_WORLD_SIZE": "1"}, (0, 1, "127.0.0.1")),
    ],
)
def test_the_place_of_a_node(variables, found):
    assert sing_entry.place(variables) == found


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SING_RANK": "0"},
        {"SING_RANK": "0", "SING_WORLD_SIZE": "two"},
        {"SING_RANK": "2", "SING_WORLD_SIZE": "2"},
        TWO,
        {**TWO, "SING_JOB_NAME": "test"},
    ],
)  # fmt: skip
def test_variables_that_do_not_say_it(variables, golden):
    with golden.raises(SystemExit):
        sing_entry.place(variables)


def test_with_c10d_a_node_of_several_has_to_know_its_own_address(tmp_path, monkeypatch):
    for name in ("c10d", "static"):
        one = job("sing", nodes=2, spec={"rdzv_backend": name, "rdzv_id": "7"})
        (tmp_path / name).mkdir()
        settings = texts(systems.files(one))["settings.json"]
        (tmp_path / name / "settings.json").write_text(settings)
    for name, value in {**TWO, "SING_MASTER_ADDR": "m"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SING_HOST_ADDR", raising=False)

    class Begun(Exception):
        """Raised where torchrun would be next."""

    def begin(master):
        raise Begun

    monkeypatch.setattr(sing_entry, "wait_for", begin)
    with pytest.raises(SystemExit, match="SING_HOST_ADDR is not set: with c10d"):
        sing_entry.main(tmp_path / "c10d")
    with pytest.raises(Begun):
        sing_entry.main(tmp_path / "static")
    monkeypatch.setenv("SING_HOST_ADDR", "10.0.0.2")
    with pytest.raises(Begun):
        sing_entry.main(tmp_path / "c10d")


def test_a_name_that_is_known_late_is_waited_for(monkeypatch, golden):
    asked = []

    def look_up(name, port):
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror("not yet")

    slept: list[float] = []
    sing_entry.wait_for("test-0", look_up=look_up, sleep=slept.append)
    assert (asked, slept) == (["test-0"] * 3, [1.0, 1.0])
    monkeypatch.setattr(sing_entry, "_WAIT_S", -1.0)
    asked.clear()
    with golden.raises(SystemExit):
        sing_entry.wait_for("test-0", look_up=look_up, sleep=slept.append)

"""SING Cloud's image and entry point; the latter is run on several hosts in tests/e2e/test_exports.py."""

import json

import pytest

from distmagic.errors import UsageError
from distmagic.exports import systems
from tests import REPOSITORY
from tests.builders.exports import HOSTILE, job, shown, texts
from tests.builders.shell import refusal

GOLDEN = REPOSITORY / "tests/golden/exports"


def test_the_files_of_a_job():
    whole = job(
        "sing",
        nodes=2,
        image="registry.local/torch:2.13",
        options=(("gpus-per-node", "4"),),
        setup="pip install 'a b'\necho $HOME",
        spec={"env": (("LR", "0.1"), ("HF_TOKEN", "it's $x"))},
    )
    assert shown(systems.files(whole)) == (GOLDEN / "sing.txt").read_text()


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
    ("change", "message"),
    [
        ({"SING_RANK": None}, "SING_RANK: is not set: SING Cloud sets it"),
        ({"SING_WORLD_SIZE": "two"}, "SING_WORLD_SIZE is two, which is not a number"),
        ({"SING_RANK": "2"}, "SING_RANK is 2, of 2 nodes"),
        ({}, "SING_JOB_NAME: is not set, nor SING_MASTER_ADDR"),
        ({"SING_JOB_NAME": "test"}, "SING_HOSTNAME_SUFFIX: is not set, nor SING_M"),
        ({"SING_HOST_ADDR": None}, "SING_HOST_ADDR: is not set: SING Cloud sets it"),
    ],
)
def test_what_a_node_lacks_is_named_at_once(change, message):
    one = job("sing", nodes=2, spec={"rdzv_backend": "c10d"})
    given = {"SING_RANK": "1", "SING_WORLD_SIZE": "2", "SING_HOST_ADDR": "b"}
    assert message in refusal(texts(systems.files(one))["node.sh"], given, change)

"""No value of a user becomes anything but itself: read back by real bash, by YAML, Python and JSON."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.exports import quoting
from tests.builders.exports import HOSTILE
from tests.builders.shell import completed

VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30
)


def read_back(line: str) -> list[str]:
    script = f"printf '%s\\0' {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=8))
def test_bash_reads_back_every_word_of_one_printable_line(words):
    line = quoting.bash_line(words)
    assert line.isprintable()
    assert read_back(line) == words


def test_bash_reads_back_what_is_known_to_be_hostile_and_bytes_that_are_no_text():
    words = [*HOSTILE, "\udcff\udc80x"]
    assert read_back(quoting.bash_line(words)) == words


def test_a_variable_in_a_word_is_the_only_thing_that_is_expanded():
    word = f"--a=$HOME {quoting.variable('RANKS')}'"
    script = f"RANKS='1 2'; printf '%s|' {quoting.bash(word)}"
    told = completed(["bash", "-c", script]).stdout
    assert told == "--a=$HOME 1 2'|"


@given(VALUES)
def test_yaml_reads_back_every_text(value):
    text = f"a: {quoting.yaml(value)}\nb: 1\n"
    assert yaml.safe_load(text) == {"a": value, "b": 1}


@given(
    st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60
    )
)
def test_yaml_reads_back_every_block(text):
    document = f"a:{quoting.yaml_block(text)}b: 1\n"
    assert yaml.safe_load(document) == {"a": text.rstrip("\n") + "\n", "b": 1}


def test_a_plain_block_is_one_for_people():
    assert quoting.yaml_block("a\n  b: 'c'\n\nd") == " |\n  a\n    b: 'c'\n\n  d\n"


def test_the_pieces_of_a_word():
    word = f"--node-rank={quoting.variable('NODE')}"
    assert quoting.pieces(word) == ["--node-rank=", "NODE", ""]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_dockerfile_has_one_line(value):
    line = quoting.dockerfile(("bash", "-c", value))
    assert "\n" not in line
    assert json.loads(line) == ["bash", "-c", value]

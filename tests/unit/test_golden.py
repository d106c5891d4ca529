"""Golden messages: no entry is of a test that is gone, and what is compared is compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distmagic.errors import UsageError
from tests import REPOSITORY
from tests.builders import golden as builder
from tests.builders.golden import COLLECTED, MESSAGES, Golden, page_of, read, renew


def test_no_entry_is_stale(pytestconfig):
    """Of the modules that were collected whole; of others only that they are there."""
    collected = pytestconfig.stash[COLLECTED]
    modules = {test.partition("::")[0] for test in collected}
    modules -= {argument.partition("::")[0] for argument in pytestconfig.args if "::" in argument}  # fmt: skip
    stale = []
    for page in MESSAGES.glob("*.txt"):
        for entry in read(page):
            test = f"tests/{entry}"
            module = test.partition("::")[0]
            is_there = collected.get(test, module not in modules)
            if (
                not is_there
                or page_of(entry) != page
                or not (REPOSITORY / module).exists()
            ):
                stale.append(entry)
                if pytestconfig.getoption("renew_golden"):
                    renew(page, entry, "")
    assert stale == [] or pytestconfig.getoption("renew_golden")


_SEVERAL = re.compile(
    r"(?<![\w.,:/-])(?<!more than )1 (?:more |other )?(?:byte|call|cell|device|file|GPU|host|job|line|node|parameter|place|"
    r"point|process|rank|run|step|task|time)e?s\b"
)


def test_one_of_a_thing_is_not_several():
    """No text has `1 ranks`; a name of a test may quote another program that has."""
    texts = [text for page in MESSAGES.glob("*.txt") for text in read(page).values()]
    assert [text for text in texts if _SEVERAL.search(text)] == []


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an entry of two texts."""
    monkeypatch.setattr(builder, "MESSAGES", tmp_path)
    made = "unit/request/test_x.py::test_y[a\\nb]"
    new = Golden(made, "", tmp_path.parent, is_renewed=True)
    new(UsageError(f"{tmp_path}/x is red.", "Look.\n\nAgain."))
    new("\x1b one", 2)
    new.finish()
    new.close()
    return made


def texts_of(entry: str) -> str:
    return read(page_of(entry))[entry]


@pytest.mark.parametrize(
    "texts", [["other"], ["UsageError: TMP/x is"], ["\x1b one\n2"]]
)
def test_another_text_fails(entry, tmp_path, texts):
    found = Golden(entry, texts_of(entry), tmp_path, is_renewed=False)
    with pytest.raises(AssertionError, match="make golden"):
        found(*texts)


def test_more_texts_and_fewer_fail(entry, tmp_path):
    found = Golden(entry, texts_of(entry), tmp_path, is_renewed=False)
    with pytest.raises(AssertionError, match="stale"):
        found.finish()
    other = Golden(entry, "", tmp_path, is_renewed=False)
    with pytest.raises(AssertionError, match="make golden"):
        other("")

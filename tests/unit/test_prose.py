"""The check of the manual's language: what it finds, what it lets pass, and that all pages pass."""

import pytest

from tests import prose

HEAD = "# Page\n\nWhat the page is about.\n\n"
LONG = "word " * 26


@pytest.mark.parametrize("page", prose.PAGES, ids=lambda page: page.name)
def test_a_page_keeps_the_rules(page):
    found = prose.faults(page.read_text(), with_cells=page != prose.README)
    assert list(found) == []


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}.",
        f"- Short. {LONG}",
        f"| flag | {'word ' * 16} |",
        "Short. Of a host the name is shown.",
        "Where a host is down it is named.",
        "The run starts anew.",
        "It tells the notebook.",
        "Files lie here.",
        "Nothing is\nkept there.",
    ],
)
def test_a_broken_rule_is_one_fault(text):
    (_fault,) = prose.faults(HEAD + text)

"""`%distributed help WORDS` finds what answers a question, in pages of any shape."""

from __future__ import annotations

import pytest

from distmagic.notebook.help_pages import passages, search

LONG = "filler " * 300
PAGES = {
    "hosts": f"# Hosts\n\nHow hosts are named.\n\n## A jump host\n\nWrite ProxyJump:\n\n```\nHost a\n\n    ProxyJump b\n```\n\n## Rest\n\n{LONG}\n",
    "flags": "# Flags\n\nAll of them.\n\n## Ranks\n\n| flag | meaning |\n|---|---|\n"
    f"| `--env NAME` | a variable |\n| `--devices 0,1` | some GPUs |\n\n{LONG}\n\n- **Caches** are\n  kept.\n- **Nodes** are counted, in a cache.\n\nFor example:\n\n```\n--env A=1\n\n--env B=2\n```\n",
}


def best(question: str) -> tuple[str, str]:
    found = search(question.split(), PAGES)[0]
    return found.topic, found.text


def test_a_short_section_is_one_passage_with_its_code():
    topic, text = best("jump host")
    assert topic == "hosts"
    assert text == "Write ProxyJump:\n\n```\nHost a\n\n    ProxyJump b\n```"


def test_the_row_of_a_message_comes_before_all_that_has_its_words():
    rows = "| you see | what to do |\n|---|---|\n| `the port ... is taken`, `is no host` | wait |\n"
    pages = {**PAGES, "trouble": f"# Trouble\n\nText.\n\n## Seen\n\n{rows}"}
    for message in (
        "jump host: The port 29500 is taken by a jump",
        "'a jump' is no host",
    ):
        assert search(message.split(), pages)[0].topic == "trouble"
    assert search(["taken", "jump", "host"], pages)[0].topic == "hosts"


def test_a_comment_in_code_is_no_heading():
    page = "# Page\n\nText.\n\n## Load\n\n```\n# The newest one.\nload()\n```\n"
    assert [one.heading for one in passages("page", page)] == ["Page", "Load"]


def test_a_row_of_a_long_section_comes_with_its_tables_head():
    assert best("some gpu") == (
        "flags",
        "| flag | meaning |\n|---|---|\n| `--devices 0,1` | some GPUs |",
    )


def test_a_paragraph_of_a_long_section_keeps_the_code_below_it():
    assert best("example")[1] == "For example:\n\n```\n--env A=1\n\n--env B=2\n```"


def test_an_item_of_a_long_sections_list_is_a_passage():
    assert best("kept")[1] == "- **Caches** are\n  kept."
    assert best("count")[1] == "- **Nodes** are counted, in a cache."


@pytest.mark.parametrize("question", ["cache", "caches", "caching"])
def test_all_forms_of_a_word_that_ends_in_e_are_the_same_word(question):
    assert [one.text[:11] for one in search([question], PAGES)] == [
        "- **Caches*",
        "- **Nodes**",
    ]


@pytest.mark.parametrize("question", ["proxyjmup", "ProxyJump", "how do I proxyjump"])
def test_case_common_words_and_one_slip_do_not_matter(question):
    assert best(question)[0] == "hosts"


@pytest.mark.parametrize("question", ["", "how do I", "zzxyq"])
def test_nothing_is_found_by_words_that_mean_nothing(question):
    assert search(question.split(), PAGES) == []


def test_no_text_of_a_page_is_lost():
    for topic, page in PAGES.items():
        shown = "\n".join(f"{one.heading}\n{one.text}" for one in passages(topic, page))
        for line in page.splitlines():
            assert line.strip("# ") in shown

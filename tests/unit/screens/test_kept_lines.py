"""The lines that a kernel keeps for its pages: numbered, bounded, and honest about those that it has not."""

from __future__ import annotations

from dataclasses import replace

from distmagic.screens import kept_lines
from distmagic.screens.kept_lines import KeptLines
from distmagic.state.model import OutputLine, RunState
from tests.scenes import running


def said(total: int, kept: int = 400, text: str = "line {}", rank: int = 0) -> RunState:
    """Return a run that has written `total` lines, of which the state has the last ones."""
    lines = []
    for number in range(max(0, total - kept), total):
        label = f"rank {rank} a"
        text_of_line = text.format(number)
        line = OutputLine(rank=rank, label=label, stream="stdout", text=text_of_line)
        lines.append(line)
    return replace(running(), lines=tuple(lines), lines_seen=total)


def filled(*states: RunState) -> KeptLines:
    made = KeptLines()
    for state in states:
        made.add(state)
    return made


def numbers(answer: dict) -> list[int]:
    return [number for number, _, _ in answer["lines"]]


def test_lines_of_many_states_are_kept_once_and_in_order():
    kept = filled(*(said(total) for total in (0, 3, 3, 390, 700, 1000)))
    answer = kept.last(10_000)
    assert numbers(answer) == list(range(1000))
    assert (answer["first"], answer["total"]) == (0, 1000)
    number, rank, html = answer["lines"][7]
    assert (number, rank) == (7, 0)
    assert "line 7\n</span>" in html


def test_earlier_lines_come_in_portions_until_there_are_none():
    kept = filled(*(said(total) for total in range(0, 3001, 300)))
    end, found = 3000, []
    while (answer := kept.before(end, 1000))["first"] < end:
        found = numbers(answer) + found
        end = answer["first"]
    assert found == list(range(3000))
    assert kept.before(0, 1000) == {"first": 0, "lines": []}


def test_an_answer_has_at_most_200_kb():
    kept = filled(*(said(total, text="x" * 900 + " {}") for total in (400, 800)))
    answer = kept.last(1000)
    size = sum(len(html) for _, _, html in answer["lines"])
    assert 150_000 < size <= 200_000
    assert answer["first"] == numbers(answer)[0] > 400


def test_no_more_is_kept_than_ten_thousand_lines_and_four_million_characters(
    monkeypatch,
):
    monkeypatch.setattr(kept_lines, "_KEPT", 500)
    kept = filled(*(said(total) for total in range(0, 2001, 400)))
    assert kept.last(10_000)["first"] == 1500
    monkeypatch.setattr(kept_lines, "_KEPT_CHARS", 10_000)
    kept = filled(said(400, text="x" * 1000))
    assert kept.last(10_000)["first"] == 390


def test_what_came_too_fast_is_told_where_it_is_missing():
    kept = filled(said(100), said(1000, kept=50))
    answer = kept.before(1000, 80)
    assert answer["first"] == 70
    assert answer["lines"][30] == (100, None, 950)
    assert numbers(answer) == [*range(70, 101), *range(950, 1000)]
    late = filled(said(1000, kept=50))
    assert late.last(1000)["first"] == 950, "what was before it began is not missing"
    assert kept.before(950, 1)["lines"][-1] == (100, None, 950)


def test_torchruns_own_lines_come_where_nothing_else_explains_a_failure():
    quiet = filled(said(5, rank=-1))
    assert quiet.last(10) == {"first": 0, "lines": [], "total": 5}
    alone = replace(said(5, rank=-1), workers={}, at_s=60.0)
    telling = filled(said(5, rank=-1), alone)
    assert telling.shows_torchrun
    assert numbers(telling.last(10)) == [0, 1, 2, 3, 4]

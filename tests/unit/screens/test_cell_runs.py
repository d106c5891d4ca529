"""Runs that come one after the other in one cell share its output: a table that grows, and one view."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from distmagic.screens import board, cell_runs, notebook
from distmagic.state.model import RunState
from tests.builders.terms import on_terms
from tests.scenes import done, running


class FakeBoard:
    """Stands for the live view in a page."""

    has_page = True
    mime_view = None

    def __init__(self, view_id: str) -> None:
        self.view_id = view_id
        self.is_closed = False
        self.final: dict[str, str] = {}

    def show(self, state: RunState) -> None:
        pass

    def finish(self, state: RunState, html: str, text: str) -> None:
        self.final = {"html": html, "text": text}

    def requests(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Cell:
    """One cell of a notebook in a page: `outputs` by display ID, in order, each as it is now."""

    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    boards: list[FakeBoard] = field(default_factory=list)

    def display(self, data, *, raw, display_id, update) -> None:
        assert raw
        assert update is (display_id in self.outputs)
        self.outputs[display_id] = data

    def board(self, view_id: str) -> FakeBoard:
        self.boards.append(FakeBoard(view_id))
        return self.boards[-1]

    def begin(self, call: str, **options: bool) -> notebook.NotebookScreen:
        screen = notebook.NotebookScreen(self.board, **options)
        screen.show(on_terms(replace(running(), job=f"job-{call}"), call=call))
        return screen

    def finish(self, screen: notebook.NotebookScreen, call: str) -> None:
        screen.finish(on_terms(replace(done(), job=f"job-{call}"), call=call))


@pytest.fixture
def cell(monkeypatch) -> Cell:
    cell = Cell()
    monkeypatch.setattr("IPython.display.display", cell.display)
    monkeypatch.setattr(cell_runs, "_last", None)
    monkeypatch.setattr(cell_runs, "_execution", lambda: 3)
    monkeypatch.setattr(notebook, "_ended", type(notebook._ended)())
    return cell


@pytest.mark.promise("runs of a loop share one output with a row for each")
def test_output_of_a_loop(cell):
    for number in range(3):
        screen = cell.begin(f"f({number})")
        (output,) = cell.outputs.values()
        text = output["text/plain"]
        assert [f"f({one})  " in text for one in range(3)] == [
            one < number for one in range(3)
        ], "those that are over"
        assert text.count("min loss") == (number > 0)
        cell.finish(screen, f"f({number})")
    (output,) = cell.outputs.values()
    text, html = output["text/plain"], output["text/html"]
    assert [text.count(f"job-f({one})") for one in range(3)] == [1, 1, 1]
    assert "done 100%" in text
    assert html.count("<td><b class=") == 3
    assert cell.boards[-1].final == {"html": html, "text": text}


def test_a_run_that_fails_before_it_is_shown_has_a_row_like_the_others(cell):
    cell.finish(cell.begin("f(0)"), "f(0)")
    cell.finish(notebook.NotebookScreen(cell.board), "f(1)")
    cell.finish(cell.begin("f(2)"), "f(2)")
    (output,) = cell.outputs.values()
    text = output["text/plain"]
    assert [text.count(f"job-f({one})") for one in range(3)] == [1, 1, 1]
    assert [one.is_closed for one in cell.boards] == [True, True, False]


def test_there_is_one_live_view_at_a_time_in_one_place_of_the_page(cell):
    for number in range(3):
        cell.finish(cell.begin(f"f({number})"), f"f({number})")
    assert [one.is_closed for one in cell.boards] == [True, True, False]
    (view_id,) = {one.view_id for one in cell.boards}
    (output,) = cell.outputs.values()
    assert output["text/html"].count(f'<div class="dm-view-{view_id}">') == 1


def test_a_single_run_has_no_table(cell):
    cell.finish(cell.begin("f(0)"), "f(0)")
    (output,) = cell.outputs.values()
    assert "min loss" not in output["text/plain"]


def test_runs_at_the_same_time_have_outputs_of_their_own(cell):
    first = cell.begin("f(0)")
    second = cell.begin("f(1)")
    background = cell.begin("f(2)", in_background=True)
    for call, screen in enumerate((first, second, background)):
        cell.finish(screen, f"f({call})")
    assert len(cell.outputs) == 3
    assert not any(one.is_closed for one in cell.boards)


def test_another_cell_has_an_output_of_its_own(cell, monkeypatch):
    cell.finish(cell.begin("f(0)"), "f(0)")
    monkeypatch.setattr(cell_runs, "_execution", lambda: 4)
    cell.finish(cell.begin("f(1)"), "f(1)")
    assert len(cell.outputs) == 2


def test_a_cell_that_is_executed_again_closes_its_own_view_alone(cell, monkeypatch):
    """The page has cleared the output, and may be loaded anew before it has reported that."""
    for execution, (cell_id, closed) in enumerate(
        [("a", []), ("b", [False]), ("a", [False, False]), ("", [True, False, False])]
    ):
        monkeypatch.setattr(cell_runs, "_execution", lambda number=execution: number)
        monkeypatch.setattr(cell_runs.reloaded_pages, "cell_id", lambda: cell_id)  # noqa: B023
        assert [one.is_closed for one in cell.boards] == closed
        cell.finish(cell.begin("f(0)"), "f(0)")
    assert [one.is_closed for one in cell.boards] == [True, False, False, False]


def test_a_run_in_the_background_is_replaced_by_the_next_execution_of_its_cell(
    cell, monkeypatch
):
    monkeypatch.setattr(cell_runs.reloaded_pages, "cell_id", lambda: "a")
    for execution in range(2):
        monkeypatch.setattr(cell_runs, "_execution", lambda number=execution: number)
        cell.finish(cell.begin("f(0)", in_background=True), "f(0)")
        cell.finish(cell.begin("f(1)", in_background=True), "f(1)")
    assert [one.is_closed for one in cell.boards] == [True, True, False, False]


def test_outside_of_a_notebook_no_two_runs_are_of_one_cell():
    assert cell_runs._execution() is None
    assert cell_runs.begin() is not cell_runs.begin()


def test_a_view_may_take_the_place_of_a_closed_one(monkeypatch):
    monkeypatch.setattr(board.page_requests, "serve", lambda *_: None)
    shown = board.Board("v7", FakeView)
    assert shown.view_id == "v7"


class FakeView:
    shows_itself = False

    def __init__(self, view_id: str) -> None:
        assert view_id == "v7"

    def on_msg(self, _: object) -> None:
        pass

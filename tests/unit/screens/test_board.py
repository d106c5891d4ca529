"""The live view: what a page is sent and how often, what it asks for, and what is left when a run is over."""

from __future__ import annotations

import itertools
import json
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distmagic.render.screen import TypedLine
from distmagic.screens import board, notebook, page_requests, widget
from distmagic.state.model import OutputLine
from tests.scenes import done, ranks_1024, running, waiting, waits_for_a_line


class FakeView:
    """Stands for the widget: counts what it is sent. A page is there when it says hello."""

    shows_itself = False
    is_cleared = False
    model_id = "m1"

    def __init__(self, view_id: str = "v1") -> None:
        vars(self).update(view_id=view_id, sent=[], handlers=[], is_closed=False)
        vars(self)["layout"] = SimpleNamespace(close=lambda: None)

    def __setattr__(self, name: str, value: object) -> None:
        self.sent.append((name, value))
        vars(self)[name] = value

    def hold_sync(self):
        return nullcontext()

    def on_msg(self, handler) -> None:
        self.handlers.append(handler)

    def close(self) -> None:
        vars(self)["is_closed"] = True

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sent]


def said(total: int, kept: int = 400, text: str = "line {}", at_s: float = 30.0):
    lines = tuple(
        OutputLine(rank=i % 4, label=f"rank {i % 4} a", stream="stdout", text=text.format(i))
        for i in range(max(0, total - kept), total)
    )  # fmt: skip
    return replace(running(), lines=lines, lines_seen=total, at_s=at_s)


def shown_board() -> tuple[board.Board, FakeView]:
    views: list[FakeView] = []
    made = board.Board(
        make_view=lambda view_id: views.append(FakeView(view_id)) or views[0]
    )
    return made, views[0]


@pytest.mark.parametrize(("scene", "is_running"), [(waiting, False), (running, True)])
def test_a_page_can_detach_a_run_as_soon_as_its_ranks_run(scene, is_running):
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    shown.show(scene())
    assert view.run["is_running"] is is_running  # without it the button is hidden
    assert not view.run["is_over"]
    assert view.run["can_detach"]


def test_a_page_cannot_detach_ranks_that_stay():
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    state = running()
    shown.show(replace(state, terms=replace(state.terms, stays=True)))
    assert not view.run["can_detach"]


# ---- how often


@pytest.fixture
def drawn_at_once(monkeypatch):
    """Making a part takes no time, whatever the garbage collector does meanwhile."""
    monkeypatch.setattr(board.time, "thread_time", lambda: 0.0)


def test_a_pane_gives_only_what_changed(drawn_at_once):
    pane = board.Pane(1.0, 50_000)
    given = []
    for second in range(5):
        made = {"one": "same", "two": f"at {second}"}
        given.append(pane.offer(float(second), lambda made=made: made))
    assert given[0] == {"one": "same", "two": "at 0"}
    assert given[1:] == [{"two": f"at {second}"} for second in range(1, 5)]


def test_a_pane_asks_for_nothing_before_it_is_time(drawn_at_once):
    asked = []
    pane = board.Pane(1.0, 50_000)
    for tenth in range(100):
        pane.offer(tenth / 10, lambda: {"one": str(asked.append(1))})
    assert 9 <= len(asked) <= 10


@pytest.mark.parametrize(("took_s", "asked_in_ten_s"), [(0.0, 10), (0.03, 5), (9.0, 2)])
def test_a_pane_that_takes_long_to_make_is_made_less_often(
    took_s, asked_in_ten_s, monkeypatch
):
    asked, clock = [], itertools.count(step=took_s)
    monkeypatch.setattr(board.time, "thread_time", lambda: next(clock))
    pane = board.Pane(1.0, 50_000)
    for second in range(10):
        pane.offer(float(second), lambda: {"one": str(asked.append(1))})
    assert len(asked) == asked_in_ten_s


@pytest.mark.parametrize(("scene", "seconds"), [(running, 10), (ranks_1024, 4)])
def test_a_flood_is_sent_in_ten_messages_and_100_kb_a_second(
    scene, seconds, monkeypatch
):
    monkeypatch.setattr(board.time, "thread_time", lambda: 0.0)  # bytes alone count
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    state = scene()
    messages = 0
    for tenth in range(10 * seconds):
        before = len(view.sent)
        moved = {r: replace(w, step=w.step + tenth) for r, w in state.workers.items()}
        lines = said(tenth * 1000, text="x" * 300 + " {}").lines
        shown.show(
            replace(state, workers=moved, lines=lines, lines_seen=tenth * 1000, at_s=tenth / 10)
        )  # fmt: skip
        messages += len(view.sent) > before
    assert messages <= 10 * seconds
    size = sum(len(json.dumps(value)) for _, value in view.sent)
    assert size < seconds * 100_000 + 200_000, "and the first of each"
    assert view.names.count("log") >= seconds / 2
    assert view.names.count("head") >= seconds


# ---- pages


def test_nothing_is_sent_before_a_page_says_hello():
    shown, view = shown_board()
    shown.show(said(3))
    assert view.sent == []
    answer = page_requests.answered({"view": shown.view_id, "op": "hello"})
    assert [rank for _, rank, _ in answer["log"]["lines"]] == [0, 1, 2]
    shown.show(said(4))
    assert {"run", "head", "table", "charts", "pictures", "log"} <= set(view.names)
    assert view.run["job"] == running().job
    assert view.run["what"] == "4 ranks on gpu-a, gpu-b"


def test_a_page_may_say_hello_as_soon_as_it_knows_of_the_view():
    """That is while the view is being made: the page says it once, so nothing would ever be shown there."""

    def make_view(view_id: str) -> FakeView:
        assert page_requests.answered({"view": view_id, "op": "hello"}) == {}
        return FakeView(view_id)

    shown = board.Board(make_view=make_view)
    assert shown.has_page
    shown.show(said(3))
    assert "log" in shown._view.names


def test_lines_are_numbered_and_those_that_are_left_out_are_counted():
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    shown.show(said(10, at_s=1.0))
    shown.show(said(1010, at_s=40.0))
    first, last = (value for name, value in view.sent if name == "log")
    assert (first["first"], len(first["lines"]), first["total"]) == (0, 10, 10)
    first_sent = last["first"]
    assert 700 < first_sent < 900, "what there is room for"
    assert sum(len(html) for _, _, html in last["lines"]) <= 15_000
    assert (len(last["lines"]), last["total"]) == (1010 - first_sent, 1010)
    assert last["lines"][0][0] == first_sent
    assert f"line {first_sent}" in last["lines"][0][2]


def test_a_page_gets_a_thousand_lines_at_first_and_earlier_ones_when_it_asks():
    shown, view = shown_board()
    for total in range(0, 2401, 300):
        shown.show(said(total))
    first = page_requests.answered({"view": shown.view_id, "op": "hello"})["log"]
    assert (first["first"], first["total"], len(first["lines"])) == (1400, 2400, 1000)
    ask = {"view": shown.view_id, "op": "lines"}
    earlier = page_requests.answered({**ask, "before": 1400})
    assert (earlier["first"], len(earlier["lines"])) == (400, 1000)
    shown.finish(said(2400), "<p>", "text")
    assert page_requests.answered({**ask, "before": 400})["first"] == 0
    assert len(view.log["lines"]) == 1000
    with pytest.raises(ValueError, match="a live view can't 'lines'"):
        page_requests.answered(ask)


def test_what_is_asked_for_is_returned_once_and_in_order():
    shown, view = shown_board()
    for op in ("stacks", "stop"):
        assert page_requests.answered({"view": shown.view_id, "op": op}) == {}
    view.handlers[0](view, {"op": "detach"}, [])  # without a control channel
    assert shown.requests() == ("stacks", "stop", "detach")
    assert shown.requests() == ()


def test_what_is_typed_for_a_rank_is_handed_on():
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    shown.show(waits_for_a_line(running()))
    (prompt,) = view.prompts
    assert (prompt["rank"], prompt["prompt"], prompt["asks"]) == (1, 7, "(Pdb)")
    typed = {"rank": 1, "prompt": 7, "text": "p x"}
    content = {"view": shown.view_id, "op": "type", "typed": typed}
    assert page_requests.answered(content) == {}
    assert shown.requests() == (TypedLine(rank=1, prompt=7, text="p x"),)
    for wrong in (None, {}, {"rank": "x", "prompt": 7, "text": ""}):
        with pytest.raises((ValueError, KeyError)):
            page_requests.answered({**content, "typed": wrong})
    shown.show(replace(running(), at_s=90.0))
    assert view.prompts == []


@pytest.mark.parametrize("content", [{}, {"view": "gone", "op": "stop"}])
def test_a_request_for_no_view_is_an_error(content):
    with pytest.raises(ValueError, match="this view is gone"):
        page_requests.answered(content)


def test_a_request_always_gets_a_reply():
    sent = []
    session = SimpleNamespace(send=lambda *message: sent.append(message))
    shown, _ = shown_board()
    for op in ("hello", "dance"):
        parent = {"content": {"view": shown.view_id, "op": op}}
        page_requests._reply(SimpleNamespace(session=session), "stream", "id", parent)
    assert [content["status"] for _, _, content, _, _ in sent] == ["ok", "error"]
    assert sent[1][2]["evalue"] == "a live view can't 'dance'"


def test_a_view_that_no_page_shows_is_gone_with_its_run(monkeypatch):
    published = publishing(monkeypatch)
    shown, view = shown_board()
    screen = notebook.NotebookScreen(lambda view_id: shown)
    screen.show(running())
    screen.finish(done())
    assert view.is_closed
    assert view._esm == "", "a notebook that keeps widgets keeps no script of ours"
    assert "dm-view-" in published[1]["text/html"]
    assert "dm-view-" not in published[-1]["text/html"]


def test_a_view_that_a_page_shows_keeps_the_last_state_for_later_pages(monkeypatch):
    published = publishing(monkeypatch)
    monkeypatch.setattr(notebook, "_ended", type(notebook._ended)())
    views = []
    for _ in range(6):
        shown, view = shown_board()
        views.append(view)
        shown.answer({"op": "hello"})
        screen = notebook.NotebookScreen(lambda view_id, shown=shown: shown)
        screen.show(running())
        screen.finish(done())
    assert [view.is_closed for view in views] == [True, True, *[False] * 4]
    assert views[-1].final["html"] == published[-1]["text/html"]
    assert f"dm-view-{views[-1].view_id}" in published[-1]["text/html"]
    assert views[-1].run["is_over"] is True
    assert len(views[-1].log["lines"]) == len(done().lines)
    assert "done</span>" in views[-1].head


def test_the_first_thing_that_is_shown_waits_for_no_widget(monkeypatch):
    published = publishing(monkeypatch)
    published_before = []
    view_ids = []

    def make(view_id: str) -> board.Board:
        published_before.append(len(published))
        view_ids.append(view_id)
        return shown_board()[0]

    screen = notebook.NotebookScreen(make)
    screen.show(running())
    assert published_before == [1]
    assert "dm-view-" not in published[0]["text/html"]
    hidden_by_view = f'<div class="dm-before-{view_ids[0]}">'
    assert [hidden_by_view in one["text/html"] for one in published] == [True, False]
    assert "dm-view-" in published[1]["text/html"]


def publishing(monkeypatch) -> list[dict[str, str]]:
    """Have what is displayed kept in a list."""
    published: list[dict[str, str]] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: published.append(data)
    )
    return published


# ---- the script


def test_the_page_gets_one_script_of_all_modules():
    script = widget.script()
    assert "import " not in [line[:7] for line in script.splitlines()]
    assert script.count("export ") == 1
    assert script.count("export default {") == 1
    names = [line.split("(")[0] for line in script.splitlines()
             if line.startswith(("function ", "async function ", "class ", "const "))]  # fmt: skip
    assert len(names) == len(set(names)), "no two modules use one name"
    modules = {path.name for path in widget._PAGE.glob("*.js")}
    assert modules == set(widget._MODULES)


# ---- a view that nobody feeds any more


def test_a_view_of_a_run_that_was_let_go_on_has_no_buttons_and_takes_no_request():
    shown, view = shown_board()
    shown.answer({"op": "hello"})
    shown.show(running())
    assert view.run["is_over"] is False
    detached = replace(running(), detached_by="asked", seen_unix_s=1e9, at_s=40.0)
    shown.finish(detached, "<p>", "text")
    assert view.run["is_over"] is True, "its buttons are gone"
    assert re.search(r">detached</span>.*>\d\d:\d\d:\d\d · 4 ranks on gpu-a, gpu-b", view.head)  # fmt: skip
    assert " left" not in view.head + view.table
    for op in ("stop", "stacks", "detach"):
        with pytest.raises(ValueError, match="not fed any more"):
            shown.answer({"op": op})


def test_what_is_saved_beside_a_live_view_is_what_was_seen_last(monkeypatch):
    """Opened later without its kernel, it does not look as if the run went on."""
    published = publishing(monkeypatch)
    shown, _ = shown_board()
    screen = notebook.NotebookScreen(lambda _: shown)
    screen.show(running())
    assert ">running</span>" in published[-1]["text/html"], "nobody has a live view yet"
    shown.answer({"op": "hello"})
    screen.show(replace(running(), at_s=300.0))
    saved = published[-1]["text/html"]
    assert re.search(r">last seen</span>.*>\d\d:\d\d:\d\d · 4 ranks", saved)
    assert "s left" not in saved
    assert '<tr class="dm-running' not in saved
    screen.finish(done())
    assert ">done</span>" in published[-1]["text/html"]


def test_a_view_whose_output_was_cleared_is_brought_back_by_no_page():
    going_on, view = shown_board()
    going_on.answer({"op": "hello"})
    going_on.show(running())
    page_requests.answered({"view": going_on.view_id, "op": "cleared"})
    assert not view.is_closed, "the run goes on"
    going_on.show(running())
    assert view.is_cleared is True
    going_on.finish(done(), "<p>", "text")
    assert view.is_closed
    over, view = shown_board()
    over.answer({"op": "hello"})
    over.finish(done(), "<p>", "text")
    assert not view.is_closed, "a page that is loaded later shows it"
    over.answer({"op": "cleared"})
    assert view.is_closed
    over.close()  # as when newer ones come


def test_a_kernel_is_busy_while_the_cell_of_a_view_runs_whatever_a_page_asks(
    monkeypatch,
):
    """The kernel calls itself idle after each request of a page, and pages believe the last word."""
    monkeypatch.setattr(page_requests, "_views", {})
    sent = []
    loop = SimpleNamespace(call_later=lambda _, act, *args: act(*args))
    kernel = SimpleNamespace(
        session=SimpleNamespace(send=lambda _, kind, content, *more, parent=None: sent.append((kind, content, parent))),
        iopub_socket=None,
        control_thread=SimpleNamespace(io_loop=loop),
        get_parent=lambda channel: f"the cell, of {channel}",
    )  # fmt: skip
    shown, _ = shown_board()
    parent = {"content": {"view": shown.view_id, "op": "hello"}}

    def told() -> list[object]:
        sent.clear()
        page_requests._reply(kernel, "stream", "id", parent)
        return [message[1:] for message in sent if message[0] == "status"]

    assert told() == [], "no run has been shown yet"
    shown.show(running())
    assert told() == [({"execution_state": "busy"}, "the cell, of shell")]
    thread = threading.Thread(target=shown.show, args=(running(),))
    thread.start()
    thread.join()
    assert told() == [], "it goes on in the background"
    shown.show(running())
    shown.finish(done(), "<p>", "text")
    assert told() == []

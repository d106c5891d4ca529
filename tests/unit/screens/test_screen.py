"""Where a run is shown: what stays on a terminal, in a log and in a saved notebook, and how little is sent meanwhile."""

from __future__ import annotations

import io
import os
import re
import sys
from dataclasses import replace

import pytest

from distmagic import render
from distmagic.render.screen import TypedLine
from distmagic.screens import choose, log, notebook, steady, terminal, widget
from distmagic.state.fold import begin
from distmagic.state.model import OutputLine, RunState
from tests import REPOSITORY
from tests.builders.later import Later
from tests.lab.waiting import HANG_S, wait_until
from tests.scenes import done, failed, ranks_1024, running, starting, waits_for_a_line

nbclient, nbconvert, nbformat = Later("nbclient"), Later("nbconvert"), Later("nbformat")

ROOT = REPOSITORY


def grown(
    state: RunState,
    total: int,
    *,
    kept: int = 400,
    at_s: float = 30.0,
    text: str = "line {}",
) -> RunState:
    """Return `state` after `total` lines of output."""
    made = [
        OutputLine(
            rank=i % 4,
            label=f"rank {i % 4} gpu-a",
            stream="stdout",
            text=text.format(i),
        )
        for i in range(max(0, total - kept), total)
    ]
    return replace(state, lines=tuple(made), lines_seen=total, at_s=at_s)


class Terminal(io.StringIO):
    """Understands what the terminal's screen uses: newline, return, cursor up, clear to the end. No wrapping."""

    encoding = "utf-8"

    def look(self) -> list[str]:
        rows, at = [""], 0
        for token in re.findall(
            r"\x1b\[\d*[A-Za-z]|\n|\r|[^\x1b\n\r]+", self.getvalue()
        ):
            if token == "\n":
                at += 1
                rows += [""] * (at + 1 - len(rows))
            elif token.endswith("A") and token[0] == "\x1b":
                at -= int(token[2:-1])
            elif token == "\x1b[J":
                del rows[at + 1 :]
                rows[at] = ""
            elif token[0] not in "\x1b\r":
                rows[at] += token
        return rows


def terminal_screen(
    columns: int = 100, rows: int = 30
) -> tuple[terminal.TerminalScreen, Terminal]:
    stream = Terminal()
    return terminal.TerminalScreen(
        stream, lambda: os.terminal_size((columns, rows)), colours=False
    ), stream


# ---- terminal


def test_a_terminal_shows_lines_once_and_the_status_below():
    shown, stream = terminal_screen()
    for total in (0, 3, 3, 7):
        shown.show(grown(running(), total))
    rows = stream.look()
    assert [row for row in rows if row.startswith("[rank")] == [
        f"[rank {i % 4} gpu-a] line {i}" for i in range(7)
    ]
    assert rows[7].startswith("running 62%")
    assert len(rows) == 7 + 6


def test_the_final_table_takes_the_place_of_the_status():
    shown, stream = terminal_screen()
    shown.show(grown(running(), 2))
    shown.finish(grown(done(), 5))
    rows = stream.look()
    assert sum(row.startswith("[rank") for row in rows) == 5
    assert not any(row.startswith("running") for row in rows)
    assert rows[5].startswith("done 100%")


def test_nothing_is_written_where_nothing_changed():
    shown, stream = terminal_screen()
    shown.show(running())
    before = stream.getvalue()
    shown.show(running())
    assert stream.getvalue() == before


def test_lines_that_were_not_kept_are_counted():
    shown, stream = terminal_screen()
    shown.show(grown(running(), 10))
    shown.show(grown(running(), 1000))
    assert any("... 590 lines" in row for row in stream.look())
    assert sum(row.startswith("[rank") for row in stream.look()) == 410


@pytest.mark.parametrize(("columns", "rows"), [(24, 5), (40, 3), (200, 60)])
def test_the_status_fits_any_window(columns, rows):
    shown, stream = terminal_screen(columns, rows)
    shown.show(grown(ranks_1024(), 0))
    assert len(stream.look()) <= max(1, rows - 2)
    assert max(map(len, stream.look())) < columns


def test_a_window_made_narrower_is_cleared_whole():
    sizes = [os.terminal_size((100, 30))]
    stream = Terminal()
    shown = terminal.TerminalScreen(stream, lambda: sizes[-1], colours=False)
    shown.show(grown(running(), 0))
    sizes.append(os.terminal_size((50, 30)))
    shown.finish(grown(done(), 0))
    wrapped = sum(
        -(-len(line) // 50)
        for line in render.status(grown(running(), 0), width=99, height=10)
    )
    assert f"\x1b[{wrapped - 1}A" in stream.getvalue()


def test_colours_are_for_those_who_want_them():
    stream = Terminal()
    shown = terminal.TerminalScreen(
        stream, lambda: os.terminal_size((100, 30)), colours=True
    )
    shown.show(grown(running(), 1, text="\x1b[32mgreen\x1b[2J"))
    assert "\x1b[94m[rank 0 gpu-a]\x1b[0m \x1b[32mgreen\x1b[0m\n" in stream.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_can_be_written(encoding):
    raw = io.BytesIO()
    shown = log.LogScreen(io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    shown.show(grown(running(), 1, text="完成 \ud800 █"))
    shown.finish(grown(done(), 1))
    assert b"[rank 0 gpu-a]" in raw.getvalue()


# ---- log


def test_a_log_has_lines_events_and_now_and_then_a_word():
    stream = io.StringIO()
    shown = log.LogScreen(stream)
    shown.show(replace(starting(), at_s=0.1))
    for tenth in range(1, 700):
        shown.show(grown(running(), tenth // 100, at_s=tenth / 10))
    shown.finish(grown(done(), 7))
    rows = stream.getvalue().splitlines()
    assert rows[0].startswith("starting")
    assert sum(row.startswith("running 62%") for row in rows) == 3, (
        "the change, and one every 30 s"
    )
    assert sum(row.startswith("[rank") for row in rows) == 7
    assert "\x1b" not in stream.getvalue()
    assert "\ndone 100% · 4 ranks" in stream.getvalue()


def test_a_log_tells_a_failure_when_it_happens():
    stream = io.StringIO()
    shown = log.LogScreen(stream)
    shown.show(grown(running(), 0))
    shown.show(grown(failed(), 0))
    shown.show(grown(failed(), 0, at_s=31.0))
    assert stream.getvalue().count("raised ValueError") == 1


# ---- a screen that breaks


class Broken:
    """A screen that can do nothing."""

    shows = 0

    def show(self, state: RunState) -> None:
        self.shows += 1
        raise RuntimeError("no picture")

    finish = show


def test_a_broken_screen_does_not_end_the_run(capsys, golden):
    inner = Broken()
    shown = steady.SteadyScreen(inner)
    shown.show(running())
    shown.show(running())
    assert inner.shows == 1
    shown.finish(done())
    err = capsys.readouterr().err
    golden(err)


def test_a_stderr_that_is_broken_too_does_not_end_the_run(monkeypatch):
    """A kernel's stderr goes the same way as its display: one closed socket breaks both."""

    class Closed:
        encoding = "utf-8"

        def write(self, text: str) -> None:
            raise OSError("Socket operation on non-socket")

    own = io.StringIO()
    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(sys, "__stderr__", own)
    inner = Broken()
    shown = steady.SteadyScreen(inner)
    shown.show(running())
    shown.finish(done())
    assert inner.shows == 2
    assert "can't show the run: RuntimeError: no picture" in own.getvalue()
    assert "done 100%" in own.getvalue()
    monkeypatch.setattr(sys, "__stderr__", Closed())
    steady.SteadyScreen(inner).show(running())
    monkeypatch.setattr(sys, "__stderr__", None)
    steady.SteadyScreen(inner).show(running())


def test_an_interrupt_passes_through():
    class Interrupted(Broken):
        def show(self, state: RunState) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steady.SteadyScreen(Interrupted()).show(running())


# ---- lines that are typed for a rank


def test_a_terminal_asks_in_place_of_the_status_and_hands_one_line_on_a_prompt(
    monkeypatch,
):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        shown, stream = terminal_screen()
        assert shown.can_type()
        assert shown.requests() == ()
        os.write(ours, b"typed ahead\n")
        shown.show(running())
        assert shown.requests() == ()
        shown.show(waits_for_a_line(running()))
        assert stream.look()[-1].endswith("line 4: (Pdb) ")
        typed = TypedLine(rank=1, prompt=7, text="typed ahead")
        wait_until(lambda: shown.requests() == (typed,), "the line")
        os.write(ours, b"more\n")
        assert shown.requests() == (), "the prompt has its line"
        shown.show(waits_for_a_line(running(), prompt=8))
        assert stream.getvalue().count("line 4: (Pdb) ") == 2, "it asks anew"
        more = TypedLine(rank=1, prompt=8, text="more")
        wait_until(lambda: shown.requests() == (more,), "the next line")
        os.write(ours, b"\x04")  # Ctrl-D
        shown.show(waits_for_a_line(running(), prompt=9))
        end = TypedLine(rank=1, prompt=9, is_end=True)
        wait_until(lambda: shown.requests() == (end,), "the end")
    os.close(ours)


def test_where_no_terminal_is_nobody_can_type(monkeypatch):
    for stdin in (None, io.StringIO("line\n")):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert not terminal_screen()[0].can_type()
        assert not log.LogScreen(Terminal()).can_type()
    assert not log.QuietScreen().can_type()


def test_without_a_view_the_kernels_own_input_asks_once_a_prompt(monkeypatch, golden):
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    asked: list[str] = []
    answers = ["p x", EOFError()]

    def answer(question: str) -> str:
        asked.append(question)
        found = answers.pop(0)
        if isinstance(found, EOFError):
            raise found
        return found

    monkeypatch.setattr("builtins.input", answer)
    shown = notebook.NotebookScreen(make_board=no_board)
    shown.show(waits_for_a_line(running()))
    assert shown.requests() == (TypedLine(rank=1, prompt=7, text="p x"),)
    assert shown.requests() == ()
    shown.show(waits_for_a_line(running(), prompt=8))
    assert shown.requests() == (TypedLine(rank=1, prompt=8, is_end=True),)
    in_background = notebook.NotebookScreen(make_board=no_board, in_background=True)
    in_background.show(waits_for_a_line(running()))
    assert in_background.requests() == ()
    golden(*asked)


# ---- notebooks, executed without a browser

CELL = """
import sys
{before}
sys.path.insert(0, {root!r})
from dataclasses import replace
from distmagic.screens.choose import screen_for
from tests.scenes import done, failed, running, starting
shown = screen_for()
for i in range(20):
    shown.show(replace(running(), at_s=i / 5) if i else starting())
{after}
"""


def executed(before: str = "", after: str = "shown.finish(done())"):
    cell = nbformat.v4.new_code_cell(
        CELL.format(root=str(ROOT), before=before, after=after)
    )
    book = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(book, timeout=HANG_S, kernel_name="python3").execute()
    return book


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", ["", "sys.modules['anywidget'] = None"], ids=["widgets", "no-widgets"]
)
def test_an_executed_notebook_holds_one_output_that_needs_no_widget(before):
    book = executed(before)
    (output,) = book.cells[0].outputs
    assert set(output.data) == {"text/plain", "text/html"}
    assert output.data["text/plain"] == render.text(done())
    assert output.data["text/html"] == render.html(done())
    assert len(str(book.metadata.get("widgets", ""))) < 10_000
    page, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(book)
    assert "done</span>" in page
    assert page.count("dm-table") >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", ["", "sys.modules['anywidget'] = None"], ids=["widgets", "no-widgets"]
)
def test_a_notebook_saved_before_the_end_says_so(before):
    book = executed(before, after="")
    (output,) = book.cells[0].outputs
    assert output.data["text/plain"].endswith(notebook.WHILE_RUNNING)
    assert set(output.data) == {"text/plain", "text/html"}, "no widget is named"
    assert "gpu-a" in output.data["text/html"]


def test_widgets_that_can_not_be_made_are_done_without():
    book = executed("import anywidget; anywidget.AnyWidget = None")
    (output,) = book.cells[0].outputs
    assert set(output.data) == {"text/plain", "text/html"}


# ---- which one


class ZMQInteractiveShell:
    """Stands for the shell of a notebook's kernel."""


class OtherKernel(ZMQInteractiveShell):
    """Stands for one derived from it."""


@pytest.mark.parametrize("shell", [ZMQInteractiveShell(), OtherKernel()])
def test_a_kernel_gets_the_notebook(shell):
    assert isinstance(choose.screen_for(shell)._inner, notebook.NotebookScreen)


def test_a_pipe_gets_lines_and_a_terminal_the_status(monkeypatch):
    assert isinstance(choose.screen_for(object())._inner, log.LogScreen)
    stream = Terminal()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose.screen_for(object())._inner, terminal.TerminalScreen)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose.screen_for(object())._inner, log.LogScreen)


def test_a_run_that_lasts_tells_a_log_how_it_goes_and_how_it_ended(capsys, monkeypatch):
    """Under nbconvert and papermill: an output that is replaced is in no log."""
    published = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: published.append(data)
    )
    shown = notebook.NotebookScreen(make_board=no_board)
    for second in range(100):
        shown.show(replace(running(), at_s=float(second)))
    shown.finish(replace(failed(), at_s=101.0))
    assert published[0]["text/plain"].endswith(notebook.AT_FIRST)
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" ·")[0] for line in told] == [*["running 62%"] * 2, "failed 62%", "✗ rank 3 (gpu-b, local_rank 1) raised ValueError: Expected input batch_size (64) to match target batch_size (63)."]  # fmt: skip
    assert "took 1 min 41 s" in told[2]


def test_what_nodes_that_are_waited_for_are_at_is_shown_without_a_page_too(monkeypatch):
    """As while SkyPilot launches a cluster: before there is a job the time of a state stands still."""
    published = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: published.append(data)
    )
    shown = notebook.NotebookScreen(make_board=no_board)
    for words in ("it was asked to.", "two nodes", "two nodes", "almost up"):
        shown.show(begin("", ("node 1", "node 2"), notices=(words,)))
    texts = [data["text/plain"] for data in published]
    assert [text.count("two nodes") for text in texts] == [0, 0, 1, 0]
    assert "! almost up" in texts[-1]


def test_a_short_run_tells_a_log_nothing(capsys, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda data, **_: None)
    shown = notebook.NotebookScreen(make_board=no_board)
    for at_s in (*range(60), 59.9):
        shown.show(replace(running(), at_s=float(at_s)))
    shown.finish(done())
    assert capsys.readouterr().out == ""


def no_board(_: str):
    raise ImportError("no anywidget here")


def test_a_widget_is_of_the_module_that_makes_it():
    assert widget._kind().__module__ == widget.__name__

"""The live view as an instrument: what is pressed, searched and selected in it while the cell runs, and what outlives a page."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from playwright.sync_api import Locator, expect

from distmagic.request.flag_parser import flag_names
from tests.browser import NotebookPage
from tests.browser.live_runs import (
    CHARTS,
    DEBUGGED,
    IN_A_WIDGET,
    NEXT,
    RUN,
    WORDY,
    button,
    lines,
    live,
    opened,
)
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(900)]

BROKEN_RULES = """async () => {
  const { violations } = await axe.run('.dm-live', { resultTypes: ['violations'] });
  return violations.flatMap(({ id, nodes }) =>
    nodes.map(node => `${id}: ${node.html.slice(0, 160)}: ${node.any.map(one => one.message).join(' ')}`));
}"""


in_jupyterlab = pytest.mark.parametrize("notebooks", ["jupyterlab"], indirect=True)


def can_be_read_by_anybody(page: NotebookPage) -> None:
    """Look at the view with axe, light and dark, wide and narrow: nothing is cut off, either."""
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.page.evaluate(axe)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.use_theme(theme)
        for width in (600, 1400):
            page.page.set_viewport_size({"width": width, "height": 1000})
            found = page.page.evaluate(BROKEN_RULES)
            assert found == [], f"{theme}, {width} px"
            wide = live(page).evaluate("one => one.scrollWidth - one.clientWidth")
            assert wide <= 1, f"{theme}, {width} px"


def saved_html(page: NotebookPage) -> str:
    """Return the HTML of the run in the notebook's document."""
    outputs = page.page.evaluate(f"notebook.code({RUN}).model.outputs.toJSON()")
    (html,) = [
        output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})
    ]  # fmt: skip
    return "".join(html)


def tab_offers_what_is_ours(page: NotebookPage) -> None:
    """Type lines of ours into the last cell as a person does, and press Tab: nothing of Python's is offered."""
    editor = page.cell(NEXT).locator(".cm-content")
    offered = page.page.locator(".jp-Completer-item .jp-Completer-match")

    def begin(line: str) -> None:
        editor.click()
        page.page.keyboard.press("Control+A")
        page.page.keyboard.type(line)
        page.page.keyboard.press("Tab")

    begin("%distributed at")
    expect(offered).to_have_text(["attach"])
    begin("%%distributed --no")
    flags = sorted(name for name in flag_names() if name.startswith("--no"))
    wait_until(lambda: sorted(offered.all_inner_texts()) == flags, "flags alone")


@in_jupyterlab
def test_stop_asks_and_then_ends_the_run_while_its_cell_runs(tmp_path, notebooks):
    with opened(notebooks, tmp_path) as page:
        assert re.search(
            r"work\(END, lr=0\.1\) · job [\w-]+ · since \d\d:\d\d",
            live(page).locator(".dm-what").inner_text(),
        )
        can_be_read_by_anybody(page)
        button(page, "Stacks").click()
        page.wait_text(RUN, r"at \d+ s: .*ranks are in work|at \d+ s: rank")
        is_busy(page)
        button(page, "Stop").click()
        button(page, "Let it run").click()
        assert button(page, "Stop").is_visible()
        assert not page._ask("isDone", RUN), "it was only asked"
        button(page, "Stop").click()
        assert "Stop 2 ranks on localhost?" in live(page).inner_text()
        button(page, "Stop it").click()
        page.wait_done(RUN)
        text = page.wait_text(RUN, r"^stopped")
        assert "Cancelled: The run was interrupted" in text
        assert not button(page, "Stop").is_visible()
        assert not button(page, "Stacks").is_visible()
        wait_until(lambda: status_of_kernel(page) == "idle", "the kernel to be idle")
        page.run_cell(NEXT)
        page.wait_text(NEXT, "'stopped'")
        page.screenshot(tmp_path / "stopped.png")
        tab_offers_what_is_ours(page)
        assert page.console_errors == []
        # Nothing was saved: the view that comes back brings with it what the next save keeps.
        page.page.on("dialog", lambda dialog: dialog.accept())
        page.reload()
        page.wait_text(RUN, r"^stopped")
        assert "stopped</span>" in saved_html(page)


def status_of_kernel(page: NotebookPage) -> str:
    return page.page.evaluate("notebook.panel().sessionContext.session.kernel.status")


def is_busy(page: NotebookPage) -> None:
    """See what Jupyter says of its kernel: that it is busy, also after it has answered the page."""
    wait_until(lambda: status_of_kernel(page) == "busy", "the kernel to be busy")


ASK_DEBUGGER = """
notebook.panel().sessionContext.session.kernel.requestDebug(
    {seq: 0, type: 'request', command: 'debugInfo'}
).done
"""


def is_live_again(page: NotebookPage) -> None:
    """See a page that was loaded anew while the cell runs go on being live: it moves, and its buttons work."""
    wait_until(lambda: live(page).count() == 1, "the live view again")
    assert "2 ranks on localhost" in page.wait_text(RUN, r"^running")
    assert page.page.get_by_text("Loading widget").count() == 0
    assert page.page.locator(".dm-live").count() == 1
    step = live(page).locator(".dm-part-table td.dm-n").nth(1)
    before = step.inner_text()
    wait_until(lambda: step.inner_text() != before, "it to move")
    page.wait_text(RUN, r"step \d+ of rank 1")
    live(page).locator("figure.dm-curve", has_text="loss").wait_for()


def shows_earlier_lines(page: NotebookPage) -> None:
    """See that a page has the last thousand lines, and gets those before them, while the cell runs."""
    gap = live(page).locator(".dm-gap").first
    expect(gap).to_be_visible()
    assert "[rank 0 localhost] more 1.0" not in lines(page)
    gap.get_by_role("button", name="Show more").click()
    expect(gap).to_be_hidden()
    assert "[rank 0 localhost] more 1.0" in lines(page)


@in_jupyterlab
def test_a_page_that_is_loaded_anew_is_live_again_and_shows_how_it_ended(
    tmp_path, notebooks
):
    """Loaded while it runs, first not saved, then saved in the middle; and once more when it is over."""
    with opened(notebooks, tmp_path, WORDY) as page:
        page.page.on("dialog", lambda dialog: dialog.accept())
        page.wait_text(RUN, r"more 30\.39")
        page.reload(is_busy=True)
        is_live_again(page)
        is_busy(page)
        page.page.evaluate(ASK_DEBUGGER)
        is_busy(page)
        shows_earlier_lines(page)
        page.save()
        saved = saved_html(page)
        assert re.search(r"last 100 of \d,\d{3} lines .* %distributed logs [\w-]+ RANK", saved)  # fmt: skip
        assert 90 <= saved.count('class="dm-line') <= 100
        page.reload(is_busy=True)
        is_live_again(page)
        button(page, "Stacks").click()
        page.wait_text(RUN, r"at \d+ s: .*ranks are in work|at \d+ s: rank")
        (tmp_path / "end").touch()
        text = page.wait_text(RUN, r"^done")
        assert "saved during the run" not in text
        page.save()
        page.reload()
        assert "2 ranks on localhost" in page.wait_text(RUN, r"^done")
        assert page.page.get_by_text("model not found").count() == 0
        assert page.page.locator(".jupyter-widgets").count() == 0


@in_jupyterlab
def test_a_rank_that_waits_is_typed_to_also_in_a_page_that_is_loaded_anew(
    tmp_path, notebooks
):
    with opened(notebooks, tmp_path, DEBUGGED) as page:
        page.page.on("dialog", lambda dialog: dialog.accept())

        def line(rank: int) -> Locator:
            return live(page).get_by_label(f"a line for rank {rank}")

        where = r"rank 1 \(localhost, local_rank 1\) waits for a line at Cell In\[2\], line \d+"
        page.wait_text(RUN, where)
        line(1).fill("p total * 100")
        line(1).press("Enter")
        page.wait_text(RUN, r"tensor\(\[200\.\]\)")
        page.screenshot(tmp_path / "typed.png")
        page.reload(is_busy=True)
        page.wait_text(RUN, where)
        for text in ("total += 10", "c"):
            prompt = live(page).locator(".dm-prompt-line code")
            expect(prompt).to_have_text("(Pdb)")
            expect(line(1)).to_be_editable()
            line(1).press_sequentially(text)
            line(1).press("Enter")
            expect(line(1)).to_have_value("")
        page.wait_text(RUN, r"rank 0 .* waits for a line at Cell In\[2\], line \d+")
        line(0).fill("élan")
        line(0).press("Enter")
        page.wait_text(RUN, r"^done")
        assert live(page).locator(".dm-prompt").count() == 0
        assert page.console_errors == []
        write(page, NEXT, "dict(run.results)")
        assert "{0: (13.0, 'élan'), 1: (13.0, '')}" in answer(page, NEXT)


@in_jupyterlab
def test_a_debugger_opens_below_a_run_that_has_failed(tmp_path, notebooks):
    fails = """\
%%distributed --hosts localhost:2
def work(lr):
    losses = [0.5, lr * 3]
    return losses[2]
work(0.1)
"""
    with opened(notebooks, tmp_path, fails, begins=r"^failed") as page:
        page.wait_text(RUN, r"%distributed debug [\w-]+ opens pdb where rank \d failed")
        write(page, NEXT, "%distributed debug")
        page.run_cell(NEXT)
        typed = page.cell(NEXT).locator(".jp-Stdin-input")
        typed.fill("p [x * 10 for x in losses], lr")
        typed.press("Enter")
        page.wait_text(NEXT, r"\(\[5\.0, 3\.\d+\], 0\.1\)")
        page.screenshot(tmp_path / "debugged.png")
        expect(typed).to_have_count(1)
        typed.fill("q")
        typed.press("Enter")
        page.wait_done(NEXT)
        assert page.console_errors == []


def write(page: NotebookPage, index: int, source: str) -> None:
    page.page.evaluate("([i, text]) => notebook.code(i).model.sharedModel.setSource(text)", [index, source])  # fmt: skip


def answer(page: NotebookPage, index: int) -> str:
    page.run_cell(index)
    page.wait_done(index)
    return page.wait_text(index, r"\[")


@in_jupyterlab
def test_a_view_of_a_run_that_was_detached_offers_nothing_that_does_nothing(
    tmp_path, notebooks
):
    with opened(notebooks, tmp_path) as page:
        page.page.on("dialog", lambda dialog: dialog.accept())
        button(page, "Detach").click()
        page.wait_done(RUN)
        head = r"^detached\s+(\d+%\s+)?\d\d:\d\d:\d\d · 2 ranks on localhost"
        page.wait_text(RUN, head)
        for name in ("Stop", "Stacks", "Detach"):
            assert not button(page, name).is_visible(), "nobody follows it any more"
        assert " left" not in live(page).locator(".dm-head").inner_text()


@in_jupyterlab
def test_a_reload_brings_back_nothing_that_was_cleared_or_replaced(tmp_path, notebooks):
    """Run twice, then not at all: a page that is loaded anew has the last of these, and in the end nothing."""
    with opened(notebooks, tmp_path) as page:
        page.page.on("dialog", lambda dialog: dialog.accept())
        (tmp_path / "end").touch()
        page.wait_done(RUN)
        page.wait_text(RUN, r"^done")
        first = live(page).locator(".dm-job").inner_text()
        # A run that ends before a busy page has seen its view has none.
        (tmp_path / "end").unlink()
        page.run_cell(RUN)
        wait_until(
            lambda: (
                live(page).locator(".dm-job").all_inner_texts() not in ([], [first])
            ),
            "the other run",
        )
        (tmp_path / "end").touch()
        page.wait_done(RUN)
        wait_until(lambda: live(page).count() == 1, "one view")
        second = live(page).locator(".dm-job").inner_text()
        page.reload()
        page.wait_text(RUN, second)
        assert first not in page.shown(), "it was replaced"
        write(page, RUN, "print('something else')")
        page.run_cell(RUN)
        page.wait_text(RUN, "^something else")
        wait_until(lambda: live(page).count() == 0, "no view")
        closed = "from distmagic.screens import notebook\n[one.board._is_closed for one in notebook._ended]"
        write(page, NEXT, closed)
        wait_until(
            lambda: "False" not in answer(page, NEXT), "the kernel to have heard of it"
        )
        page.save()
        page.reload()
        page.run_cell(NEXT)
        page.wait_done(NEXT)
        assert page.cell(RUN).locator(".dm-live").count() == 0
        assert "2 ranks" not in page.shown(), "nothing comes back"


@in_jupyterlab
def test_when_the_kernel_ends_the_view_says_so_and_keeps_what_it_knew(
    tmp_path, notebooks
):
    with opened(notebooks, tmp_path) as page:
        live(page).locator("figure.dm-curve").wait_for()
        page.save()
        page.restart_kernel()
        text = page.wait_text(RUN, r"The kernel has ended: this is the last")
        assert "2 ranks on localhost" in text
        assert not button(page, "Stop").is_visible()
        head = r"^last seen \d\d:\d\d:\d\d"
        assert re.search(head, text)
        assert " left" not in live(page).locator(".dm-head").inner_text()
        page.reload()
        text = page.wait_text(RUN, head)
        assert " left" not in page.cell(RUN).locator(".dm-head").inner_text()
        assert "its outcome was not saved" in text
        assert "loss" in text, "with its curves"
        assert page.page.get_by_text("model not found").count() == 0


@in_jupyterlab
def test_what_a_cell_has_shown_stays_where_its_run_is_shown_inside_a_widget(
    tmp_path, notebooks
):
    begins = r"^printed before the run\s[^]*running"
    with opened(notebooks, tmp_path, IN_A_WIDGET, begins) as page:
        wait_until(lambda: len(lines(page)) > 10, "its output")
        text = page.wait_text(RUN, begins)
        assert "2 ranks on localhost" in text
        (tmp_path / "end").touch()
        page.wait_done(RUN)
        text = page.wait_text(RUN, "printed after it")
        assert re.search(r"^printed before the run\s[\s\S]*done", text)
        assert page.page.locator(".dm-live").count() == 1
        seen_in_widget = page.cell(RUN).locator(".widget-output")
        assert seen_in_widget.inner_text().strip() == "", "the view took over"


@in_jupyterlab
def test_curves_are_read_off_chosen_and_smoothed_beside_pictures_and_hardware(
    tmp_path, notebooks
):
    with opened(notebooks, tmp_path, source=CHARTS) as page:
        loss = live(page).locator("figure.dm-curve", has_text="loss")
        wait_until(lambda: "step 399" in loss.inner_text(), "the last step")
        labels = loss.locator(".dm-y span").all_inner_texts()
        assert (labels[0], labels[-1]) == ("100", "1"), "the spike is drawn"
        tops = loss.locator("path.dm-band").first.get_attribute("d")
        assert re.search(r"[ML]\d+,0[LZ]", tops), "up to the top"
        loss.locator(".dm-plot").hover(position={"x": 3, "y": 40})
        tip = loss.locator(".dm-tip").inner_text()
        assert re.search(r"^step \d+\nrank 0: 1\nrank 1: 2$", tip)
        decay = live(page).locator("figure.dm-curve", has_text="decay")
        assert decay.get_by_role("button").get_attribute("aria-pressed") == "true"
        middle = decay.locator(".dm-y span").nth(1).inner_text()
        assert float(middle) < 0.01, "its axis is logarithmic by itself"
        decay.get_by_role("button").click()
        assert float(decay.locator(".dm-y span").nth(1).inner_text()) > 0.4
        assert live(page).locator("figure.dm-curve").count() == 6
        chooser = live(page).locator(".dm-chooser summary")
        assert chooser.inner_text() == "6 of 8 metrics shown"
        chooser.click()
        live(page).get_by_label("eval/m5").check()
        assert live(page).locator("figure.dm-curve").count() == 7
        assert live(page).locator(".dm-group").all_inner_texts() == ["eval"]
        live(page).locator(".dm-part-table tr", has_text="localhost").nth(1).click()
        assert loss.locator(".dm-y span").all_inner_texts() == ["2"], "rank 1 alone"
        button(page, "rank 1").click()
        assert loss.locator(".dm-y span").first.inner_text() == "100"
        paths = loss.locator("path").count()
        live(page).get_by_label("smoothing").evaluate(
            "one => { one.value = 0.9; one.dispatchEvent(new Event('input')); }"
        )
        assert loss.locator("path").count() == paths + 2
        widths = (
            live(page)
            .locator("figure.dm-curve svg")
            .evaluate_all(
                "all => all.map(one => Math.round(one.getBoundingClientRect().width))"
            )
        )
        assert len(set(widths)) == 1, "they are aligned"
        assert page.console_errors == []
        sees_hardware_and_picture(page)
        (tmp_path / "end").touch()
        page.wait_text(RUN, r"^done")
        page.wait_done(RUN)
        page.save()
        page.reload()
        page.wait_text(RUN, r"^done")
        saved = page.cell(RUN).locator(".dm-picture img")
        assert saved.evaluate("one => one.naturalWidth") == 3


def sees_hardware_and_picture(page: NotebookPage) -> None:
    found = live(page).locator(".dm-hardware td")
    # Two looks at the host, some seconds apart, make the first of these numbers.
    expect(found.nth(1)).to_have_text(re.compile(r"^\d+%$"))
    host, _, memory, network, gpus = found.all_inner_texts()
    assert host == "localhost"
    assert re.fullmatch(r"[\d.]+/[\d.]+ GB", memory)
    assert re.fullmatch(r"[\d.]+ [kMG]B/s in, [\d.]+ [kMG]B/s out|-", network)
    assert gpus, "what nothing tells of is shown as such"
    shown = live(page).locator(".dm-picture img")
    assert shown.evaluate("one => [one.naturalWidth, one.naturalHeight]") == [3, 2]
    assert "rank 0 localhost" in live(page).locator(".dm-picture").inner_text()

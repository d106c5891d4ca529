"""The live view and what is saved of it, scene by scene: read, reached and used, light and dark, wide and narrow, at any size."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

import pytest
from nbformat import v4
from playwright.sync_api import expect

from distmagic import render
from distmagic.comparison.compare import Comparison
from distmagic.comparison.summary import summary
from distmagic.state.model import OutputLine, RunState
from tests import scenes
from tests.browser.plain_page import THEMES, WIDTHS
from tests.browser.screenshots import shown
from tests.builders.later import Later
from tests.builders.terms import on_terms

nbconvert = Later("nbconvert")

pytestmark = [pytest.mark.needs("browser"), pytest.mark.timeout(900)]

AXE = """async () => {
  const { violations } = await axe.run('main', { resultTypes: ['violations'] });
  return violations.flatMap(({ id, nodes }) =>
    nodes.map(node => `${id}: ${node.html.slice(0, 160)}: ${node.any.map(one => one.message).join(' ')}`));
}"""


@pytest.mark.parametrize("theme", THEMES)
def test_every_scene_can_be_read_and_reached_by_anybody(page, theme):
    """By axe: contrast, names of what can be pressed, the order of headings, tables."""
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.page.set_viewport_size({"width": 1400, "height": 900})
    for name in shown(page, theme):
        page.page.evaluate(axe)
        assert page.page.evaluate(AXE) == [], name


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_page(page, width):
    page.page.set_viewport_size({"width": width, "height": 900})
    for name in shown(page, "light"):
        wide = page.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, name
        if width == WIDTHS[0] and not name.startswith("saved"):
            box = page.page.locator(".dm-what").first.bounding_box()
            assert box["height"] < 30, f"{name}: on one line"


def test_the_note_of_a_failed_rank_is_whole_on_a_narrow_page(page):
    """It is below its row, not to the right of all columns, where it would be cut off."""
    page.page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    page.open("light")
    page.show(scenes.failed())
    note = page.page.locator("td.dm-note", has_text="ValueError")
    word = note.locator("xpath=..").locator("td.dm-state")
    place = """cell => {
      const text = document.createRange();
      text.selectNodeContents(cell);
      const { top, bottom, left, right } = text.getBoundingClientRect();
      return [top, bottom, left, right];
    }"""
    top, _, left, right = note.evaluate(place)
    assert left > 0
    assert right < WIDTHS[1]
    assert top >= word.evaluate(place)[1]


@pytest.mark.quick
def test_one_of_64_ranks_that_failed_is_on_top_and_all_are_folded(page):
    page.open("light")
    page.show(scenes.one_of_64_failed())
    rows = page.page.locator(".dm-part-table table").first.locator("tr")
    assert rows.nth(1).inner_text().startswith("failed and slowest: ")
    assert rows.nth(2).inner_text().split("\t")[0] == "22"
    assert "failed" in rows.nth(2).inner_text()
    fold = page.page.locator("details", has_text="all 64 ranks")
    assert fold.locator("tr").first.is_hidden()
    fold.locator("summary").click()
    assert fold.locator("tr").count() == 65


def test_standing_still_is_said_and_where_the_ranks_are_comes_by_itself(page):
    page.open("light")
    page.show(scenes.standing_still())
    head = page.page.locator(".dm-head")
    assert "no rank has advanced for 1 min" in head.inner_text()
    assert " left" not in head.inner_text()
    table = page.page.locator(".dm-part-table table").first
    assert table.locator("tr", has_text="no step for 1 min").count() == 4
    assert "step/s" not in table.inner_text()
    alert = page.page.locator(".dm-alert", has_text="all 4 ranks are in train")
    alert.locator("summary").click()
    assert "load()" in alert.locator("pre").inner_text()


def test_a_row_that_is_clicked_is_marked_and_shows_its_output_alone(page):
    page.open("light")
    state = scenes.running()
    lines = tuple(
        OutputLine(rank=rank, label=f"rank {rank}", stream="stdout", text=f"of {rank}")
        for rank in state.workers
    )
    page.show(replace(state, lines=lines, lines_seen=len(lines)))
    rows = page.page.locator(".dm-part-table tr:has(td b)")
    marked = page.page.locator("tr[data-chosen]")
    output = page.page.locator(".dm-log-lines")
    expect(marked).to_have_count(0)
    rows.nth(1).click()
    expect(marked.locator("td b")).to_have_text("1")
    expect(output.get_by_text("of 1")).to_be_visible()
    expect(output.get_by_text("of 0")).to_be_hidden()
    # Another state moves no mark to another rank.
    fewer = {rank: worker for rank, worker in state.workers.items() if rank}
    page.show(replace(state, workers=fewer, lines=lines, lines_seen=len(lines), at_s=90.0))  # fmt: skip
    expect(marked.locator("td b")).to_have_text("1")
    marked.click()
    expect(marked).to_have_count(0)
    expect(output.get_by_text("of 0")).to_be_visible()


def test_a_pointer_over_compared_curves_shows_the_values_of_each_run(page):
    first = summary(on_terms(scenes.done(), call="train(lr=0.1)"))
    second = summary(on_terms(scenes.done(), call="train(lr=0.2)"))
    page.open_saved(Comparison([first, second])._repr_html_(), "light")
    column = page.page.locator(".dm-at").nth(5)
    assert column.locator("rect").evaluate("one => getComputedStyle(one).opacity") == "0"  # fmt: skip
    column.hover()
    assert float(column.locator("rect").evaluate("one => getComputedStyle(one).opacity")) > 0.1  # fmt: skip
    words = column.locator("title").text_content()
    assert re.match(r"step \d+\ntrain\(lr=0\.1\): \S+\ntrain\(lr=0\.2\): \S+$", words)


def test_the_name_of_the_job_is_copied(page):
    page.open("light")
    page.show(scenes.running())
    copy = page.page.get_by_role("button", name="Copy ID")
    # The word stays for a second and a half: whoever looks now and then may come too late.
    copy.evaluate("""button => new MutationObserver(() => { window.saysCopied ||= button.textContent === 'Copied'; })
        .observe(button, { childList: true })""")
    copy.click()
    page.page.wait_for_function("window.saysCopied")
    field = page.page.get_by_label("show only lines with this text")
    field.focus()
    page.page.keyboard.press("Control+V")
    assert field.input_value() == scenes.running().job


def test_hostile_words_of_hosts_do_nothing_in_a_page(page):
    """In the page's own script, which takes HTML: as text of a host, a rank, a metric, a call, a failure and a job."""
    bad = "<img src=x onerror='window.harm=1'><script>window.harm=1</script>"
    page.open("light")
    state = scenes.failed()
    nodes = tuple(replace(node, host=bad, hostname=bad) for node in state.nodes)
    series = {rank: {bad: table["loss"]} for rank, table in state.series.items()}
    line = OutputLine(rank=0, label=bad, stream="stderr", text=bad)
    workers = {
        rank: replace(worker, host=bad, device=bad, metrics={bad: 1.0})
        for rank, worker in state.workers.items()
    }
    page.show(
        replace(on_terms(state, call=bad), job=bad, notices=(bad,), nodes=nodes, workers=workers, series=series, lines=(line,),
                lines_seen=9, open_lines={(1, 0, "stdout"): bad}, at_s=90.0)
    )  # fmt: skip
    plot = page.page.locator(".dm-plot").first
    plot.hover()
    assert "<img src=x" in page.page.locator(".dm-tip").first.locator("..").locator("..").inner_text()  # fmt: skip
    gap = page.page.locator(".dm-gap").first
    gap.get_by_role("button").click()
    expect(gap).to_contain_text(f"%distributed logs {bad} RANK")
    assert bad in page.page.locator(".dm-log-lines").inner_text()
    assert page.page.locator(".distmagic img, .distmagic script").count() == 0
    assert page.page.evaluate("window.harm") is None


def test_a_pointer_reads_every_rank_beside_one_that_is_no_number(page):
    """Rank 0 is NaN from step 8 on, rank 3 was slower than the others."""
    series = {}
    for rank, steps in enumerate((20, 20, 20, 12)):
        points = [(float(i), 1 / (i + 1) + rank) for i in range(steps)]
        if rank == 0:
            points = [(i, float("nan") if i >= 8 else value) for i, value in points]
        series[rank] = {"loss": scenes.curve(points)}
    state = replace(scenes.running(), series=series)
    page.page.set_viewport_size({"width": 1400, "height": 900})
    page.open("light")
    page.show(state)
    chart = page.page.locator("figure.dm-curve")
    words = "NaN or inf on rank 0 from step 8 to step 19"
    assert words in chart.locator("figcaption").inner_text()
    lines = chart.locator("path:is(.dm-c0, .dm-c1, .dm-c2, .dm-c3):not(.dm-band)")
    breaks = lines.evaluate_all("all => all.map(one => one.getAttribute('d').split('M').length - 1)")  # fmt: skip
    assert breaks == [1, 1, 1, 1]
    bracket = "M337,24V0H800v24"
    assert chart.locator("path.dm-nan").get_attribute("d") == bracket
    box = chart.locator(".dm-plot").bounding_box()
    chart.locator(".dm-plot").hover(position={"x": box["width"] - 1, "y": 40})
    tip = chart.locator(".dm-tip").inner_text().split("\n")
    assert tip == ["step 19", "rank 0: NaN or inf", "rank 1: 1.05", "rank 2: 2.05", "rank 3: -"]  # fmt: skip
    value = chart.locator(".dm-value").inner_text()
    assert value == "mean NaN"
    page.page.locator(".dm-legend").get_by_role("button", name="rank 3").click()
    assert chart.locator(".dm-value").inner_text() == "3.083", (
        "the last value of its own"
    )
    page.open_saved(render.html(state), "light")
    saved = page.page.locator("figure.dm-curve")
    assert words in saved.locator("figcaption").inner_text()
    assert saved.locator("figcaption > span").last.inner_text() == value
    assert saved.locator("path.dm-nan").get_attribute("d") == bracket


# ---- what is saved


def exported(state: RunState) -> str:
    """Return the page that nbconvert makes of a notebook with this run in it."""
    data = {"text/html": render.html(state), "text/plain": render.text(state)}
    output = v4.new_output("display_data", data=data)
    cell = v4.new_code_cell("%%distributed", outputs=[output])
    html, _ = nbconvert.HTMLExporter(template_name="lab").from_notebook_node(
        v4.new_notebook(cells=[cell])
    )
    return html


def test_a_page_of_nbconvert_shows_it_all_without_a_network(page):
    page.page.set_content(exported(scenes.failed()))
    run = page.page.locator(".distmagic")
    assert run.locator(".dm-phase").inner_text() == "failed"
    assert run.locator(".dm-table tr").count() >= 5
    assert run.locator("figure.dm-curve svg path").count() >= 4
    assert run.locator(".dm-spark").first.is_hidden()
    run.locator("summary").first.click()
    assert "Traceback" in run.locator("pre").first.inner_text()
    first = run.locator("figure.dm-curve svg").first.bounding_box()
    assert first["width"] > 200

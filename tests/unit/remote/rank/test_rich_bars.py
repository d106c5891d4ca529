"""Progress displays of rich on a rank: every test is a script of its own in a fresh Python, without a terminal."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.builders.shell import completed

rich = pytest.importorskip("rich")

BEFORE = """
import dataclasses, io, json, sys
from distmagic.remote.rank import report, rich_bars
POSTED = []
report.post_bar = POSTED.append
rich_bars.install()
assert "rich" not in sys.modules
"""
AFTER = """
json.dump([dataclasses.asdict(bar) for bar in POSTED], open(sys.argv[1], "w"))
"""


def posted(
    script: str, folder: Path, *, before: str = BEFORE
) -> tuple[list[dict], str]:
    """Run a script as a rank would; return the bars that it posted, and what it wrote."""
    found = [str(REPOSITORY), str(Path(rich.__file__).parents[1])]
    done = completed([sys.executable, "-c", before + textwrap.dedent(script) + AFTER, str(folder / "posted")], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(found)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "posted").read_text()), done.stdout


TRACK = """
from rich.progress import track
for _ in track(range(5), description="[red]epoch[/red]"):
    pass
"""


@pytest.mark.parametrize("when", ["after", "before"])
def test_a_tracked_loop_is_a_bar(when, tmp_path):
    is_before = when == "before"
    before = (
        "import rich.progress\n"
        + BEFORE.replace('assert "rich" not in sys.modules\n', "")
        if is_before
        else BEFORE
    )
    bars, out = posted(TRACK, tmp_path, before=before)
    assert (bars[0]["desc"], bars[0]["n"], bars[0]["total"], bars[0]["closed"]) == (
        "epoch",
        0,
        5,
        False,
    )
    assert (bars[-1]["n"], bars[-1]["total"], bars[-1]["closed"]) == (5, 5, True)
    assert {bar["id"] for bar in bars} == {bars[0]["id"]}
    assert out.count("epoch") == 1, "the last state goes to the log"


def test_tasks_have_their_own_bars_outermost_first(tmp_path):
    bars, _ = posted("""
        from rich.progress import Progress
        with Progress() as progress:
            outer = progress.add_task("outer", total=2)
            inner = progress.add_task("inner", total=3)
            for _ in range(2):
                progress.reset(inner)
                for _ in range(3):
                    progress.advance(inner)
                progress.update(outer, advance=1)
            progress.remove_task(inner)""", tmp_path)  # fmt: skip
    last = {bar["desc"]: bar for bar in bars}
    assert last["outer"]["id"] < last["inner"]["id"]
    assert (last["outer"]["n"], last["outer"]["closed"]) == (2, True)
    assert (last["inner"]["n"], last["inner"]["closed"]) == (3, True)


def test_a_display_that_is_drawn_by_hand_is_posted_at_every_refresh(tmp_path):
    bars, _ = posted("""
        from rich.progress import Progress
        progress = Progress(auto_refresh=False)
        progress.start()
        task = progress.add_task("steps", total=None)
        for n in range(3):
            progress.tasks[0].completed = n
            progress.refresh()
        progress.stop()""", tmp_path)  # fmt: skip
    assert {0.0, 1.0, 2.0} <= {bar["n"] for bar in bars}
    assert {bar["total"] for bar in bars} == {None}


def test_a_display_that_changes_very_often_is_not_posted_each_time(tmp_path):
    bars, _ = posted("""
        from rich.progress import Progress
        with Progress(auto_refresh=False) as progress:
            task = progress.add_task("steps", total=20_001)
            for _ in range(20_000):
                progress.advance(task)""", tmp_path)  # fmt: skip
    assert len(bars) < 1000
    assert bars[-1]["n"] == 20_000


@pytest.mark.parametrize(
    "display",
    ["Progress(disable=True)", "Progress(console=Console(file=io.StringIO()))"],
    ids=["disabled", "with a file of its own"],
)
def test_a_display_that_nobody_sees_stays_so(display, tmp_path):
    bars, _ = posted(f"""
        from rich.console import Console
        from rich.progress import Progress
        with {display} as progress:
            task = progress.add_task("steps", total=3)
            progress.advance(task, 3)""", tmp_path)  # fmt: skip
    assert bars == []


def test_a_task_that_is_not_visible_is_no_bar_until_it_is(tmp_path):
    bars, _ = posted("""
        from rich.progress import Progress
        with Progress() as progress:
            hidden = progress.add_task("hidden", total=3, visible=False)
            later = progress.add_task("later", total=3, visible=False)
            progress.update(later, visible=True, advance=1)
            progress.refresh()""", tmp_path)  # fmt: skip
    assert {bar["desc"] for bar in bars} == {"later"}
    assert bars[-1]["n"] == 1


def test_a_task_that_is_hidden_after_it_was_shown_is_over_until_it_is_shown_again(
    tmp_path,
):
    """As Lightning hides the bar of its sanity check, and that of each validation, of which it shows the next."""
    bars, _ = posted("""
        from rich.progress import Progress
        with Progress() as progress:
            check = progress.add_task("Sanity Checking", total=2)
            progress.update(check, advance=2)
            progress.refresh()
            progress.update(check, visible=False)
            progress.refresh()
            print("hidden")
            train = progress.add_task("Epoch 0", total=3)
            progress.update(train, advance=1)
            progress.update(check, visible=True, completed=1)
            progress.refresh()
            progress.update(check, visible=False)
            progress.refresh()""", tmp_path)  # fmt: skip
    checks = [bar["closed"] for bar in bars if bar["desc"] == "Sanity Checking"]
    changes = [now for before, now in zip([None, *checks], checks, strict=False) if now != before]  # fmt: skip
    assert changes == [False, True, False, True]
    assert checks.count(True) == 2, "at the end the bar of the rank is Epoch 0"
    assert {bar["closed"] for bar in bars if bar["desc"] == "Epoch 0" and bar is not bars[-1]} == {False}  # fmt: skip

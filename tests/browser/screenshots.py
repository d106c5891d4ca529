"""Make pictures of the live view's scenes, light and dark, wide and narrow: `python -m tests.browser.screenshots`."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from distmagic import render
from distmagic.comparison.compare import Comparison
from distmagic.comparison.summary import summary
from distmagic.state.model import RunState, ShownPicture
from tests import REPOSITORY, scenes
from tests.browser import chromium
from tests.browser.plain_page import THEMES, WIDTHS, PlainPage, plain_page
from tests.builders.terms import on_terms
from tests.system.components import reason_without

FOLDER = REPOSITORY / "build" / "screenshots"


def with_a_picture() -> RunState:
    """Return a run of which a rank has shown a figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3))
    figure.subplots().plot([3.0, 1.2, 0.7, 0.5])
    into = io.BytesIO()
    figure.savefig(into, format="png")
    png = base64.b64encode(into.getvalue()).decode()
    shown = ShownPicture(rank=0, host="gpu-a", step=120.0, png=png)
    return replace(scenes.on_gpus(), pictures=(shown,))


def a_sweep() -> list[RunState]:
    """Return the runs of a loop over learning rates, of which one has failed."""
    runs = []
    for number, lr in enumerate((0.3, 0.1, 0.03, 0.01, 0.003)):
        state = scenes.failed() if lr == 0.3 else scenes.done()
        series = {rank: scenes.series(rank + 2 * number) for rank in state.series}
        call = f"train(steps=500, lr={lr})"
        job = f"0612-10{15 + number}00-{number}f3a"
        state = on_terms(
            replace(state, series=series, job=job, world_size=4), call=call
        )
        runs.append(replace(state, at_s=27.4 + 14 * number))
    return runs


def the_sweep_goes_on() -> str:
    """Return what a cell shows whose loop is at its fourth run."""
    over = [summary(state) for state in a_sweep()[:3]]
    now = on_terms(scenes.running(), call="train(steps=500, lr=0.01)")
    return Comparison(over)._repr_html_() + render.html(now)


def much_output() -> RunState:
    """Return a run of which a page has only the last lines of output."""
    return replace(scenes.running(), lines=scenes.lines(400), lines_seen=12_345)


LIVE: dict[str, Callable[[], RunState]] = {
    "connecting": scenes.connecting,
    "running": scenes.running,
    "slow": scenes.one_slow,
    "standing-still": scenes.standing_still,
    "gpus-and-picture": with_a_picture,
    "failed": scenes.failed,
    "much-output": much_output,
    "one-of-64-failed": scenes.one_of_64_failed,
    "1024-ranks": scenes.ranks_1024,
}
SAVED: dict[str, Callable[[], str]] = {
    "saved-done": lambda: render.html(scenes.done()),
    "saved-failed": lambda: render.html(scenes.failed()),
    "saved-picture": lambda: render.html(scenes.over(with_a_picture())),
    "saved-comparison": lambda: Comparison(
        [summary(one) for one in a_sweep()]
    )._repr_html_(),
    "saved-loop": the_sweep_goes_on,
}


def shown(page: PlainPage, theme: str) -> Iterator[str]:
    """Show one scene after the other, and yield its name while it is to be seen."""
    for name, scene in LIVE.items():
        page.open(theme)
        page.show(
            on_terms(
                replace(scene(), began_unix_s=1.8e9), call="train(steps=500, lr=0.1)"
            )
        )
        yield name
    for name, html in SAVED.items():
        page.open_saved(html(), theme)
        yield name


def main() -> int:
    """Write all pictures, and return the exit code."""
    if reason := reason_without("browser"):
        print(f"no picture can be made here: {reason}", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with chromium() as browser, plain_page(browser) as page:
        for width in WIDTHS:
            page.page.set_viewport_size({"width": width, "height": 900})
            for theme in THEMES:
                for name in shown(page, theme):
                    path = FOLDER / f"{name}-{theme}-{width}.png"
                    page.page.screenshot(path=path, full_page=True)
    print(f"{len(list(FOLDER.glob('*.png')))} pictures are in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make pictures of the live view's scenes, light and dark, wide and narrow: `python -m tests.browser.screenshots`."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from matplotlib.figure import Figure

from distmagic import render
from distmagic.state.model import Picture, RunState
from tests import REPOSITORY, scenes
from tests.browser.plain_page import THEMES, WIDTHS, PlainPage, plain_page
from tests.system.components import reason_without

FOLDER = REPOSITORY / "build" / "screenshots"


def with_a_picture() -> RunState:
    """Return a run of which a rank has shown a figure of matplotlib."""
    figure = Figure(figsize=(5, 3))
    figure.subplots().plot([3.0, 1.2, 0.7, 0.5])
    into = io.BytesIO()
    figure.savefig(into, format="png")
    png = base64.b64encode(into.getvalue()).decode()
    shown = Picture(rank=0, host="gpu-a", step=120.0, png=png)
    return replace(scenes.on_gpus(), pictures=(shown,))


LIVE: dict[str, Callable[[], RunState]] = {
    "connecting": scenes.connecting,
    "running": scenes.running,
    "slow": scenes.one_slow,
    "gpus-and-picture": with_a_picture,
    "failed": scenes.failed,
    "one-of-64-failed": scenes.one_of_64_failed,
    "1024-ranks": scenes.ranks_1024,
}
SAVED: dict[str, Callable[[], RunState]] = {
    "saved-done": scenes.done,
    "saved-failed": scenes.failed,
    "saved-picture": lambda: scenes.over(with_a_picture()),
}


def shown(page: PlainPage, theme: str) -> Iterator[str]:
    """Show one scene after the other, and yield its name while it is to be seen."""
    for name, scene in LIVE.items():
        page.open(theme)
        page.show(replace(scene(), call="train(steps=500, lr=0.1)", began_unix_s=1.8e9))
        yield name
    for name, scene in SAVED.items():
        page.open_saved(render.html(scene()), theme)
        yield name


def main() -> int:
    """Write all pictures, and return the exit code."""
    if reason := reason_without("browser"):
        print(f"no picture can be made here: {reason}", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with plain_page() as page:
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

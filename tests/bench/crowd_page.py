"""A page that shows 1,024 ranks, each of which moves ten times a second: how long its frames take."""

from __future__ import annotations

import time
from dataclasses import replace

from tests import scenes
from tests.browser import chromium
from tests.browser.plain_page import PlainPage, plain_page

_SECONDS = 10.0
_HZ = 10
_COUNT_FRAMES = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const look = now => { frames_ms.push(now - last); last = now; requestAnimationFrame(look); };
  requestAnimationFrame(look);
}"""


def slow_frame_ms() -> float:
    """Return the 95th percentile of the time between two frames, in milliseconds."""
    with chromium() as browser, plain_page(browser) as page:
        page.page.set_viewport_size({"width": 1400, "height": 900})
        page.open("light")
        return frames_ms(page, _SECONDS)


def frames_ms(page: PlainPage, seconds: float) -> float:
    """Let a page show the ranks move for so long; return the same."""
    state = scenes.ranks_1024()
    page.show(replace(state, at_s=99.0))
    page.page.evaluate(_COUNT_FRAMES)
    began_s = time.monotonic()
    for beat in range(int(seconds * _HZ)):
        moved = {}
        for rank, worker in state.workers.items():
            moved[rank] = replace(worker, step=(worker.step or 0) + beat)
        page.show(replace(state, workers=moved, at_s=100 + beat / _HZ))
        late_s = time.monotonic() - began_s - (beat + 1) / _HZ
        if late_s < 0:
            page.page.wait_for_timeout(-1000 * late_s)
    frames: list[float] = sorted(page.page.evaluate("frames_ms"))
    return frames[int(0.95 * len(frames))]

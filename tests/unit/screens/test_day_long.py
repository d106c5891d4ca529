"""What a notebook keeps of a run that has lasted a day: all of it in less than a megabyte."""

from __future__ import annotations

import base64
import io
import json
import math

from PIL import Image

from distmagic.remote.wire import protocol as p
from distmagic.screens import notebook
from distmagic.state.events import Gone
from distmagic.state.fold import fold
from tests.builders.events import at, begun, ended, output

DAY_S = 86_400
REPORTS = 3000  # of each of four ranks, more than are kept; each with eight metrics
RANKS = {0: 0, 1: 0, 2: 1, 3: 1}  # with their nodes


def picture() -> str:
    into = io.BytesIO()
    Image.effect_noise((250, 250), 100).save(into, "PNG")
    return base64.b64encode(into.getvalue()).decode()


def test_a_day_is_less_than_a_megabyte(monkeypatch):
    published = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: published.append(data)
    )
    state = begun()
    text = "".join(f"{'many words ' * 40}of line {i}\n" for i in range(20))
    for number in range(REPORTS):
        at_s = DAY_S * number / REPORTS
        metrics = {
            f"train/metric{i}": math.sin(number * i) + 1 / (number + 1)
            for i in range(8)
        }
        row = p.MetricRow(at_s=at_s, step=float(number), metrics=metrics)
        state = fold(
            state,
            [
                at(
                    p.Progress(
                        rank=rank,
                        restart=0,
                        at_s=at_s,
                        step=float(number),
                        points=p.points_of([row]),
                    ),
                    node,
                    at_s,
                )
                for rank, node in RANKS.items()
            ],
        )
        if number % 50 == 0:
            state = fold(state, [output(text, rank, node) for rank, node in RANKS.items()])  # fmt: skip
    shown = picture()
    for step in range(5):
        one = p.Picture(rank=0, restart=0, data=shown, step=float(step))
        state = fold(state, [at(one)])
    assert len(state.pictures) >= 2
    ends = [ended(rank, node) for rank, node in RANKS.items()]
    state = fold(state, [*ends, at(Gone(), 0), at(Gone(), 1)])
    notebook.NotebookScreen().finish(state)
    *_, data = published
    size = len(json.dumps(data).encode())
    assert "took 23 h" in data["text/plain"] or "took 24 h" in data["text/plain"]
    assert data["text/html"].count("<svg") == 8
    assert size < 1_000_000
    assert size > 300_000, "pictures and all"

"""Pictures that ranks show: the last few, of a bounded size, in the view and in what is saved."""

from __future__ import annotations

import base64
import io

from PIL import Image

from distmagic import render
from distmagic.remote.wire import protocol as p
from distmagic.state.fold import fold
from tests.builders.events import at, begun


def picture(rank: int, node: int = 0, side: int = 2, **more: object):
    into = io.BytesIO()
    Image.effect_noise((side, side), 100).save(into, "PNG")
    data = base64.b64encode(into.getvalue()).decode()
    return at(p.Picture(rank=rank, restart=0, data=data, **more), node)


def test_the_last_four_are_kept():
    state = begun(*(picture(0, step=float(step)) for step in range(6)))
    assert [one.step for one in state.pictures] == [2.0, 3.0, 4.0, 5.0]
    html = render.html(state)
    assert html.count('<img src="data:image/png;base64,iVBOR') == 4
    assert "<figcaption>rank 0 gpu-a, step 5</figcaption>" in html
    assert 'alt="picture of rank 0 gpu-a, step 5"' in html


def test_large_ones_push_older_ones_out():
    state = begun(*(picture(0, side=400) for _ in range(6)))
    assert 1 <= len(state.pictures) < 4
    assert len(render.pictures(state)) < 402_000


def test_one_that_is_larger_than_all_may_be_is_not_kept():
    state = begun(picture(0, side=700))
    assert state.pictures == ()
    assert render.pictures(state) == ""


def test_a_host_shows_pictures_of_its_own_ranks_alone():
    state = begun(picture(0, node=1), picture(99))
    assert state.pictures == ()
    active = p.Picture(rank=0, restart=0, data=base64.b64encode(b"<svg/>").decode())
    assert fold(state, [at(active)]).pictures == ()

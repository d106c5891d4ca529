"""What a rank shows as a picture: figures, images and bytes, small enough for one packet, and never an error."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from distmagic import sanitize
from distmagic.remote.rank import report
from distmagic.remote.rank.show import show
from distmagic.remote.wire import protocol
from tests.builders.later import Later

Later("matplotlib")  # without it this module is skipped


class Agent:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[protocol.Message] = []
        self.refusals = 0
        self.longest = 0

    def send(self, packet: bytes) -> bool:
        if self.refusals:
            self.refusals -= 1
            return False
        self.longest = max(self.longest, len(packet))
        self.messages.append(protocol.decode(packet)[1])
        return True

    @property
    def images(self) -> list[Image.Image]:
        shown = []
        for message in self.messages:
            if isinstance(message, protocol.Picture):
                assert sanitize.png(message.data), "the notebook takes it"
                shown.append(Image.open(io.BytesIO(base64.b64decode(message.data))))
        return shown


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setattr(report._here, "complaints", set())
    made = Agent()
    report.begin(made.send, rank=3, restart=1)
    yield made
    report.end()


def noise(side: int) -> Image.Image:
    """Return an image that no format makes much smaller."""
    return Image.effect_noise((side, side), 100).convert("RGB")


def test_a_figure_of_matplotlib(agent):
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")

    figure = Figure(figsize=(4, 3))
    figure.subplots().plot([1, 3, 2])
    report.report(step=7)
    show(figure)
    (image,) = agent.images
    assert image.size == (400, 300)
    picture = agent.messages[-1]
    assert (picture.rank, picture.restart, picture.step) == (3, 1, 7.0)


def test_an_image_and_the_bytes_of_one(agent):
    into = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(into, "PNG")
    show(Image.new("L", (10, 20)))
    show(into.getvalue())
    assert [image.size for image in agent.images] == [(10, 20), (30, 20)]


def test_what_is_large_becomes_smaller_and_fits_a_packet(agent):
    show(noise(300))
    (image,) = agent.images
    assert 90 <= image.width < 300
    assert agent.longest < 1 << 18


def test_what_is_no_picture_or_stays_too_large_is_said_once(agent, capfd):
    show(b"x" * 200_000)
    show("a path, perhaps")
    show(3)
    assert agent.messages == []
    _, said = capfd.readouterr()
    assert said == "distmagic.show: a picture of 200,000 bytes is too large. It is left out; this is said once.\n"  # fmt: skip


def test_an_agent_that_takes_nothing_for_a_moment_gets_it_all_the_same(agent):
    agent.refusals = 5
    show(Image.new("L", (10, 20)))
    assert len(agent.images) == 1


def test_a_loop_that_shows_without_end_is_slowed_by_nothing(agent):
    for _ in range(200):
        show(Image.new("L", (1, 1)))
    assert 1 <= len(agent.images) <= 60


def test_outside_a_run_nothing_happens(capfd):
    report.end()
    show("nonsense")
    assert capfd.readouterr() == ("", "")

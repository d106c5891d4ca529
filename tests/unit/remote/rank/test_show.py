"""What a rank shows as a picture: figures, images and bytes, small enough for one packet, and never an error."""

from __future__ import annotations

import base64
import io
import os
import sys

import pytest
from PIL import Image

from distmagic import sanitize
from distmagic.remote.rank import report
from distmagic.remote.rank.show import show
from distmagic.remote.wire import protocol
from tests import REPOSITORY
from tests.builders.later import Later
from tests.builders.shell import completed

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


SHOWS = """
import base64, os, sys
from distmagic.remote.rank import report, show
from distmagic.remote.wire import protocol
if {is_warm}:
    import matplotlib.pyplot, IPython.display
kept = []
def send(packet):
    message = protocol.decode(packet)[1]
    if isinstance(message, protocol.Picture):
        kept.append(base64.b64decode(message.data))
    return True
report.begin(send, rank=0, restart=0)
show.install()
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"matplotlib", "IPython", "PIL"}}))
import matplotlib.pyplot as plt
from matplotlib.pyplot import show as show_all
from matplotlib.figure import Figure
from IPython.display import Image, display
def shown(): found = len(kept); kept.clear(); return found
plt.plot([1, 2]); plt.show(); print("plt.show", shown(), plt.get_fignums())
plt.plot([1, 2]); plt.figure(); show_all(block=False); print("two figures", shown())
plt.show(); print("none", shown())
plt.subplots()[0].show(); print("fig.show", shown()); plt.close("all")
figure = Figure(); figure.subplots().plot([1, 2])
display(figure); first = kept[0]; print("display", shown())
display(Image(data=first)); print("an image", shown())
display(figure, "a text", figure, {{"loss": 1}}); print("among others", shown())
import PIL.Image
display(PIL.Image.new("RGB", (4, 4))); print("of PIL", shown())
import builtins
builtins.display(figure, "without IPython", clear=True); print("a notebook's", shown())
class Frame:  # as one of pandas, whose columns are attributes
    __repr__ = lambda self: "a frame"
    def __getattr__(self, name):
        if name.startswith("_"): raise AttributeError(name)
        return [1.0, 2.0]
display(Frame()); print("of pandas", shown())
if os.fork() == 0:
    plt.plot([1]); plt.show(); display("of a child"); sys.stdout.flush(); os._exit(len(kept))
print("in a child", os.wait()[1])
show.keep_figures()
first, _ = plt.figure(), plt.figure(); plt.plot([1]); plt.show(); print("a program", shown(), plt.gcf().axes != [])
first.subplots(); plt.show(); plt.show(); print("what changed", shown(), plt.gcf() is not first)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [False, True])
def test_what_is_shown_as_in_a_cell_is_a_picture_of_the_rank(is_warm):
    Later("IPython")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg"}
    done = completed([sys.executable, "-u", "-W", "ignore", "-c", SHOWS.format(is_warm=is_warm)], env=env)  # fmt: skip
    first, *lines = done.stdout.splitlines()
    assert is_warm or first == "[]"
    assert lines == [
        "plt.show 1 []", "two figures 2", "none 0", "fig.show 1", "display 1", "an image 1", "a text {'loss': 1}",
        "among others 2", "of PIL 1", "without IPython", "a notebook's 1", "a frame", "of pandas 0", "of a child", "in a child 0",
        "a program 2 True", "what changed 1 True",
    ]  # fmt: skip


WITHOUT = """
from distmagic.remote.rank import show
show.install()
library = "try: import IPython\\nexcept ImportError: print('a library finds none')"
exec(compile(library, "/lib/site-packages/library.py", "exec"))
import IPython; IPython.display.display("at once")
from IPython import display as shown, get_ipython
from IPython.display import clear_output, display
import IPython.display
clear_output(wait=True); IPython.display.clear_output(); shown.display("as here"); display("the same")
print(get_ipython(), hasattr(shown, "__path__"))
for line in ("from IPython.display import HTML", "shown.HTML('<b>')", "from IPython import embed"):
    try: exec(line)
    except ImportError as error: print(type(error).__name__, error.name)
"""


def test_a_host_without_ipython_has_what_displays_for_the_users_code():
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = completed([sys.executable, "-S", "-c", WITHOUT], env=env)
    assert done.stdout.splitlines() == [
        "a library finds none", "at once", "as here", "the same", "None False",
        "ModuleNotFoundError IPython", "ModuleNotFoundError IPython", "ImportError IPython",
    ]  # fmt: skip


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


def test_what_is_no_picture_or_stays_too_large_is_said_once(agent, capfd, golden):
    show(b"x" * 200_000)
    show("a path, perhaps")
    show(3)
    assert agent.messages == []
    _, said = capfd.readouterr()
    golden(said)  # fmt: skip


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

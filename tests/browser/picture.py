"""Make the README's picture, for light and for dark pages: `python -m tests.browser.picture`.

A real JupyterLab runs the cell of the manual on two throw-away SSH hosts with two ranks each. When half of the steps
are done, its cell is photographed in both themes.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile

import nbformat
from PIL import Image

from tests import REPOSITORY
from tests.browser import NotebookPage, notebook_in_browser
from tests.lab.waiting import wait_until
from tests.system.components import reason_without

FOLDER = REPOSITORY / "assets"
THEMES = {"run-light.png": "JupyterLab Light", "run-dark.png": "JupyterLab Dark"}
STEPS = 4000  # so many that the run lasts for some ten seconds after its half
LOAD, PLAYGROUND, TRAIN = range(3)
# What belongs to JupyterLab and would only distract: the bars at the left, the buttons of the active cell.
STYLE = ".jp-Collapser, .jp-cell-toolbar { display: none !important; }"


def main() -> int:
    """Write both pictures, and return the exit code."""
    if reason := reason_without("browser"):
        print(f"no picture can be made here: {reason}", file=sys.stderr)
        return 1
    sources = ("%load_ext distmagic", "%distributed playground 2", training_cell())
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    with tempfile.TemporaryDirectory(prefix="picture-") as home:
        env = {"PYTHONPATH": str(REPOSITORY), "HOME": home}
        with notebook_in_browser(notebook, env, scale=2) as page:
            page.page.set_viewport_size({"width": 1080, "height": 1400})
            page.page.add_style_tag(content=STYLE)
            page.run_cell(LOAD)
            page.run_cell(PLAYGROUND)
            page.wait_text(PLAYGROUND, r"^node1, node2 ", 60)
            page.run_cell(TRAIN)
            wait_until(lambda: half_done(page), "the half of the run")
            FOLDER.mkdir(exist_ok=True)
            for name, theme in THEMES.items():
                page.use_theme(theme)
                small = smaller(page.cell(TRAIN).screenshot())
                (FOLDER / name).write_bytes(small)
                print(f"{FOLDER / name}: {len(small):,} bytes")
            assert half_done(page), "the run ended while it was photographed"
            page.interrupt()
            page.wait_done(TRAIN)
    return 0


def training_cell() -> str:
    """Return the cell of the manual's page "cell", for two ranks on each of the two hosts, with more steps."""
    text = (REPOSITORY / "distmagic" / "help" / "cell.md").read_text()
    (cell,) = re.findall(
        r"^```python\n(%%distributed.*?)\n```", text, re.MULTILINE | re.DOTALL
    )
    line, _, body = cell.partition("\n")
    return f"{line} --nproc-per-node 2\n" + re.sub(
        r"train\(steps=\d+\).*", f"train(steps={STEPS})", body
    )


def half_done(page: NotebookPage) -> bool:
    """Whether the run is live, and every bar of its table has passed its middle."""
    bars = (
        page.cell(TRAIN)
        .locator("table progress")
        .evaluate_all("all => all.map(bar => bar.position)")
    )
    return len(bars) == 4 and 0.5 <= min(bars) < 1.0


def smaller(png: bytes) -> bytes:
    """Return the same picture with a palette of 128 colours, a third of the bytes."""
    image = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(128, dither=Image.Dither.NONE)
    )
    into = io.BytesIO()
    image.save(into, "PNG", optimize=True)
    return into.getvalue()


if __name__ == "__main__":
    sys.exit(main())

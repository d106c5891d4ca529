"""Open a notebook in a real JupyterLab, or Notebook 7, in a real headless Chromium, and use it as a person does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from tests.lab.waiting import HANG_S, wait_until
from tests.system.components import COMPONENTS

_CHROMIUM = (
    "--no-sandbox",  # it refuses to run as root with one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
_SERVER = (
    "--no-browser",
    "--allow-root",
    "--ip=127.0.0.1",
    "--ServerApp.terminals_enabled=False",
    "--ServerApp.port_retries=0",
)
_EXPOSED = "expose_app_in_browser=True"  # as window.jupyterapp: what happens is asked of JupyterLab, not guessed
_OWN_FLAGS = {
    "jupyterlab": (
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        f"--LabApp.{_EXPOSED}",
    ),
    "notebook": (f"--JupyterNotebookApp.{_EXPOSED}",),
}
_PATHS = {
    # A workspace of its own: else the notebooks that were open before are opened, too.
    "jupyterlab": "lab/workspaces/{stem}/tree/{stem}.ipynb",
    "notebook": "notebooks/{stem}.ipynb",
}
_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    "@jupyterlab/notebook-extension:tracker": {
        "windowingMode": "none"
    },  # all cells are in the page, so they count
    "@jupyterlab/docmanager-extension:plugin": {
        "autosave": False
    },  # a test saves when it says so
    "@jupyterlab/completer-extension:manager": {
        "providerTimeout": 60_000
    },  # a kernel on a busy machine may need more than a second
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
}
# Playwright's own limits, 30 s and 5 s, are for machines that do nothing else.
expect.set_options(timeout=1000 * HANG_S)
_CELLS = ".jp-Notebook .jp-CodeCell"
_MOST_SHOWN = 3_000  # characters of a page in an error
_HELPERS = Path(__file__).with_name("harness.js").read_text(encoding="utf-8")


class NotebookPage:
    """The notebook as the person in front of the browser has it. Cells count from 0, code cells only.

    What is done goes through JupyterLab's own commands, and ends when JupyterLab says that it has: a key or a click
    would be lost while the page is busy. What is seen is read from the page.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(1000 * HANG_S)
        # Addresses that the page asked for and that are not on this machine.
        self.outside: list[str] = []
        self.console_errors: list[str] = []
        page.add_init_script(_HELPERS)
        page.on("request", self._note_request)
        page.on(
            "console",
            lambda message: (
                message.type == "error" and self.console_errors.append(message.text)
            ),
        )

    def _note_request(self, request: Request) -> None:
        if not re.match(
            r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:", request.url
        ):
            self.outside.append(request.url)

    def open(self, url: str) -> None:
        """Open the notebook and wait until its kernel is ready."""
        self.page.goto(url)
        self._wait("hasNotebook", HANG_S)
        self._ask("isReady")

    def reload(self, *, is_busy: bool = False) -> None:
        """Load the page anew, as somebody who opens the saved notebook; its kernel is not asked for anything.

        A kernel that `is_busy` with a cell is not waited for.
        """
        self.page.reload()
        self._wait("hasNotebook", HANG_S)
        if not is_busy:
            self._ask("isReady")

    def restart_kernel(self) -> None:
        """Restart the kernel; return when it is ready again."""
        self._ask("restartKernel")

    def shut_down(self) -> None:
        """End the kernel."""
        self.page.evaluate("notebook.panel().sessionContext.shutdown()")

    def cell(self, index: int) -> Locator:
        """Return a code cell, with its outputs."""
        return self.page.locator(_CELLS).nth(index)

    def run_cell(self, index: int) -> None:
        """Make a cell the active one and run it; return once the kernel has it."""
        self._ask("run", index)
        self._wait("hasStarted", HANG_S, index)

    def wait_done(self, index: int, timeout_s: float = HANG_S) -> None:
        """Wait until a cell that was started is done: the kernel has answered, and all outputs have come."""
        self._wait("isDone", timeout_s, index)

    def watch_bars(self, index: int) -> None:
        """Note from now on how far each bar of the cell's live table is, whenever that changes."""
        self._ask("watchBars", index)

    def wait_grown(self, index: int, count: int, timeout_s: float) -> None:
        """Wait until so many bars were seen in the cell that is running, and each of them grew while it was.

        Raises as soon as the cell is over without that. `watch_bars` comes before.
        """
        self._wait("haveGrown", timeout_s, index, count)

    def wait_text(self, index: int, pattern: str, timeout_s: float = HANG_S) -> str:
        """Wait until the outputs of a cell, widgets included, match a regular expression; return their text."""
        # As a person does; what is out of sight may not be drawn.
        self.cell(index).scroll_into_view_if_needed()
        try:
            self._wait("shows", timeout_s, index, pattern)
        except PlaywrightError as error:
            shown = self._ask("outputText", index)
            raise AssertionError(
                f"cell {index} doesn't show {pattern!r} within {timeout_s:g} s:\n{shown}"
            ) from error
        return self._ask("outputText", index)

    def interrupt(self) -> None:
        """Interrupt the kernel."""
        self._ask("interrupt")

    def use_theme(self, name: str) -> None:
        """Switch JupyterLab to a theme: "JupyterLab Dark"."""
        self._ask("useTheme", name)

    def save(self) -> None:
        """Save the notebook, and wait until the file is written and nothing is left to be saved."""
        self._ask("save")

    def _ask(self, name: str, *args: object) -> Any:
        """Call a function of harness.js; raises what it throws. No dialog may be in the way."""
        self._refuse_dialogs()
        return self.page.evaluate(f"args => notebook.{name}(...args)", list(args))

    def _wait(self, name: str, timeout_s: float, *args: object) -> None:
        """Wait until a function of harness.js returns true."""
        try:
            self.page.wait_for_function(
                f"args => notebook.{name}(...args)",
                arg=list(args),
                timeout=timeout_s * 1000,
            )
        except PlaywrightError:
            self._refuse_dialogs()
            raise

    def _refuse_dialogs(self) -> None:
        for dialog in self.page.locator(".jp-Dialog").all():
            raise AssertionError(f"a dialog is in the way: {dialog.inner_text()}")

    def shown(self) -> str:
        """Return the text of all outputs in the page, widgets included, a paragraph for each cell that has one."""
        texts = [
            output.inner_text()
            for output in self.page.locator(f"{_CELLS} .jp-Cell-outputArea").all()
        ]
        return "\n\n".join(text for text in texts if text.strip())

    def screenshot(self, path: Path) -> None:
        """Write what is to be seen to a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)


class Notebooks:
    """One server and one browser, in which notebooks are opened one after the other."""

    def __init__(
        self, program: str, folder: Path, base: str, browser: Browser, scale: int
    ) -> None:
        self._program = program
        self._folder = folder
        self._base = base
        self._browser = browser
        self._scale = scale
        self._count = 0

    @contextlib.contextmanager
    def opened(
        self, notebook: nbformat.NotebookNode, shots: Path | None = None
    ) -> Iterator[NotebookPage]:
        """Open `notebook` in a page and a kernel of its own, both of which end with the block.

        At the end asserts that the page asked for nothing outside this machine. Where a test fails, its error ends with
        the text that is to be seen, and a picture of it is written to `failed.png` in the folder `shots`.
        """
        notebook.metadata.setdefault(
            "kernelspec",
            {"name": "python3", "display_name": "Python 3", "language": "python"},
        )
        self._count += 1
        stem = f"notebook{self._count}"
        nbformat.write(notebook, self._folder / "work" / f"{stem}.ipynb")
        page = self._browser.new_page(
            viewport={"width": 1280, "height": 1000}, device_scale_factor=self._scale
        )
        try:
            shown = NotebookPage(page)
            path = _PATHS[self._program].format(stem=stem)
            shown.open(self._base.format(path=path))
            try:
                yield shown
            except BaseException as error:
                with contextlib.suppress(PlaywrightError):  # the page may be gone
                    text = shown.shown()[-_MOST_SHOWN:]
                    _add_note(error, f"the page shows:\n{text}")
                if shots is not None:
                    shown.screenshot(shots / "failed.png")
                raise
            shown.shut_down()
            assert not shown.outside, (
                f"the page asked for addresses outside this machine: {shown.outside}"
            )
        finally:
            page.close()


def _add_note(error: BaseException, note: str) -> None:
    """Have an error say more, where Python can: from 3.11 on."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


@contextlib.contextmanager
def notebooks_in_browser(
    browser: Browser,
    env: Mapping[str, str],
    program: str = "jupyterlab",
    scale: int = 1,
) -> Iterator[Notebooks]:
    """Start JupyterLab, or `program` "notebook", with `env` added to its kernels' environment.

    `scale` is how many pixels of a screenshot one pixel of the page has.
    """
    with tempfile.TemporaryDirectory(prefix="jupyterlab-") as made:
        folder = Path(made)
        (folder / "work").mkdir()
        with _server(program, folder, dict(env)) as base:
            yield Notebooks(program, folder, base, browser, scale)


@contextlib.contextmanager
def notebook_in_browser(
    notebook: nbformat.NotebookNode, env: Mapping[str, str] | None = None, *, shots: Path | None = None,
    program: str = "jupyterlab", scale: int = 1,
) -> Iterator[NotebookPage]:  # fmt: skip
    """Open `notebook` in a server and a browser of its own. See `notebooks_in_browser` and `Notebooks.opened`."""
    with (
        chromium() as browser,
        notebooks_in_browser(browser, env or {}, program, scale) as notebooks,
        notebooks.opened(notebook, shots) as page,
    ):
        yield page


@contextlib.contextmanager
def _server(program: str, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Run JupyterLab, or Notebook, with a home of its own; yield its address, with `{path}` in it."""
    settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(_SETTINGS))
    port, token = _free_port(), secrets.token_hex(16)
    places = {
        "HOME": "home",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "IPYTHONDIR": "ipython",
    }
    own = {name: str(folder / place) for name, place in places.items()} | {
        "JUPYTER_RUNTIME_DIR": str(folder / "run")
    }
    (folder / "home").mkdir()
    dynamic = (
        f"--port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder / 'work'}",
    )
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program, *_SERVER, *_OWN_FLAGS[program], *dynamic],
            env={**os.environ, **own, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}/{{path}}?token={token}"
        wait_until(
            lambda: _answers(process, folder, address.format(path="api/status")),
            "JupyterLab",
        )
        yield address
    finally:
        _stop(process)


def _answers(process: subprocess.Popen[bytes], folder: Path, url: str) -> bool:
    if process.poll() is not None:
        raise RuntimeError(
            f"JupyterLab ended at once:\n{(folder / 'server.log').read_text()}"
        )
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # the server shuts its kernels down
    try:
        process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium without a window. One at a time in a process: Playwright's loop is the thread's own."""
    with (
        tempfile.TemporaryDirectory(prefix="chromium-") as folder,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=COMPONENTS["browser"].path(),
            headless=True,
            timeout=1000 * HANG_S,
            args=[*_CHROMIUM, f"--crash-dumps-dir={folder}"],
        )
        try:
            yield browser
        finally:
            browser.close()

"""Open a notebook in a real JupyterLab in a real headless Chromium, and use it as a person does."""

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

import nbformat
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Locator, Page, Request, sync_playwright

from tests.lab.waiting import wait_until
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
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
)
_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # all cells are in the page, so they count
}
_CELLS = ".jp-Notebook .jp-CodeCell"
_IS_IDLE = "() => document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"


class NotebookPage:
    """The notebook as the person in front of the browser has it. Cells count from 0, code cells only."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.outside: list[str] = []  # addresses that the page asked for and that are not on this machine
        self.console_errors: list[str] = []
        page.on("request", self._note_request)
        page.on("console", lambda message: message.type == "error" and self.console_errors.append(message.text))

    def _note_request(self, request: Request) -> None:
        if not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:", request.url):
            self.outside.append(request.url)

    def open(self, url: str) -> None:
        """Open the notebook and wait until its kernel is ready."""
        self.page.goto(url)
        self.page.wait_for_selector(_CELLS, timeout=60_000)
        self.page.wait_for_function(_IS_IDLE, timeout=60_000)

    def reload(self) -> None:
        """Load the page anew, as somebody who opens the saved notebook; its kernel is not asked for anything."""
        self.page.reload()
        self.page.wait_for_selector(_CELLS, timeout=60_000)

    def cell(self, index: int) -> Locator:
        """Return a code cell, with its outputs."""
        return self.page.locator(_CELLS).nth(index)

    def run_cell(self, index: int) -> None:
        """Click into a cell and press Control-Enter; return once the kernel has taken it on.

        A key that is pressed before the notebook has the focus is lost, so both are done until the prompt changes.
        """
        before = self._prompt(index)
        for _ in range(20):
            for dialog in self.page.locator(".jp-Dialog").all():
                raise AssertionError(f"a dialog is in the way of cell {index}: {dialog.inner_text()}")
            self.cell(index).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(PlaywrightError):
                self.page.wait_for_function(
                    "([cells, i, before]) => document.querySelectorAll(cells)[i]"
                    ".querySelector('.jp-InputPrompt').textContent !== before",
                    arg=[_CELLS, index, before],
                    timeout=1500,
                )
                return
        raise AssertionError(f"cell {index} never started")

    def _prompt(self, index: int) -> str:
        return self.cell(index).locator(".jp-InputPrompt").first.text_content() or ""

    def wait_done(self, index: int, timeout_s: float = 60) -> None:
        """Wait until a cell that was started has its number, and is done."""
        self.page.wait_for_function(
            "([cells, i]) => /\\[\\d+\\]/.test(document.querySelectorAll(cells)[i]"
            ".querySelector('.jp-InputPrompt').textContent)",
            arg=[_CELLS, index],
            timeout=timeout_s * 1000,
        )

    def wait_text(self, index: int, pattern: str, timeout_s: float = 30) -> str:
        """Wait until the outputs of a cell, widgets included, match a regular expression; return their text."""
        outputs = self.cell(index).locator(".jp-Cell-outputWrapper")
        self.cell(index).scroll_into_view_if_needed()  # as a person does; what is out of sight may not be drawn
        try:
            self.page.wait_for_function(
                "([cells, i, pattern]) => new RegExp(pattern).test(document.querySelectorAll(cells)[i]"
                ".querySelector('.jp-Cell-outputWrapper')?.innerText || '')",
                arg=[_CELLS, index, pattern],
                timeout=timeout_s * 1000,
            )
        except PlaywrightError as error:
            shown = outputs.inner_text() if outputs.count() else ""
            raise AssertionError(f"cell {index} doesn't show {pattern!r} within {timeout_s:g} s:\n{shown}") from error
        return outputs.inner_text()

    def interrupt(self) -> None:
        """Click the button that interrupts the kernel."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()

    def save(self) -> None:
        """Save the notebook, and wait until it is saved."""
        self.page.keyboard.press("Escape")
        with self.page.expect_response(lambda r: r.request.method == "PUT" and "/api/contents/" in r.url):
            self.page.keyboard.press("Control+s")

    def screenshot(self, path: Path) -> None:
        """Write what is to be seen to a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)


@contextlib.contextmanager
def notebook_in_browser(
    notebook: nbformat.NotebookNode, env: Mapping[str, str] | None = None, *, shots: Path | None = None
) -> Iterator[NotebookPage]:
    """Open `notebook` in JupyterLab in Chromium, with `env` added to its kernel's environment.

    At the end asserts that the page asked for nothing outside this machine. What is to be seen when a test fails is
    written to `failed.png` in the folder `shots`.
    """
    with tempfile.TemporaryDirectory(prefix="jupyterlab-") as made:
        folder = Path(made)
        notebook.metadata.setdefault(
            "kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"}
        )
        (folder / "work").mkdir()
        nbformat.write(notebook, folder / "work" / "notebook.ipynb")
        with _server(folder, dict(env or {})) as base, _page(folder) as page:
            shown = NotebookPage(page)
            shown.open(base.format(path="lab/tree/notebook.ipynb"))
            try:
                yield shown
            except BaseException:
                if shots is not None:
                    shown.screenshot(shots / "failed.png")
                raise
            assert not shown.outside, f"the page asked for addresses outside this machine: {shown.outside}"


@contextlib.contextmanager
def _server(folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Run JupyterLab with a home of its own; yield its address, with `{path}` in it."""
    settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(_SETTINGS))
    port, token = _free_port(), secrets.token_hex(16)
    places = {"HOME": "home", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
    own = {name: str(folder / place) for name, place in places.items()} | {"JUPYTER_RUNTIME_DIR": str(folder / "run")}
    (folder / "home").mkdir()
    dynamic = (f"--port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'work'}")
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *_SERVER, *dynamic],
            env={**os.environ, **own, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}/{{path}}?token={token}"
        wait_until(lambda: _answers(process, folder, address.format(path="api/status")), "JupyterLab", timeout_s=90)
        yield address
    finally:
        _stop(process)


def _answers(process: subprocess.Popen[bytes], folder: Path, url: str) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"JupyterLab ended at once:\n{(folder / 'server.log').read_text()}")
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # the server shuts its kernels down
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _page(folder: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=COMPONENTS["browser"].path(),
            headless=True,
            args=[*_CHROMIUM, f"--crash-dumps-dir={folder}"],
        )
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 1000})
        finally:
            browser.close()

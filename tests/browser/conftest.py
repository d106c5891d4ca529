"""What the browser tests share: one Chromium for all, one JupyterLab, one Notebook 7 and one page without either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests import REPOSITORY
from tests.browser import Notebooks, chromium, notebooks_in_browser
from tests.browser.plain_page import PlainPage, plain_page


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Return a Chromium that ends with the last test of this folder: other tests need the thread's loop."""
    with chromium() as made:
        yield made


@pytest.fixture(scope="package")
def notebooks(
    browser: Browser,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Notebooks]:
    """Return the server of JupyterLab, or of Notebook 7 where a test asks for it by `indirect`."""
    env = {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path_factory.mktemp("home"))}
    program = getattr(request, "param", "jupyterlab")
    with notebooks_in_browser(browser, env, program) as made:
        yield made


@pytest.fixture(scope="package")
def page(browser: Browser) -> Iterator[PlainPage]:
    """Return a page with the live view alone."""
    with plain_page(browser) as made:
        yield made

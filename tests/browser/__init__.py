"""A real JupyterLab, or Notebook 7, in a real headless browser; and the live view alone in a plain page (plain_page.py)."""

from tests.browser.harness import (
    NotebookPage,
    Notebooks,
    chromium,
    notebook_in_browser,
    notebooks_in_browser,
)

__all__ = [
    "NotebookPage",
    "Notebooks",
    "chromium",
    "notebook_in_browser",
    "notebooks_in_browser",
]

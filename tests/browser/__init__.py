"""A real JupyterLab in a real headless browser."""

from tests.browser.harness import (
    NotebookPage,
    Notebooks,
    notebook_in_browser,
    notebooks_in_browser,
)

__all__ = ["NotebookPage", "Notebooks", "notebook_in_browser", "notebooks_in_browser"]

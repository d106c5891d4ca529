"""A real JupyterLab in a real headless browser."""

from tests.browser.harness import NotebookPage, notebook_in_browser

__all__ = ["NotebookPage", "notebook_in_browser"]

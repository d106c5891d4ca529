"""The site: Sphinx reads the pages that prepare.py has put together in build/docs/pages."""

from distmagic import __version__

project = "distmagic"
author = "distmagic"
copyright = "distmagic"  # noqa: A001 - Sphinx reads this name
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "index"
exclude_patterns = ["_build"]
language = "en"
smartquotes = False  # it makes a dash of two hyphens, also in flags

# Executed notebooks are put in place by prepare.py; nothing is executed and nothing is loaded from elsewhere.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_mime_priority_overrides = [
    ("html", "application/vnd.jupyter.widget-view+json", None),
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"

html_theme = "furo"
html_title = f"distmagic {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_extra_path = ["../build/docs/extra"]  # pictures that the README names
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "native"


def literal_blocks(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """Show an indented list of a docstring as it is written: it stands behind a line that ends with a colon."""
    for place in range(len(lines) - 2):
        following = lines[place + 2]
        if lines[place].endswith(":") and not lines[place + 1] and following[:1] == " ":
            lines[place] += ":"


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", literal_blocks)

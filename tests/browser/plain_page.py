"""The live view in a page without JupyterLab: the same script and looks, given states in place of a kernel's messages.

A scene is there in a moment, and as often as a test wants it, in JupyterLab's own light and dark colours.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from html import escape
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from distmagic.screens import widget
from distmagic.screens.board import Board
from distmagic.state.model import RunState

THEMES = ("light", "dark")
WIDTHS = (1400, 600)
_THEMES_AT = Path(sys.prefix) / "share" / "jupyter" / "lab" / "themes" / "@jupyterlab"
# What stands for a widget's model in the page: values that Python sets, and those who want to know.
_MODEL = """
const values = {}, listeners = {};
const model = {
  get: name => values[name],
  on: (event, act) => { (listeners[event] ??= []).push(act); },
  send: () => {},
  // Of what a page asks over the control channel, Python answers what it has to be told at once.
  widget_manager: { kernel: { sendControlMessage: ({ content }) => ({
    done: content.op === 'lines' ? python(content).then(answer => ({ content: answer })) : Promise.resolve({ content: {} }),
  }) } },
};
window.give = changes => {
  Object.assign(values, changes);
  for (const name of Object.keys(changes)) for (const act of listeners[`change:${name}`] ?? []) act();
};
window.begin = first => {
  give(first);
  view.initialize({ model });
  view.render({ model, el: document.getElementById('cell') });
};
"""
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>distmagic</title>
<style>{theme}</style>
<style>body {{ margin: 0; padding: 16px; color-scheme: {name}; background: var(--jp-layout-color0); color: var(--jp-ui-font-color1); }}</style>
</head><body data-jp-theme-light="{is_light}" data-jp-theme-name="JupyterLab"><main>"""


class FedView:
    """Stands for the widget: keeps what the board sets, until it is given to the page."""

    shows_itself = True
    model_id = "m1"

    def __init__(self, view_id: str) -> None:
        first = {"run": {}, "head": "", "table": "", "ranks": "", "pictures": ""}
        more = {
            "charts": [],
            "prompts": [],
            "log": {},
            "final": {},
            "looks": widget.looks(),
        }
        vars(self)["changes"] = {**first, **more, "view_id": view_id}
        vars(self)["changes"]["cell_id"] = ""

    def __setattr__(self, name: str, value: object) -> None:
        self.changes[name] = value

    def hold_sync(self) -> contextlib.AbstractContextManager[None]:
        return nullcontext()

    def on_msg(self, handler: object) -> None: ...

    def taken(self) -> dict[str, Any]:
        """Return what was set since the last call."""
        found = dict(self.changes)
        self.changes.clear()
        return found


class PlainPage:
    """A page with the live view of one run."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._board: Board | None = None
        page.expose_function("python", self._answer)

    def _answer(self, content: dict[str, Any]) -> dict[str, object]:
        assert self._board is not None
        return self._board.answer(content)

    def open(self, theme: str) -> None:
        """Load a page anew that shows nothing yet."""
        self._view: FedView | None = None
        self._board = Board(make_view=self._make_view)
        script = widget.script().replace("export default", "const view =")
        self._load(
            f'<div id="cell"></div><script>{{ {script}\n{_MODEL} }}</script>', theme
        )
        assert self._view is not None
        self.page.evaluate("first => begin(first)", self._view.taken())
        self._board.answer({"op": "hello"})

    def _make_view(self, view_id: str) -> FedView:
        self._view = FedView(view_id)
        return self._view

    def show(self, state: RunState) -> int:
        """Let the page show a state; return how many bytes it was given for that."""
        assert self._board is not None
        self._board.show(state)
        return self._give()

    def finish(self, state: RunState) -> None:
        """Let the page show the last state of a run, of which nothing can be asked any more."""
        assert self._board is not None
        self._board.finish(state, "<p>saved</p>", "saved")
        self._give()

    def _give(self) -> int:
        assert self._view is not None
        changes = self._view.taken()
        if changes:
            self.page.evaluate("changes => give(changes)", changes)
        return len(json.dumps(changes).encode()) if changes else 0

    def open_saved(self, html: str, theme: str) -> None:
        """Load a page that shows HTML as a notebook keeps it."""
        self._load(html, theme)

    def _load(self, body: str, theme: str) -> None:
        css = (_THEMES_AT / f"theme-{theme}-extension" / "index.css").read_text()
        is_light = json.dumps(theme == "light")
        head = _HEAD.format(theme=css, name=escape(theme), is_light=is_light)
        self.page.set_content(f"{head}{body}</main></body></html>")


@contextlib.contextmanager
def plain_page(browser: Browser) -> Iterator[PlainPage]:
    """Yield a page without a network. At the end asserts that its scripts made no error."""
    page = browser.new_page()
    page.context.set_offline(True)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        yield PlainPage(page)
    finally:
        page.close()
    assert errors == [], errors

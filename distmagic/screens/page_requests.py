"""Answers what a page asks while a cell runs: over the kernel's control channel, which a busy kernel reads too.

An ordinary message of a widget waits until the cell has ended. The control channel has a thread of its own, on which
`answer` is called: it may only look at what never changes, and put something into a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

_REQUEST, _REPLY = "distmagic_request", "distmagic_reply"


class Answering(Protocol):
    """What a page may ask for: a live view."""

    def answer(self, op: object, before: object = None) -> dict[str, object]:
        """Return the answer to a request. Raises `ValueError` for one that is not known.

        `before` is the number of a line, where earlier ones are asked for.
        """


_views: WeakValueDictionary[str, Answering] = WeakValueDictionary()


def serve(view_id: str, view: Answering) -> None:
    """Have the requests for this view answered, as long as it lives. Some kernels have no such channel."""
    from IPython import get_ipython

    _views[view_id] = view
    kernel = getattr(get_ipython(), "kernel", None)
    handlers = getattr(kernel, "control_handlers", None)
    if isinstance(handlers, dict):
        handlers[_REQUEST] = partial(_reply, kernel)


def _reply(kernel: Any, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
    """Answer one message. Without a reply the page would wait for ever, so there is one in any case."""
    try:
        content = {"status": "ok", **answered(parent["content"])}
    except Exception as error:  # noqa: BLE001  # whatever it is, the page is told
        content = {"status": "error", "evalue": str(error)}
    kernel.session.send(stream, _REPLY, content, parent, ident)


def answered(content: Mapping[str, Any]) -> dict[str, object]:
    """Return the answer of the view that is meant. Raises `ValueError` where it is gone."""
    view = _views.get(str(content.get("view")))
    if view is None:
        raise ValueError("this view is gone")
    return view.answer(content.get("op"), content.get("before"))

"""Answers a page's requests while a cell runs, over the kernel's control channel, which a busy
kernel also reads.

An ordinary widget message waits until the cell has ended. The control channel has its own thread,
which calls `answer`: it may only read immutable values, and add to a queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from distmagic.outcome import shown

_REQUEST, _REPLY = "distmagic_request", "distmagic_reply"
_LATER_S = 0.3


_views: WeakValueDictionary[str, Any] = WeakValueDictionary()


def serve(view_id: str, view: Any) -> None:
    """Answer requests for this view as long as it lives. Some kernels have no such channel."""
    _views[view_id] = view
    kernel = shown.kernel()
    handlers = getattr(kernel, "control_handlers", None)
    process = getattr(kernel, "process_control", None)
    if isinstance(handlers, dict) and process and _REQUEST not in handlers:
        handlers[_REQUEST] = partial(_reply, kernel)
        kernel.process_control = partial(_process, kernel, process)


async def _process(
    kernel: Any, process: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Let the kernel answer any request over this channel, then report it as busy again.

    The debugger of JupyterLab, Jupyter's server and the display of memory ask it, too.
    """
    await process(message)
    tell_busy(kernel)


def _reply(kernel: Any, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
    """Answer one message.

    There is always a reply, because otherwise the page would wait forever.
    """
    try:
        content = {"status": "ok", **answered(parent["content"])}
    except Exception as error:  # noqa: BLE001  # whatever it is, the page is told
        content = {"status": "error", "evalue": str(error)}
    kernel.session.send(stream, _REPLY, content, parent, ident)
    thread = getattr(kernel, "control_thread", None)
    if thread is not None:
        # A view asks before its run is first shown.
        thread.io_loop.call_later(_LATER_S, tell_busy, kernel)


def tell_busy(kernel: Any) -> None:
    """Report the kernel as busy if the cell of a view still runs.

    Otherwise pages would show it as idle, which was the last status: the kernel has answered a
    request of the page.
    """
    content = {"execution_state": "busy"}

    def tell() -> None:
        parent = kernel.get_parent("shell")
        kernel.session.send(kernel.iopub_socket, "status", content, parent=parent)

    for view in list(_views.values()):
        view.while_in_foreground(tell)


def answered(content: Mapping[str, Any]) -> dict[str, object]:
    """Return the answer of the addressed view. Raises `ValueError` if it is gone."""
    view = _views.get(str(content.get("view")))
    if view is None:
        raise ValueError("this view is gone")
    return dict(view.answer(content))

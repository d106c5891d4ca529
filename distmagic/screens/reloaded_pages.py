"""Restores the live view at once in a page that is reloaded while a cell runs.

Such a page asks the kernel for its info, its comms, and the state of all widgets. After some
seconds it asks for the state of each widget. A busy kernel reads these requests, but answers after
the cell. During a live view this module answers them, on the thread that reads them. That thread is
private to ipykernel, since version 7. If it is not as expected, nothing is changed, and such a page
shows its saved state until the cell has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from distmagic.outcome import shown
from distmagic.screens import page_requests

_QUESTIONS = ("kernel_info_request", "comm_info_request")
_COMM_MESSAGES = ("comm_open", "comm_msg", "comm_close")
_CONTROL = "jupyter.widget.control"  # the comm by which a page requests the state of all widgets
_STATE = "request_state"  # its request to each widget

_live: WeakSet[object] = WeakSet()  # views of running runs
_kernels: WeakSet[Any] = WeakSet()  # kernels whose messages are intercepted


def serve(view: object) -> None:
    """Answer reloaded pages, until `leave` is called for this view or it is gone."""
    _live.add(view)
    kernel = shown.kernel()
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None or kernel in _kernels:
        return
    pages = Pages(kernel)
    _kernels.add(kernel)
    on_recv = kernel.shell_stream.on_recv
    thread.io_loop.add_callback(on_recv, pages.receive, copy=False)


def leave(view: object) -> None:
    """Let the kernel answer reloaded pages again."""
    _live.discard(view)


def cell_id() -> str:
    """Return the front end's ID of the running cell, "" if it has none."""
    try:
        return str(shown.kernel().get_parent()["metadata"]["cellId"])
    except (AttributeError, KeyError, TypeError):
        return ""


class Pages:
    """Intercepts messages between the socket of a kernel's shell channel and the kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._pass_on = kernel.shell_channel_thread_main
        self._control_comms: set[str] = set()

    async def receive(self, frames: list[Any]) -> None:
        """Answer such a request during a live view; pass all other messages to the kernel."""
        try:
            request = self._request(frames) if _live else None
        except Exception:  # noqa: BLE001  # whatever is wrong with it, the kernel has its own words for that
            request = None
        if request is None:
            await self._pass_on(frames)
        else:
            await self._answer(*request)

    def _request(self, frames: list[Any]) -> tuple[Any, Mapping[str, Any]] | None:
        """Return sender and message of a request to answer; None for all others, whose content is
        not read.
        """
        session = self._kernel.session
        ident, parts = session.feed_identities(frames, copy=False)
        head = session.deserialize(parts, content=False, copy=False)
        kind = head["header"]["msg_type"]
        if kind not in _QUESTIONS:
            if kind not in _COMM_MESSAGES:
                return None
            content = session.unpack(head["content"])
            if content.get("target_name") == _CONTROL:
                self._control_comms.add(content["comm_id"])
            is_control = content.get("comm_id") in self._control_comms
            if not is_control and content.get("data", {}).get("method") != _STATE:
                return None
        return ident, session.deserialize(parts, copy=False)

    async def _answer(self, ident: Any, message: Mapping[str, Any]) -> None:
        kernel = self._kernel
        handler = kernel.shell_handlers[message["header"]["msg_type"]]
        self._tell("busy", message)
        try:
            done = handler(kernel.shell_stream, ident, message)
            if inspect.isawaitable(done):
                await done
        except Exception:
            kernel.log.exception("distmagic can't answer a page that was reloaded")
        finally:
            self._tell("idle", message)
            page_requests.tell_busy(kernel)

    def _tell(self, status: str, message: Mapping[str, Any]) -> None:
        """Send the kernel status before and after the answer: a page waits for both."""
        kernel = self._kernel
        content = {"execution_state": status}
        kernel.session.send(kernel.iopub_socket, "status", content, parent=message)

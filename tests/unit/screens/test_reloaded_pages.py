"""What a page that is loaded anew asks a busy kernel is answered at once; all else goes its usual way."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import zmq
from jupyter_client.session import Session

from distmagic.screens import page_requests, reloaded_pages

OPEN = {"comm_id": "c1", "target_name": "jupyter.widget.control", "data": {}}
ASK = {"comm_id": "c1", "data": {"method": "request_states"}}


class Kernel:
    """The parts of a kernel that are used: a session that signs, and handlers that are noted."""

    def __init__(self) -> None:
        self.session = Session(key=b"key")
        self.sent: list[tuple[str, dict]] = []
        self.session.send = self.note
        self.iopub_socket = self.shell_stream = None
        self.log = logging.getLogger("kernel")
        self.get_parent = lambda channel: {"header": channel}
        self.passed_on: list[list[zmq.Frame]] = []
        self.handled: list[tuple[str, dict]] = []
        self.shell_handlers = {
            "kernel_info_request": self.answer_later,
            "comm_info_request": self.answer_later,
            "comm_open": self.answer,
            "comm_msg": self.answer,
        }

    def note(self, _: object, kind: str, content: dict, **more: object) -> None:
        self.sent.append((kind, content))

    def answer(self, _: object, ident: list[bytes], message: dict) -> None:
        assert ident == [b"page"]
        self.handled.append((message["header"]["msg_type"], message["content"]))

    async def answer_later(self, *args: object) -> None:
        self.answer(*args)

    async def shell_channel_thread_main(self, frames: list[zmq.Frame]) -> None:
        self.passed_on.append(frames)

    def frames(self, kind: str, content: dict | None = None) -> list[zmq.Frame]:
        message = self.session.msg(kind, content or {})
        return [zmq.Frame(one) for one in self.session.serialize(message, b"page")]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.handled]


class View:
    """A live view, of a run that its cell waits for."""

    def while_in_foreground(self, act) -> None:
        act()


def test_a_kernel_is_busy_again_after_any_request_over_the_control_channel(monkeypatch):
    """JupyterLab's debugger and Jupyter's server ask, too, and ipykernel then reports itself idle."""
    kernel, view = Kernel(), View()

    async def process(message: str) -> None:
        kernel.sent.append(("idle after", message))

    kernel.control_handlers, kernel.process_control = {}, process
    monkeypatch.setattr(page_requests.shown, "kernel", lambda: kernel)
    page_requests.serve("v1", view)
    page_requests.serve("v2", SimpleNamespace(while_in_foreground=lambda _: None))
    asyncio.run(kernel.process_control("debug_request"))
    busy = ("status", {"execution_state": "busy"})
    assert kernel.sent == [("idle after", "debug_request"), busy]
    kernel.sent.clear()
    page_requests._views.clear()
    asyncio.run(kernel.process_control("usage_request"))
    assert kernel.sent == [("idle after", "usage_request")]


@pytest.fixture(autouse=True)
def no_other_views(monkeypatch):
    monkeypatch.setattr(reloaded_pages, "_live", WeakSet())
    monkeypatch.setattr(page_requests, "_views", {})


@pytest.fixture
def view():
    made = View()
    reloaded_pages._live.add(made)
    yield made
    reloaded_pages.leave(made)


def received(kernel: Kernel, *messages: tuple[str, dict]) -> None:
    pages = reloaded_pages.Pages(kernel)
    for kind, content in messages:
        asyncio.run(pages.receive(kernel.frames(kind, content)))


def test_what_a_loaded_page_asks_is_answered_at_once(view):
    kernel = Kernel()
    received(kernel, ("kernel_info_request", {}), ("comm_info_request", {}), ("comm_open", OPEN), ("comm_msg", ASK))  # fmt: skip
    assert kernel.kinds == ["kernel_info_request", "comm_info_request", "comm_open", "comm_msg"]  # fmt: skip
    assert kernel.handled[3][1] == ASK
    assert kernel.passed_on == []
    states = [content["execution_state"] for _, content in kernel.sent]
    assert states == ["busy", "idle"] * 4


def test_a_kernel_whose_cell_runs_is_busy_after_such_an_answer(view):
    kernel = Kernel()
    page_requests._views["v1"] = view
    received(kernel, ("kernel_info_request", {}))
    states = [content["execution_state"] for _, content in kernel.sent]
    assert states == ["busy", "idle", "busy"]


def test_a_page_that_has_lost_patience_asks_each_widget_for_its_state(view):
    kernel = Kernel()
    asks = {"comm_id": "of a widget", "data": {"method": "request_state"}}
    received(kernel, ("comm_msg", asks))
    assert kernel.handled[0][1] == asks
    assert kernel.passed_on == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("execute_request", {"code": "1"}),
        ("history_request", {}),
        ("comm_msg", {"comm_id": "somebody else's", "data": {}}),
        ("comm_open", {"comm_id": "c2", "target_name": "jupyter.widget", "data": {}}),
    ],
)
def test_all_else_goes_its_usual_way_unread(view, kind, content):
    kernel = Kernel()
    frames = kernel.frames(kind, content)
    asyncio.run(reloaded_pages.Pages(kernel).receive(frames))
    assert kernel.passed_on == [frames]
    assert kernel.handled == []
    _, parts = kernel.session.feed_identities(frames, copy=False)
    kernel.session.deserialize(parts, copy=False)  # raises for what was read before


def test_without_a_live_view_nothing_is_answered_here():
    kernel = Kernel()
    received(kernel, ("kernel_info_request", {}))
    assert kernel.handled == []
    assert len(kernel.passed_on) == 1


def test_a_message_with_a_wrong_signature_is_the_kernels(view):
    kernel = Kernel()
    frames = kernel.frames("kernel_info_request")
    other = Kernel()
    other.session.key = b"another"
    asyncio.run(reloaded_pages.Pages(other).receive(frames))
    assert other.handled == []
    assert other.passed_on == [frames]


def test_an_error_of_the_kernel_is_logged_and_the_page_does_not_wait(view, monkeypatch):
    logged = []
    monkeypatch.setattr(
        logging.Logger, "handle", lambda _, record: logged.append(record.getMessage())
    )
    kernel = Kernel()
    kernel.shell_handlers.clear()
    kernel.shell_handlers["kernel_info_request"] = lambda *_: 1 / 0
    received(kernel, ("kernel_info_request", {}))
    assert len(logged) == 1
    assert "can't answer a page" in logged[0]
    assert kernel.sent[-1][1] == {"execution_state": "idle"}


def test_a_kernel_that_has_no_such_thread_is_left_alone(monkeypatch):
    kernel = SimpleNamespace()
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
    made = View()
    reloaded_pages.serve(made)
    assert reloaded_pages.cell_id() == ""
    reloaded_pages.leave(made)


def test_the_cell_is_known_by_the_front_ends_own_name(monkeypatch):
    parent = {"metadata": {"cellId": "a1b2"}}
    kernel = SimpleNamespace(get_parent=lambda: parent)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
    assert reloaded_pages.cell_id() == "a1b2"

"""Open connections: which runs share one, and when a host is connected to anew."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from distmagic.connection import connections
from distmagic.connection.connections import Connections
from distmagic.connection.link import Link
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import ConnectionLost, Unreachable, UsageError
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.hosts import LOCALHOST, Host, parse_hosts
from tests import REPOSITORY
from tests.builders.links import FakeProcess, lines, reply
from tests.builders.plans import FACTS
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S, wait_until


class FakeHost:
    """A connection to the machine that a name stood for at that time; each process answers with `FACTS` twice."""

    warnings = ()

    def __init__(self) -> None:
        self.is_closed = self.is_cut = False

    def start(self, argv: tuple[str, ...]) -> Any:
        if self.is_cut:
            raise ConnectionLost("gpu-a: the connection is lost.")
        return FakeProcess(reply(), lines(FACTS, FACTS))

    def close(self) -> None:
        self.is_closed = True


class Kernel:
    """Connections of one kernel that reaches gpu-a by a configuration file."""

    def __init__(self, config: Path) -> None:
        self.logins: list[FakeHost] = []
        self.config = config
        self.connections = Connections(self._connect)
        self._asker = NotebookAsker(can_ask=False)
        (self._host,) = parse_hosts("gpu-a")
        self._access = Access(ssh_config=str(config))

    def _connect(self, host: Host, access: Access, asker: object) -> Any:
        self.logins.append(FakeHost())
        return self.logins[-1]

    def link(self) -> Link:
        return self.connections.link(self._host, self._access, self._asker)

    def take_idle(self) -> Link:
        return self.connections.take_idle(self._host, self._access, self._asker)

    def keep_idle(self, link: Link) -> None:
        link.kept = p.TemplateRequest(
            owner="ab12", idle_s=900.0, lease_s=60.0, env={}, defaults={}
        )
        self.connections.keep_idle(link)


@pytest.fixture
def kernel(tmp_path: Path):
    config = tmp_path / "config"
    config.write_text("Host gpu-a\n    HostName 10.0.0.1\n")
    made = Kernel(config)
    yield made
    made.connections.close()


def move(kernel: Kernel) -> None:
    """Have gpu-a be another machine from now on."""
    kernel.config.write_text("Host gpu-a\n    HostName 10.0.0.12\n")


def test_a_connection_is_used_again(kernel):
    first, second = kernel.link(), kernel.link()
    assert first.transport is second.transport
    assert len(kernel.logins) == 1


def test_after_an_edit_of_the_ssh_configuration_a_host_is_connected_to_anew(kernel):
    old = kernel.link()
    move(kernel)
    new = kernel.link()
    assert cast(Any, new.transport) is kernel.logins[1]
    assert old.transport is not new.transport
    assert not kernel.logins[0].is_closed  # a run may still use it


def test_after_an_edit_nothing_idle_is_left_of_the_connection_before(kernel):
    idle = kernel.link()
    kernel.keep_idle(idle)
    move(kernel)
    kernel.take_idle()
    assert idle.is_closed
    wait_until(lambda: kernel.logins[0].is_closed, "the end of the older connection")
    assert not kernel.logins[1].is_closed


def test_a_connection_from_before_an_edit_ends_with_the_last_run_that_uses_it(kernel):
    of_run = kernel.link()
    move(kernel)
    new = kernel.link()
    kernel.keep_idle(of_run)  # the run has ended
    kernel.keep_idle(new)
    assert not kernel.logins[0].is_closed
    assert kernel.take_idle() is new
    assert of_run.is_closed
    wait_until(lambda: kernel.logins[0].is_closed, "the end of the older connection")


def test_an_idle_link_to_the_machine_of_before_an_edit_is_not_taken(kernel):
    link = kernel.link()
    move(kernel)
    kernel.keep_idle(link)
    assert cast(Any, kernel.take_idle().transport) is kernel.logins[1]


def test_this_machine_is_reached_without_a_look_at_the_ssh_configuration(
    kernel, monkeypatch
):
    """It may lie on a file server that does not answer."""

    def refuse(path: str | None) -> Any:
        raise AssertionError("looked at")

    monkeypatch.setattr(connections.config, "file_versions", refuse)
    access = Access(ssh_config=str(kernel.config))
    asker = NotebookAsker(can_ask=False)
    kernel.connections.link(LOCALHOST, access, asker)
    kernel.connections.take_idle(LOCALHOST, access, asker)
    assert len(kernel.logins) == 1


def test_what_is_edited_while_a_dead_idle_link_is_asked_counts(kernel, monkeypatch):
    link = kernel.link()
    kernel.keep_idle(link)

    def break_late(*_: object) -> None:
        move(kernel)
        raise Unreachable("gpu-a", "connected, but gave no answer within 30 s.")

    monkeypatch.setattr(link, "query", break_late)
    assert cast(Any, kernel.take_idle().transport) is kernel.logins[1]
    assert link.is_closed


def test_an_idle_link_is_taken(kernel):
    link = kernel.link()
    kernel.keep_idle(link)
    assert kernel.take_idle() is link


def test_a_connection_that_breaks_after_an_edit_is_closed_and_forgotten(kernel):
    kernel.link()
    text = kernel.config.read_text()
    times = kernel.config.stat()
    move(kernel)
    kernel.logins[0].is_cut = True
    kernel.config.write_text(text)
    os.utime(kernel.config, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cast(Any, kernel.link().transport) is kernel.logins[1]
    assert kernel.logins[0].is_closed


def test_a_link_whose_connection_was_dropped_does_not_rest(kernel):
    link = kernel.link()
    kernel.logins[0].is_cut = True
    kernel.link()
    kernel.keep_idle(link)
    assert kernel.take_idle() is not link


def test_of_two_runs_whose_links_broke_the_second_uses_the_first_ones_new_connection(
    kernel,
):
    """Else each would close what the other one has just opened, for ever."""
    kernel.link()
    broken = kernel.logins[0]
    broken.is_cut = True
    for _ in ("first", "second"):
        assert cast(Any, kernel.link().transport) is kernel.logins[1]
    assert broken.is_closed
    assert not kernel.logins[1].is_closed
    assert len(kernel.logins) == 2


def test_a_connection_that_another_run_opens_just_before_a_broken_one_is_dropped_stays(
    kernel, monkeypatch
):
    kernel.link()
    broken = kernel.logins[0]
    begin = broken.start
    others: list[Link] = []

    def connect_elsewhere_and_break(argv: tuple[str, ...]) -> Any:
        broken.is_cut = True
        monkeypatch.setattr(broken, "start", begin)
        other = threading.Thread(target=lambda: others.append(kernel.link()))
        other.start()
        other.join(HANG_S)
        return begin(argv)

    monkeypatch.setattr(broken, "start", connect_elsewhere_and_break)
    own = kernel.link()
    assert [link.transport for link in others] == [own.transport]
    assert len(kernel.logins) == 2
    assert (broken.is_closed, kernel.logins[1].is_closed) == (True, False)


class NotedLock:
    """A lock that notes when somebody has to wait for it."""

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_of_two_runs_that_want_a_host_at_once_one_connects(kernel, monkeypatch):
    """The first connects until the second waits for it, or connects as well."""
    lock = NotedLock()
    key = connections._key(kernel._host, kernel._access)
    monkeypatch.setitem(cast(Any, kernel.connections._connecting), key, lock)
    first_connects = threading.Event()
    connect = kernel._connect

    def connect_slowly(*arguments: Any) -> Any:
        made = connect(*arguments)
        if first_connects.is_set():
            lock.is_waited_for.set()  # the second is here as well
        first_connects.set()
        assert lock.is_waited_for.wait(HANG_S)
        return made

    monkeypatch.setattr(kernel.connections, "_connect", connect_slowly)
    links: list[Link] = []
    runs = [threading.Thread(target=lambda: links.append(kernel.link())) for _ in "ab"]
    runs[0].start()
    assert first_connects.wait(HANG_S)
    runs[1].start()
    for run in runs:
        run.join(HANG_S)
    assert len(links) == 2
    assert len(kernel.logins) == 1, "nobody would ever close the other one"


def test_a_connection_that_comes_while_all_are_closed_is_closed_too(
    kernel, monkeypatch, golden
):
    connect = kernel._connect

    def connect_late(*arguments: Any) -> Any:
        kernel.connections.close()
        return connect(*arguments)

    with monkeypatch.context() as slow:
        slow.setattr(kernel.connections, "_connect", connect_late)
        with golden.raises(ConnectionLost):
            kernel.link()
    assert kernel.logins[0].is_closed
    assert kernel.link().transport is kernel.logins[1]


def test_a_forked_child_leaves_the_connections_to_its_parent(kernel, monkeypatch):
    kernel.link()
    with monkeypatch.context() as in_the_child:
        in_the_child.setattr(os, "getpid", lambda: -1)
        kernel.connections.close()
    assert not kernel.logins[0].is_closed
    kernel.link()
    assert len(kernel.logins) == 1


def test_when_python_ends_and_starts_no_thread_connections_are_closed_all_the_same(
    kernel, monkeypatch
):
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    kernel.link()
    monkeypatch.setattr(connections, "in_parallel", refuse)
    kernel.connections.close()
    assert kernel.logins[0].is_closed


def test_the_systems_client_keeps_no_key_of_a_host_that_was_just_made(golden):
    with golden.raises(UsageError):
        connections.connect(
            Host(name="mine"),
            Access(ssh_command="ssh"),
            NotebookAsker(can_ask=False),
            "pins",
        )


LIMITED = """
import resource
from distmagic.connection.connections import Connections
Connections(None)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_kernel_may_open_as_many_files_as_its_hard_limit_allows():
    line = 'ulimit -Sn 256; ulimit -Hn 5000; exec "$0" -c "$1"'
    done = completed(["bash", "-c", line, sys.executable, LIMITED], cwd=REPOSITORY)
    assert done.stdout == "5000 5000\n"

"""An agent that is started in a home whose file server fails at any call: it runs and is heard, or nothing of it is left."""

from __future__ import annotations

import io
import os
import shutil
import socket
import sys
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distmagic.remote.contact import agents, template, template_client
from distmagic.remote.contact.agents import Agents
from distmagic.remote.contact.contact import Contact
from distmagic.remote.contact.template import TemplateServer
from distmagic.remote.engine import forking
from distmagic.remote.records import environments, places, work_dirs
from distmagic.remote.system.device_claims import DeviceClaims
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.lines import Lines
from tests.builders.descriptors import closed_at_the_end
from tests.builders.file_server import FileServer, each_error
from tests.builders.messages import START

_WORK = p.WorkDir(name="train", origin="nb")
_JOB = f"start-{os.getpid()}"
_SAID = p.encode(p.Notice(text="I am here"), 1) + p.encode(p.Final(reason="done"), 2)


class Notebook:
    """A conversation whose other side says nothing, and hears all."""

    owner = ""

    def __init__(self) -> None:
        self.lines = Lines()  # the notebook says nothing more
        self.out = os.memfd_create("heard")
        weakref.finalize(self, os.close, self.out)

    @property
    def heard(self) -> bytes:
        return os.pread(self.out, os.fstat(self.out).st_size, 0)

    def say(self, message: p.Message) -> None:
        """Hear a message of the contact."""
        self.write(p.encode(message))

    def write(self, data: bytes) -> None:
        """Hear what the agent says."""
        os.write(self.out, data)


class PlayedAgent:
    """An agent that says two events to whom follows it first, and ends; its listener is the one that it is given."""

    def __init__(self) -> None:
        self.began = False

    def start(
        self, request: p.StartNode, listener: socket.socket, *_: Any
    ) -> Callable[[], object]:
        self.began = True
        own = listener.dup()
        run_dir = places.run_dir(request.job, request.node_rank)
        thread = threading.Thread(target=self._serve, args=(own, run_dir))
        thread.start()
        return thread.join

    def _serve(self, own: socket.socket, run_dir: Path) -> None:
        with own:
            conn, _ = own.accept()
        with conn:
            asked = conn.makefile("rb").readline()
            assert isinstance(p.decode(asked)[1], p.FollowJob)
            shutil.rmtree(run_dir)
            conn.sendall(_SAID)


@pytest.fixture
def silent_stdin() -> Iterator[None]:
    """A standard input on which nothing comes, as a contact's is while its notebook only listens."""
    saved, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    yield
    os.dup2(saved, 0)
    for descriptor in (saved, reading, writing):
        os.close(descriptor)


@each_error
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_an_agent_runs_and_is_heard_or_nothing_of_it_is_left(
    home_in_memory, monkeypatch, silent_stdin, stays, is_warm, home_error
):  # fmt: skip
    server = FileServer(monkeypatch, home_in_memory, home_error)
    if stays:  # the next job comes when a mark that could not be removed counts no more
        monkeypatch.setattr(work_dirs, "_SETTLING_S", 0.0)
    played = PlayedAgent()

    def executed(*_: Any, pass_fds: tuple[int, ...], **__: Any) -> SimpleNamespace:
        with socket.socket(fileno=os.dup(pass_fds[0])) as listener:
            wait = played.start(request, listener)
        return SimpleNamespace(pid=os.getpid(), stdin=io.BytesIO(), wait=wait)

    monkeypatch.setattr(agents.subprocess, "Popen", executed)

    def forked(*words: Any) -> SimpleNamespace:
        played.start(*words)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(template_client, "fork_agent", forked)
    monkeypatch.setattr(agents.processes, "wait_gone", lambda *_: None)
    warm = p.TemplateRequest(owner="me", idle_s=9.0, lease_s=9.0, env={}, defaults={})
    request = replace(
        START, job=_JOB, node_rank=0, cwd="", work=_WORK, warm=warm if is_warm else None
    )
    at, calls = -1, 0
    while at < calls:
        shutil.rmtree(home_in_memory, ignore_errors=True)
        places.make_private(home_in_memory / "jobs")
        first = work_dirs.prepare(_WORK, "before", 0).path
        work_dirs.leave(first, "before", 0)
        played.began = False
        notebook = Notebook()
        with closed_at_the_end():
            server.fail(at, stays=stays)
            error: BaseException | None = None
            try:
                Agents(cast(Contact, notebook), 0o022, DeviceClaims()).start(request)
            except (OSError, SystemExit) as raised:
                error = raised
            calls, failed = max(calls, len(server.calls)), server.failed
            server.fail(-1, stays=False)
        if played.began and error is None:
            assert _SAID in notebook.heard, failed
            assert notebook.heard.endswith(p.encode(p.AgentGone())), failed
        elif played.began:
            assert isinstance(error, SystemExit), (failed, error)
        else:
            assert isinstance(error, OSError), failed
        assert not places.run_dir(_JOB, 0).exists(), failed
        work_dirs.leave(first, _JOB, 0)  # as its agent does, if there was one
        assert work_dirs.prepare(_WORK, "after", 0).path == first, failed
        at += 3 if stays else 1
    assert calls > 20


class PlayedTime:
    """The clock and the waiting of a template: it is asked once, and every look after that is 20 s later."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._is_asked = False

    def clock(self) -> float:
        return self.now_s

    def select(self, readers: list[object], *_: object) -> tuple[list[object], ...]:
        self.now_s += 20.0
        was_asked, self._is_asked = self._is_asked, True
        return ([] if was_asked else readers), [], []


@each_error
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("stays", [False, True])
def test_a_template_forks_and_ends_in_its_time_whatever_the_home_says(
    home_in_memory, monkeypatch, tmp_path, stays, is_whole, home_error
):  # fmt: skip
    environment = home_in_memory / "envs" / ".0123456789abcdef"
    environment.mkdir(parents=True)
    monkeypatch.setattr(environments, "_OWN", environment)
    monkeypatch.setattr(sys, "path", [str(home_in_memory / "bundle.zip"), *sys.path])
    (home_in_memory / "bundle.zip").touch()
    code = places.blob(START.code)
    places.make_private(code.parent)
    if is_whole:
        with zipfile.ZipFile(code, "w") as archive:
            archive.writestr("sources.json", '{"imports": ["json"]}')
    else:
        code.write_bytes(b"PK")
    server = FileServer(monkeypatch, home_in_memory, home_error)
    monkeypatch.setattr(forking, "fork", lambda _: 4_194_999)  # no process
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (pid, 0))
    at, calls = -1, 0
    while at < calls:
        played = PlayedTime()
        monkeypatch.setattr(template, "select", played)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            socket.socket(socket.AF_UNIX) as client,
        ):
            path = tmp_path / str(at)
            path.mkdir()
            listener.bind(str(path / places.TEMPLATE))
            listener.listen()
            client.connect(str(path / places.TEMPLATE))
            fork = p.ForkAgent(start=replace(START, env={}), env={})
            template_client._tell(client, fork, [0, 1])
            server.fail(at, stays=stays)
            TemplateServer(listener, 600.0, 600.0, (), played.clock).run()
            calls, failed = max(calls, len(server.calls)), server.failed
            server.fail(-1, stays=False)
            with client.makefile("rb") as answers:
                said = answers.read()
        assert said.endswith(p.encode(p.AgentForked(pid=4_194_999))), failed
        assert played.now_s > 600.0, failed
        at += 1
    assert calls > 30

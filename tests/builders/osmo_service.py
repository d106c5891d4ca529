"""OSMO's service, played: workflows that tests/builders/osmo_program.py was given are really run.

A task's files are laid, its tokens replaced, and its command started, where `places` says. The first task leads: when it
has ended, the others are ended. One that fails fails all. Lines get the task's name before them, as OSMO writes a log.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests import REPOSITORY
from tests.builders.osmo_rules import rules_broken
from tests.lab.waiting import HANG_S

_AT = "/tmp/distmagic"


class Place(Protocol):
    """Where one task runs: a container of its own."""

    address: str
    root: str  # stands before the folders of its files

    def start(
        self, command: Sequence[str], variables: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command, both of whose streams come over one pipe."""

    def end(self, process: subprocess.Popen[str]) -> None:
        """Send SIGTERM to what was started."""


class Here:
    """The machine of the test, with a folder in place of a container."""

    address = "localhost"

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def start(
        self, command: Sequence[str], variables: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command; `python3` is the one that runs the test."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            command,
            env={**os.environ, **variables, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> None:
        """Send SIGTERM to it."""
        process.terminate()


class Service:
    """Runs the workflows that are submitted in the folder `state`, each task at its place."""

    def __init__(self, state: Path, places: Sequence[Place]) -> None:
        self.state, self.places = state, places
        self.never_starts = False
        self.began = threading.Event()  # a workflow's tasks
        self.over = threading.Event()  # this service
        self.ends_as = ""  # the state of a workflow that OSMO itself ends
        self.broken: list[str] = []  # OSMO's rules, by a workflow
        self.codes: list[int | None] = []
        self._lock = threading.Lock()
        self.how()

    def how(self, **commands: str) -> None:
        """Have commands of the program go another way: hang, refuse, log in, away, short."""
        (self.state / "how.json").write_text(json.dumps(commands))

    def serve(self) -> None:
        """Run workflows, one after the other."""
        done: set[str] = set()
        while not self.over.wait(0.05):
            for path in self.state.glob("*.yaml"):
                if path.stem not in done:
                    done.add(path.stem)
                    self._run(path)

    def _run(self, path: Path) -> None:
        text = path.read_text()
        self.broken += rules_broken(text)
        tasks = yaml.safe_load(text)["workflow"]["groups"][0]["tasks"]
        name = path.stem
        self._set(name, "PENDING", tasks, "SCHEDULING")
        while self.never_starts:
            self.began.set()
            status = "FAILED_CANCELED" if self._is_cancelled(name) else self.ends_as
            if status:
                self._set(name, status, tasks, status)
                return
            if self.over.wait(0.05):
                return
        started = []
        for task, place in zip(tasks, self.places, strict=False):
            started.append(self._start(tasks, task, place))
        self._set(name, "RUNNING", tasks, "RUNNING")
        readers = []
        for task, process in zip(tasks, started, strict=True):
            reader = threading.Thread(
                target=self._copy, args=(name, task["name"], process)
            )
            reader.start()
            readers.append(reader)
        self.began.set()
        is_cancelled = self._wait(name, started)
        for reader in readers:
            reader.join(HANG_S)
        self.codes = [process.returncode for process in started]
        status = "FAILED" if any(self.codes) else "COMPLETED"
        self._set(name, "FAILED_CANCELED" if is_cancelled else status, tasks, status)

    def _wait(self, name: str, started: Sequence[subprocess.Popen[str]]) -> bool:
        """Wait until the first task has ended, or one has failed, or all are cancelled, and end the others."""
        is_cancelled = False
        while True:
            codes = [process.poll() for process in started]
            is_cancelled = self._is_cancelled(name)
            if codes[0] is not None or any(codes) or is_cancelled or self.over.is_set():
                break
            self.over.wait(0.05)
        for process, place in zip(started, self.places, strict=False):
            if process.poll() is None:
                place.end(process)
        for process in started:
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return is_cancelled

    def _start(
        self, tasks: list[dict[str, Any]], task: dict[str, Any], place: Place
    ) -> subprocess.Popen[str]:
        root = place.root
        lines = []
        for number, file in enumerate(task["files"]):
            data = base64.b64decode(file["contents"])
            if file["path"].endswith(".sh"):
                data = data.replace(_AT.encode(), f"{root}{_AT}".encode())
            staged = self.state / f"staged-{number}"
            staged.write_bytes(data)
            path = shlex.quote(root + file["path"])
            lines.append(f"mkdir -p $(dirname {path}) && cp {staged} {path}")
        output = f"{root}/tmp/output"
        lines.append(f"mkdir -p {output}")
        tokens = {"{{output}}": output}
        for other, at in zip(tasks, self.places, strict=False):
            tokens[f"{{{{host:{other['name']}}}}}"] = at.address
        variables = {
            key: tokens.get(value, value) for key, value in task["environment"].items()
        }
        words = [*task["command"], *task["args"]]
        words = [word.replace(_AT, f"{root}{_AT}") for word in words]
        lines.append(f"exec {shlex.join(words)}")
        return place.start(["bash", "-c", "\n".join(lines)], variables)

    def _copy(self, name: str, task: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                stamp = time.strftime("%Y/%m/%d %H:%M:%S")
                with self._lock, (self.state / f"{name}.log").open("a") as log:
                    log.write(f"{stamp} [{task}] {line}")

    def _set(
        self, name: str, status: str, tasks: list[dict[str, Any]], of_task: str
    ) -> None:
        told = [{"name": task["name"], "status": of_task} for task in tasks]
        document = {
            "name": name,
            "status": status,
            "groups": [{"name": "ranks", "status": of_task, "tasks": told}],
        }
        aside = self.state / f"{name}.aside"
        aside.write_text(json.dumps(document))
        aside.replace(self.state / f"{name}.json")

    def _is_cancelled(self, name: str) -> bool:
        return (self.state / f"{name}.cancel").exists()


@contextmanager
def playing(
    folder: Path, places: Sequence[Place], monkeypatch: Any
) -> Iterator[Service]:
    """Have a program `osmo` on PATH, and a service behind it, for the length of the block."""
    state = folder / "osmo-state"
    state.mkdir()
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "osmo"
    source = REPOSITORY / "tests" / "builders" / "osmo_program.py"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {source} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("OSMO_PLAYED", str(state))
    service = Service(state, places)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield service
    finally:
        service.over.set()
        thread.join(HANG_S)

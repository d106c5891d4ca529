"""A home whose file server fails: every call of this process that touches a file below it can be made to raise."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_BY_PATH = (
    "open stat lstat mkdir listdir scandir utime unlink remove rename replace rmdir chmod truncate symlink link readlink "
    "access statvfs"
)  # fmt: skip
_BY_DESCRIPTOR = (
    "close write pwrite read pread lseek fstat ftruncate fsync fchmod sendfile"
)
# Of a file that `open` returns; what it holds back is written when it is closed, and then the server says no.
_OF_FILES = "close write flush read readline readlines seek truncate"
_Place = tuple[tuple[CodeType, int], ...]
ERRORS = (errno.ESTALE, errno.EDQUOT, errno.EIO, errno.ENOSPC)
each_error = pytest.mark.parametrize("home_error", ERRORS, ids=errno.errorcode.get)


class FileServer:
    """Counts the calls that touch `home`. The one with the number `at` raises `error`, and with `stays` every later one.

    `failed` are those that have; `calls` has the place in the product that each came from, `calls_before` those before
    the latest `fail`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, error: int) -> None:
        self.home = f"{home}{os.sep}"
        self._error = error
        self.calls: list[_Place] = []
        self.calls_before: list[_Place] = []
        self.failed: list[str] = []
        self.synced: set[int] = set()  # files of which the server has all
        self._at = -1
        self._stays = False
        for name in _BY_PATH.split():
            self._patch(monkeypatch, os, name, self._is_path)
        for name in _BY_DESCRIPTOR.split():
            self._patch(monkeypatch, os, name, self._is_descriptor)
        self._patch(monkeypatch, fcntl, "flock", self._is_descriptor)
        self._patch(monkeypatch, builtins, "open", self._is_path)
        self._patch(monkeypatch, io, "open", self._is_path)

    def fail(self, at: int, *, stays: bool) -> None:
        """Count anew, and fail at this call from now on; -1 for none."""
        self.calls_before, self.calls, self.failed = self.calls, [], []
        self._at, self._stays = at, stays

    def each_call(
        self, act: Callable[[], object]
    ) -> Iterator[tuple[str, Exception | None]]:
        """Play an action once for each of its calls, which fails; yield that call, and what the action has raised."""
        self.fail(-1, stays=False)
        act()
        for at in range(len(self.calls)):
            self.fail(at, stays=False)
            raised: Exception | None = None
            try:
                act()
            except Exception as error:  # noqa: BLE001 - what the caller judges
                raised = error
            failed = self.failed
            self.fail(-1, stays=False)
            yield failed[0], raised

    def _patch(
        self,
        monkeypatch: pytest.MonkeyPatch,
        module: Any,
        name: str,
        is_there: Callable[[Any], bool],
    ) -> None:
        real = getattr(module, name)

        def call(*args: Any, **more: Any) -> Any:
            folder = more.get("dir_fd")
            if folder is not None:
                is_below = self._is_descriptor(folder)
            else:
                is_below = bool(args) and is_there(args[0])
            if not is_below:
                return real(*args, **more)
            if name == "close":
                real(*args, **more)  # the descriptor is gone, whatever the server says
                self.pass_or_fail(name, args[0])
                return None
            self.pass_or_fail(name, args[0])
            if name == "fsync":
                self.synced.add(_fstat(args[0]).st_ino)
            made = real(*args, **more)
            return _File(self, made) if hasattr(made, "readline") else made

        monkeypatch.setattr(module, name, call)

    def pass_or_fail(self, name: str, of: object) -> None:
        """Count a call; raise the error if it is one that fails."""
        number = len(self.calls)
        self.calls.append(_place())
        fails = number == self._at or (self._stays and number > self._at)
        if self._at >= 0 and fails:
            self.failed.append(f"{name} {of}")
            raise OSError(self._error, os.strerror(self._error), str(of))

    def _is_path(self, path: Any) -> bool:
        if isinstance(path, int):
            return self._is_descriptor(path)
        return os.fsdecode(path).startswith(self.home)

    def _is_descriptor(self, descriptor: Any) -> bool:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        try:
            return _readlink(f"/proc/self/fd/{number}").startswith(self.home)
        except OSError:
            return False


def _place() -> _Place:
    """Return which lines of the product have led to this call."""
    lines = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals["__name__"].startswith("distmagic."):
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def chosen(calls: list[_Place]) -> list[int]:
    """Return the number of the first and of the last call from each place: those between find what these find."""
    first = {place: number for number, place in reversed(list(enumerate(calls)))}
    last = {place: number for number, place in enumerate(calls)}
    return sorted({*first.values(), *last.values()})


class _File:
    """A file that `open` has returned: each call of it may fail, and it is closed all the same.

    Where its close fails, the server has nothing of what was written, unless it was asked to take it before.
    """

    def __init__(self, server: FileServer, file: Any) -> None:
        self._server, self._file = server, file

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._file, name)
        if name not in _OF_FILES.split():
            return real

        def call(*args: Any) -> Any:
            if name == "close":
                if not self._file.closed:
                    self._close()
                return None
            self._server.pass_or_fail(f"file.{name}", self._file.name)
            return real(*args)

        return call

    def _close(self) -> None:
        status, is_written = _fstat(self._file.fileno()), self._file.writable()
        kept = _dup(self._file.fileno())
        try:
            self._file.close()
            try:
                self._server.pass_or_fail("file.close", self._file.name)
            except OSError:
                if is_written and status.st_ino not in self._server.synced:
                    _ftruncate(kept, 0)
                raise
        finally:
            _close(kept)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        self._server.pass_or_fail("file.__iter__", self._file.name)
        return iter(self._file)


_readlink, _fstat, _dup, _ftruncate, _close = os.readlink, os.fstat, os.dup, os.ftruncate, os.close  # fmt: skip

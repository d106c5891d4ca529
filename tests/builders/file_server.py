"""A home whose file server fails: every call of this process that touches a file below it can be made to raise."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_BY_PATH = (
    "open stat lstat mkdir listdir scandir utime unlink remove rename replace rmdir chmod truncate symlink link readlink"
)  # fmt: skip
_BY_DESCRIPTOR = "close write fstat ftruncate"
ERRORS = (errno.ESTALE, errno.EDQUOT, errno.EIO, errno.ENOSPC)


class FileServer:
    """Counts the calls that touch `home`. The one with the number `at` fails, and with `stays` every later one.

    `failed` are those that have; `calls_before` is how many there were before the latest `fail`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.home = f"{home}{os.sep}"
        self.calls = self.calls_before = 0
        self.failed: list[str] = []
        self._at = -1
        self._stays = False
        self._error = 0
        for name in _BY_PATH.split():
            self._patch(monkeypatch, os, name, self._is_path)
        for name in _BY_DESCRIPTOR.split():
            self._patch(monkeypatch, os, name, self._is_descriptor)
        self._patch(monkeypatch, fcntl, "flock", self._is_descriptor)
        self._patch(monkeypatch, builtins, "open", self._is_path)
        self._patch(monkeypatch, io, "open", self._is_path)

    def fail(self, at: int, *, stays: bool) -> None:
        """Count anew, and fail at this call from now on; -1 for none."""
        self.calls_before, self.calls, self.failed = self.calls, 0, []
        self._at, self._stays = at, stays
        self._error = ERRORS[at % len(ERRORS)]

    def _patch(
        self,
        monkeypatch: pytest.MonkeyPatch,
        module: Any,
        name: str,
        is_there: Callable[[Any], bool],
    ) -> None:
        real = getattr(module, name)

        def call(*args: Any, **more: Any) -> Any:
            if not args or not is_there(args[0]):
                return real(*args, **more)
            number = self.calls
            self.calls += 1
            fails = self._at >= 0 and (
                number == self._at or (self._stays and number > self._at)
            )
            if not fails:
                return real(*args, **more)
            if name == "close":
                real(*args, **more)  # the descriptor is gone, whatever the server says
            self.failed.append(f"{name} {args[0]}")
            raise OSError(self._error, os.strerror(self._error), str(args[0]))

        monkeypatch.setattr(module, name, call)

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


_readlink = os.readlink

"""A template's side of its successor: a child that imports packages, and takes its place when it has them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from distmagic.remote.engine import preloading
from distmagic.remote.system import processes

SLOW_S = 60.0  # for one package


class Successor:
    """The child `pid` that is importing `packages`, and `package` just now; `conn` is the connection to it."""

    def __init__(
        self, pid: int, conn: socket.socket, packages: dict[str, list[str]], now: float
    ) -> None:
        self.pid = pid
        self.packages = packages
        self.package = ""
        self.why = "ends the process"  # that it is refused, if the child just ends
        self.is_ready = False
        self._conn = conn
        self._since_s = now
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor that becomes readable when there is something to hear."""
        return self._conn.fileno()

    def hear(self, now: float) -> bool:
        """Take what the child says; return whether it lives."""
        try:
            data = self._conn.recv(4096)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, text = json.loads(line)
            if word == "importing":
                self.package, self._since_s = text, now
            elif word == "refused":
                self.why = text
            else:
                self.is_ready = True
        return bool(data)

    def end_if_slow(self, now: float) -> None:
        """Kill the child where one package takes too long; that it is gone is heard later."""
        if not self.is_ready and now - self._since_s > SLOW_S:
            self.why = f"takes longer than {SLOW_S:.0f} s"
            os.kill(self.pid, signal.SIGKILL)

    def hand_over(self, used: float, renewed: float) -> None:
        """Tell the child that it is the template from now on, and when that was used and renewed last."""
        self._conn.sendall(json.dumps([used, renewed]).encode())

    def close(self) -> None:
        """Reap a child that has ended."""
        self._conn.close()
        os.waitpid(self.pid, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a successor begins with: when the template was used and when it was renewed, and the packages it has loaded."""

    used: float
    renewed: float
    packages: tuple[str, ...]


def succeed(
    number: int, packages: dict[str, list[str]], seal: Callable[[], None]
) -> Handover:
    """Be the successor: import packages, call `seal`, and return when the template has given way. `number` is the connection.

    Never returns where a package is refused, or the template is gone.
    """
    # Where the template has ended by now, the connection says so.
    processes.die_with_parent(os.getppid())
    conn = socket.socket(fileno=number)

    begun: list[str] = []

    def say(word: str, text: str = "") -> None:
        conn.sendall(json.dumps([word, text]).encode() + b"\n")

    try:
        for package in preloading.load(packages):
            begun.append(package)
            say("importing", package)
        seal()
    except BaseException as error:  # noqa: BLE001 - whatever the code of a package raises
        first = str(error).partition("\n")[0][:200]
        is_ours = isinstance(error, preloading.NotForTemplate)
        say("refused", first if is_ours else f"{type(error).__name__}: {first}")
        for process in processes.descendants(os.getpid()):
            processes.send(process, signal.SIGKILL)
        os._exit(1)
    processes.outlive_parent()
    say("ready")
    word = conn.recv(4096)
    if not word:
        os._exit(0)  # the template was ended
    conn.close()
    used, renewed = json.loads(word)
    return Handover(used=used, renewed=renewed, packages=tuple(begun))

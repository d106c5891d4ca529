"""`%distributed playground N`: throw-away SSH hosts on this machine, for learning and for tests.

One child process (server.py) serves all N hosts. Each has a port on 127.0.0.1, a host key, a home
and the kernel's Python. Only this playground's own key can log in. All of it is removed by `stop`,
at exit, and when the kernel is killed. With `keep` it outlives the kernel, and `found` gives it to
another one; it ends by `stop`, or 2 h after the last connection and the last process of a host.
Orders go through a Unix socket in its private directory.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from distmagic.errors import DistmagicError, UsageError
from distmagic.remote.records import places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.request.hosts import Host

_START_S = 120.0  # a busy machine imports asyncssh for long
_ORDER_S = 30.0
_STOP_S = 15.0  # the server gives commands 5 s to end
_LOG_BYTES = 4000


class Playground:
    """Running throw-away hosts; made by `start`.

    `hosts` are named node1, node2 and so on in `ssh_config`, the path of an OpenSSH configuration.
    A playground that is kept (`is_kept`) outlives this process; `server` is None if another process
    has started it.
    """

    def __init__(
        self,
        server: subprocess.Popen[bytes] | None,
        directory: Path,
        count: int,
        *,
        is_kept: bool = False,
    ) -> None:
        numbers = range(1, count + 1)
        self.hosts = tuple(Host(name=f"node{number}") for number in numbers)
        self.is_kept = is_kept
        self._server = server
        self._directory = directory
        self._owner = os.getpid()
        if not is_kept:
            atexit.register(self.stop)

    @property
    def ssh_config(self) -> str:
        """The path of the OpenSSH configuration. Raises `DistmagicError` if the hosts have ended.

        Another user may then make a directory of that name, and a configuration can run commands.
        """
        with suppress(OSError):
            if self._directory.lstat().st_uid == os.getuid():
                return str(self._directory / "ssh_config")
        raise _ended()

    def order(self, verb: str = "", name: str = "") -> list[tuple[str, str, int]]:
        """Change the state of a host: freeze, thaw, cut, heal, off, on.

        Return (name, state, processes) of all hosts. Raises `DistmagicError` if the server has
        ended, or does not answer.
        """
        answer = _asked(self._directory, [verb, name], _ORDER_S)
        if not answer:
            raise _ended()
        return [(name, state, count) for name, state, count in json.loads(answer)]

    def stop(self) -> None:
        """End the hosts and all processes on them, and remove their directory.

        Safe to call twice.
        """
        if os.getpid() != self._owner:
            return  # a forked child of the kernel that runs its atexit functions
        atexit.unregister(self.stop)
        if self.is_kept:
            try:
                _asked(self._directory, ["stop", ""], _STOP_S)
            except DistmagicError:
                if self._server is None:  # nothing else can end it
                    raise
            with suppress(OSError):
                # Another kernel may keep a later one.
                if _kept().read_bytes() == os.fsencode(self._directory):
                    _kept().unlink()
        _end(self._server, self._directory)

    def close(self) -> None:
        """Stop the playground, unless it is kept."""
        if not self.is_kept:
            self.stop()


def start(
    n: int, *, directory: str | os.PathLike[str] | None = None, keep: bool = False
) -> Playground:
    """Start `n` hosts and return when they answer.

    Their files are in a new directory below `directory`. With `keep` they outlive this process.
    Raises `UsageError` for less than one host, `DistmagicError` if asyncssh is missing or the
    server does not start.
    """
    if n < 1:
        raise UsageError(
            f"A playground of {n} hosts was asked for; it has at least 1.",
            "Use 1 or more.",
        )
    if importlib.util.find_spec("asyncssh") is None:
        raise DistmagicError(
            "The playground needs asyncssh, which is not installed.",
            "In a checkout of distmagic: pip install '.[playground]'",
        )
    try:
        return _started(n, directory, is_kept=keep)
    except OSError as error:
        raise DistmagicError(
            f"The playground can't start: {error}.",
            "Its files lie in TMPDIR, which may name another folder.",
        ) from None


def found() -> Playground | None:
    """Return the playground that this user keeps, or None if there is none, or it has ended."""
    with suppress(OSError, ValueError):
        directory = Path(_kept().read_text())
        rows = json.loads(_asked(directory, ["", ""], _ORDER_S))
        return Playground(None, directory, len(rows), is_kept=True)
    return None


def _kept() -> Path:
    """Return the file with the directory of the playground that this machine keeps."""
    return places.home() / f"playground-{socket.gethostname()}"


def _started(
    n: int, directory: str | os.PathLike[str] | None, *, is_kept: bool
) -> Playground:
    place = Path(tempfile.mkdtemp(prefix="distmagic-playground-", dir=directory))
    server = None
    try:
        server = _launch(place, n, 0 if is_kept else os.getpid())
        _wait(server, place / "server.log")
        if is_kept:
            _kept().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(_kept()) as file:
                file.write(os.fsencode(place))
        return Playground(server, place, n, is_kept=is_kept)
    except BaseException:
        _end(server, place)
        raise


def _wait(server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server's hosts listen.

    Raises `DistmagicError` if it has ended, and after `_START_S`.
    """
    assert server.stdout is not None
    answers = select.poll()
    answers.register(server.stdout, select.POLLIN)
    if not answers.poll(_START_S * 1000):
        raise _silent(_START_S)
    with server.stdout as answer:
        text = answer.readline().decode(errors="replace")
    if text != "ready\n":  # it has ended, or something else in its Python prints
        why = (text + log.read_text(errors="replace"))[-_LOG_BYTES:].strip()
        raise DistmagicError(f"The playground's SSH server did not start:\n{why}")


def _asked(directory: Path, order: list[str], limit_s: float) -> bytes:
    """Send the server of a directory an order, and return its answer, b"" where it has ended.

    Raises `DistmagicError` after `limit_s`.
    """
    try:
        opened = os.open(directory, os.O_RDONLY)
    except OSError:
        return b""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(limit_s)
            if os.fstat(opened).st_uid != os.getuid():
                return b""  # another user has taken the name of an ended one
            # A socket's path has at most 107 bytes.
            sock.connect(f"/proc/self/fd/{opened}/orders")
            sock.sendall(json.dumps(order).encode() + b"\n")
            return sock.makefile("rb").readline()
    except TimeoutError:
        raise _silent(limit_s) from None
    except OSError:
        return b""
    finally:
        os.close(opened)


def _ended() -> DistmagicError:
    return DistmagicError(
        "The playground has ended.", "Write %distributed playground 2."
    )


def _silent(limit_s: float) -> DistmagicError:
    return DistmagicError(
        f"The playground has not answered within {limit_s:g} s.",
        "This machine may be busy. End it with %distributed playground stop, and start another one.",
    )


def _launch(place: Path, count: int, parent: int) -> subprocess.Popen[bytes]:
    # The server imports distmagic from this kernel's place, which may not be on Python's default
    # path.
    paths = [str(Path(__file__).parents[2])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "distmagic.playground.server"]
    with (place / "server.log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(count), str(parent)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=place,
            env=env,
            start_new_session=True,  # an interrupt of the kernel's process group must not end it
        )


def _end(server: subprocess.Popen[bytes] | None, place: Path) -> None:
    if server is not None:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    shutil.rmtree(place, ignore_errors=True)

"""The contact's side of templates: finds a matching one, starts one, asks it for an agent, ends it.

A template matches if everything that a process inherits is equal: interpreter, bundle, variables,
limits, and import directories. Variables that are only read during a job may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from distmagic.remote.engine import process_title
from distmagic.remote.records import places
from distmagic.remote.system import processes, socket_peer
from distmagic.remote.system.customization import customizing_file
from distmagic.remote.system.torchrun_variables import TORCHRUN_VARIABLES
from distmagic.remote.wire import protocol

# Time limit for a template that is still importing torch; then the job starts without it.
PATIENCE_S = 20.0
SETTINGS = "DISTMAGIC_TEMPLATE"
# templates of one notebook; a variable that changes with each run must not fill the host's memory
_MOST = 2
_SOON_S = 2.0
_AT_ONCE_S = 0.1
_WRITTEN_BY_PIP = (".dist-info", ".egg-info", ".pth", ".egg-link")

AT_RUN_TIME = {
    *TORCHRUN_VARIABLES, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PWD", "OLDPWD", "SHLVL", "_", "TERM",
    "XDG_SESSION_ID", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "KRB5CCNAME",
}  # fmt: skip
AT_RUN_TIME_TOO = (
    "DISTMAGIC_",
    "SSH_",
    "TORCHELASTIC_",
    "PET_",
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "PMI",
)


def variables(warm: protocol.TemplateRequest) -> dict[str, str]:
    """Return the variables of a template: those of its ranks, except those that are only read
    during a job.
    """
    return {
        name: value
        for name, value in {**warm.defaults, **os.environ, **warm.env}.items()
        if name not in AT_RUN_TIME and not name.startswith(AT_RUN_TIME_TOO)
    }


def _key(env: dict[str, str], umask: int, prefix: tuple[str, ...]) -> str:
    """Return a digest of all that ranks inherit from a template: only an equal one can be used."""
    folders = {}
    for path in sys.path[1:]:
        if os.path.isdir(path):
            # Changes when something is installed in a folder: names, and when pip last recorded a
            # package. Byte code, which the first import writes there, is ignored.
            found = []
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name == "__pycache__":
                        continue
                    changed_ns = 0
                    if entry.name.endswith(_WRITTEN_BY_PIP):
                        changed_ns = entry.stat().st_mtime_ns
                    found.append((entry.name, changed_ns))
            folders[path] = sorted(found)
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ]
    ignored = [
        number
        for number in sorted(signal.valid_signals())
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    inherited = {
        "executable": sys.executable,
        "version": sys.version,
        "bundle": sys.path[0],
        "variables": sorted(env.items()),
        "directory": os.getcwd(),
        "folders": folders,
        "limits": limits,
        "user": [os.getuid(), os.geteuid()],
        "groups": [os.getegid(), *sorted(os.getgroups())],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored signals": ignored,
        "umask": umask,
        "processors": sorted(os.sched_getaffinity(0)),
        "prefix": prefix,
    }
    text = json.dumps(inherited, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _can_be_warm(env: dict[str, str]) -> bool:
    """Whether a fork of a template can replace a new process.

    It can't if PYTHONPATH is relative, because that means the job's own directory. It can't either
    if PYTHONPATH contains a program that runs at the start of each process.
    """
    if not sys.platform.startswith("linux") or customizing_file(env):
        return False
    parts = env.get("PYTHONPATH", "").split(os.pathsep)
    return all(os.path.isabs(part) for part in parts if part)


def _mine(owner: str) -> str:
    """Return the part of a path in /tmp that names the notebook to which a template belongs.

    It has a digest of distmagic's home directory, because a user may have several such directories
    and only one /tmp.
    """
    home = str(places.home())
    return owner + hashlib.sha256(home.encode()).hexdigest()[:6]


# ---- finding and starting


def ensure(
    warm: protocol.TemplateRequest, umask: int, prefix: tuple[str, ...]
) -> Path | None:
    """Return the socket of a matching template, which may still be importing torch; None if there
    can be none.

    The command of a new one starts with `prefix`.
    """
    env = variables(warm)
    if not _can_be_warm(env):
        return None
    key = _key(env, umask, (*prefix, "", *warm.preload))
    for folder in places.warm_dirs(_mine(warm.owner), key):
        if _is_there(folder):
            return folder / places.TEMPLATE
    # Make room for it: the least recently used templates end.
    found = sorted(_described(warm.owner), key=lambda pair: pair[1].idle_s)
    for path, _ in found[_MOST - 1 :]:
        _end(path)
    return _start(warm, env, key, umask, prefix)


def _is_there(folder: Path) -> bool:
    if not places.listens(folder / places.TEMPLATE):
        return False
    process = processes.noted(folder / places.PID)
    # It was stopped (SIGSTOP): no job must wait for it.
    if process is not None and process.state == "T":
        _end(folder / places.TEMPLATE)
        return False
    return True


def _start(
    warm: protocol.TemplateRequest,
    env: dict[str, str],
    key: str,
    umask: int,
    prefix: tuple[str, ...],
) -> Path:
    folder = places.make_warm_dir(_mine(warm.owner), key)
    path = folder / places.TEMPLATE
    times = {"idle_s": warm.idle_s, "lease_s": warm.lease_s}
    more = {"preload": warm.preload, "home": str(places.home())}
    settings = {
        SETTINGS: json.dumps({**times, **more}),
        processes.MARK: process_title.JOB_PLACEHOLDER,
    }
    try:
        with (
            socket.socket(socket.AF_UNIX) as listener,
            (folder / "log").open("wb") as log,
        ):
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(places.BACKLOG)
            child = subprocess.Popen(
                [*prefix, *processes.command(process_title.ROLE_PLACEHOLDER)],
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                env={**env, **settings},
                start_new_session=True,
                umask=umask,
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    processes.note(child.pid, folder / places.PID)
    # It is ended by its pid and start time, whichever process started it.
    child.returncode = 0
    return path


# ---- communication


@contextmanager
def _conversation(
    path: Path, timeout_s: float
) -> Iterator[tuple[socket.socket, protocol.Template]]:
    """Connect. The template sends the first message as soon as it has time.

    Raises OSError, `BadLine` (a ValueError).
    """
    with socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(timeout_s)
        conn.connect(str(path))
        socket_peer.check(conn)
        hello = _answer(conn)
        if not isinstance(hello, protocol.Templates) or not hello.templates:
            raise ConnectionError(f"no template answers at {path}")
        yield conn, hello.templates[0]


def _answer(conn: socket.socket) -> protocol.Message | None:
    # One message is under way at a time, so no byte of a next one is read.
    with conn.makefile("rb") as lines:
        line = lines.readline()
    return protocol.decode(line)[1] if line.endswith(b"\n") else None


def _tell(conn: socket.socket, request: protocol.Message, fds: list[int]) -> None:
    socket.send_fds(conn, [b"\n"], fds)
    conn.sendall(protocol.encode(request))
    conn.shutdown(socket.SHUT_WR)


def fork_agent(
    request: protocol.StartNode,
    listener: socket.socket,
    log: int,
    devices: tuple[int, ...],
    env: dict[str, str],
    umask: int,
    prefix: tuple[str, ...],
) -> processes.ProcessInfo | None:
    """Make a template fork the job's agent and return it; None if the agent must be started by
    exec.
    """
    if request.warm is None:
        return None
    try:
        path = ensure(request.warm, umask, prefix)
        if path is None:
            return None
        with _conversation(path, PATIENCE_S) as (conn, _):
            fork = protocol.ForkAgent(start=replace(request, warm=None), env=env)
            _tell(conn, fork, [listener.fileno(), log, *devices])
            answer = _answer(conn)
    except (OSError, ValueError):
        return None  # it ended, or takes too long: a job can start without it
    if not isinstance(answer, protocol.AgentForked):
        return None
    return processes.read(answer.pid)


def renew(owner: str) -> None:
    """Renew the lease of this notebook's templates.

    A template that still imports torch does not answer, and is passed over: its lease has not
    begun.
    """
    for folder in places.warm_dirs(_mine(owner)):
        with (
            suppress(OSError, ValueError),
            _conversation(folder / places.TEMPLATE, _AT_ONCE_S) as (conn, _),
        ):
            _tell(conn, protocol.RenewLease(), [])


def _described(owner: str) -> list[tuple[Path, protocol.Template]]:
    found = []
    for folder in places.warm_dirs(_mine(owner)):
        with (
            suppress(OSError, ValueError),
            _conversation(folder / places.TEMPLATE, _SOON_S) as (_, hello),
        ):
            found.append((folder / places.TEMPLATE, hello))
    return found


def templates(owner: str) -> tuple[protocol.Template, ...]:
    """Return this notebook's templates, with their private memory and their share of shared
    memory.
    """
    return tuple(
        replace(hello, size_bytes=_memory_bytes(hello.pid))
        for _, hello in _described(owner)
    )


def _memory_bytes(pid: int) -> int:
    # Containers may hide the first.
    for file, name in (
        ("smaps_rollup", "Pss:"),
        ("status", "VmRSS:"),
    ):
        try:
            with open(f"/proc/{pid}/{file}") as lines:
                for line in lines:
                    if line.startswith(name):
                        _, kib, *_ = line.split()
                        return int(kib) << 10
        except OSError:
            continue
    return 0


def end_all(owner: str) -> None:
    """End this notebook's templates, and wait until they have ended.

    Jobs that they started run on.
    """
    for folder in places.warm_dirs(_mine(owner)):
        _end(folder / places.TEMPLATE)


def _end(path: Path) -> None:
    """Kill a template, which may be busy importing and has nothing to clean up; wait until it has
    ended.
    """
    process = processes.noted(path.parent / places.PID)
    if process is not None:
        processes.send(process, signal.SIGKILL)
        processes.wait_gone(process, _SOON_S)
    shutil.rmtree(path.parent, ignore_errors=True)

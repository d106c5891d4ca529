"""`%distributed get | put | env sync`: copies files of the user and installs packages."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.errors import UsageError
from distmagic.notebook.job_hosts import known_hosts, reach
from distmagic.notebook.settings import CommandLine
from distmagic.request.hosts import parse_hosts

if TYPE_CHECKING:
    from distmagic.connection.requests.remote_files import RemoteFolder
    from distmagic.remote.wire.protocol import EnvironmentProgress
    from distmagic.session.packages import Packages

_USUAL_NAME = "kernel"
_PROGRESS_S = 5.0
_PATTERN = "*?["  # a part of a path with one of these is a pattern


def get(line: CommandLine) -> None:
    """Download a file, a folder with all its files, or all files that match a pattern; print their
    new paths.
    """
    from distmagic.payload.work_files import new_folder

    above, pattern = split_pattern(line.words[1])
    to = new_folder(line.words[2] if line.words[2:] else ".", "%distributed get")
    for path in _folder(line, above).fetch(pattern, to):
        print(sanitize.line(str(path)))  # the host has chosen its name


def put(line: CommandLine) -> None:
    """Upload a file of this machine, or a folder with all its files, to a host or to all; print
    their paths.
    """
    is_for_all = line.flags.all
    if len(line.words) not in ((1, 2) if is_for_all else (2, 3)):
        raise UsageError(
            f"%distributed put {' '.join(line.words)}: too few words, or too many.",
            "Write %distributed put HOST PATH [TO], or %distributed put PATH --all [TO].",
        )
    if is_for_all:
        _put_all(line)
        return
    host, source, *folder = line.words
    to = folder[0] if folder else "~"
    for name in _folder(line, to).send(_local_path(source)):
        print(sanitize.line(f"{host}:{PurePosixPath(to) / name}"))


def _put_all(line: CommandLine) -> None:
    """Upload a file or folder, or all files that match a pattern, to every host."""
    from distmagic.session.spreading import put as put_on_all

    path, *folder = line.words
    source = _local_path(path)
    to = folder[0] if folder else "~"
    sources = [source]
    if not source.exists():
        found = glob.glob(str(source), recursive=True)  # noqa: PTH207 - of any folder
        sources = [Path(path) for path in sorted(found)]
    if not sources:
        raise UsageError(f"{path} is no file and no folder of this machine.")
    hosts = known_hosts(line)
    count, size_bytes = put_on_all(reach(line, hosts), sources, to)
    places = dict.fromkeys(
        str(PurePosixPath(to) / one.resolve().name) for one in sources
    )
    where = f"{', '.join(places)} on {', '.join(host.name for host in hosts)}"
    files = f"{count:,} file{'s' if count > 1 else ''} ({size_bytes / 1e6:,.1f} MB)"
    print(sanitize.line(f"Copied {files} to {where}"))


def _local_path(text: str) -> Path:
    """Return a path of this machine; `~user` stays unexpanded if there is no such user."""
    return Path(os.path.expanduser(text))


def _folder(line: CommandLine, path: str) -> RemoteFolder:
    """Return a folder on the host that the first word names: one of the notebook's, or any
    other.
    """
    name = line.words[0]
    found = [host for host in known_hosts(line) if host.name == name]
    hosts = tuple(found[:1]) or parse_hosts(name)
    if len(hosts) != 1:
        raise UsageError(f"{name!r} is more than one host.", "Name one of them.")
    return line.housekeeping.folder(reach(line, hosts), path)


def split_pattern(path: str) -> tuple[str, str]:
    """Split a path into a folder and a pattern, which starts at the first part with a wildcard, or
    else is the last part.

    Raises `UsageError` for a path that ends without a name.
    """
    parts = path.rstrip("/").split("/")
    count = len(parts) - 1
    for number, part in enumerate(parts):
        if any(char in part for char in _PATTERN):
            count = min(count, number)
    above, pattern = "/".join(parts[:count]), "/".join(parts[count:])
    if pattern in ("", ".", "..", "~"):
        raise UsageError(f"{path!r} names no file.", f"Write {path.rstrip('/')}/*.")
    return above or ("/" if path.startswith("/") else "~"), pattern


# ---- environments


def env(line: CommandLine) -> None:
    """Make an environment on every host; later cells use it.

    Raises the error of a host that refuses.
    """
    packages = _packages(line)
    for note in packages.notes:
        print(sanitize.lines(f"note: {note}"))
    notebook = line.notebook
    hosts = known_hosts(line)
    # An environment is never made with a Python from an earlier sync.
    access = notebook.access(line.request, hosts, synced=False)
    first_links = notebook.session().reach(hosts, access, line.asker)
    show = partial(_show_progress, {})
    synced = line.housekeeping.sync_environment(first_links, packages, show)
    for host, ready in synced.ready.items():
        notebook.synced[host] = ready.python
        how = "was there already" if ready.was_there else "is ready"
        text = f"{host}: the environment {packages.name} {how} ({ready.elapsed_s:.0f} s): {ready.python}"
        print(sanitize.lines(text))
    if synced.ready:
        of_cells = f"The cells of this notebook use it on {', '.join(synced.ready)}; elsewhere write"
        how = "Write" if notebook.shell is None else of_cells
        print(f"{how} --python env:{packages.name}.")
    if synced.error is not None:
        raise synced.error


def _packages(line: CommandLine) -> Packages:
    """Return the packages that the line requests. Raises `UsageError`."""
    from distmagic.session import packages

    if line.words != ("sync",):
        raise UsageError(
            "%distributed env is followed by sync.", "Write %distributed env sync."
        )
    requirements, lock, name = (
        line.flags.requirements,
        line.flags.lock,
        line.flags.name,
    )
    if requirements is not None and lock is not None:
        raise UsageError(
            "--requirements and --lock can't go together.", "Keep one of them."
        )
    if requirements is not None:
        return packages.of_requirements(_local_path(requirements), name)
    if lock is not None:
        return packages.of_lock(_local_path(lock), name)
    return packages.of_kernel(name or _USUAL_NAME)


def _show_progress(
    shown: dict[str, EnvironmentProgress], latest: Mapping[str, EnvironmentProgress]
) -> None:
    """Print each host's latest progress line to stderr if it is new and some seconds have passed
    since the one in `shown`.

    A saved notebook keeps all lines.
    """
    for host, progress in latest.items():
        last = shown.get(host)
        if last is None or (
            progress.line != last.line
            and progress.elapsed_s >= last.elapsed_s + _PROGRESS_S
        ):
            shown[host] = progress
            text = f"{host}: {progress.line}, {progress.elapsed_s:.0f} s"
            print(sanitize.line(text), file=sys.stderr, flush=True)

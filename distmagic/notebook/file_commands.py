"""`%distributed get | put`: files of one host, fetched to this machine or sent there."""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.errors import SpecError
from distmagic.notebook.host_commands import CommandLine
from distmagic.notebook.job_hosts import known_hosts, reach
from distmagic.request.hosts import parse_hosts

if TYPE_CHECKING:
    from distmagic.connection.requests.remote_files import RemoteFolder

_PATTERN = "*?["  # a part of a path with one of these is a pattern


def get(line: CommandLine) -> None:
    """Fetch a file of a host, a folder with all its files, or what fits a pattern; print where they are."""
    if not 2 <= len(line.words) <= 3:
        raise SpecError(
            "%distributed get needs a host and a path on it.",
            "Write %distributed get gpu-a runs/model.pt, and a folder of this machine behind it for another place.",
        )
    above, pattern = split_pattern(line.words[1])
    to = Path(*line.words[2:]).expanduser()
    for path in _folder(line, above).fetch(pattern, to):
        print(sanitize.lines(str(path)))  # the host has chosen its name


def put(line: CommandLine) -> None:
    """Send a file of this machine, or a folder with all its files, to a host; print where they are."""
    if not 2 <= len(line.words) <= 3:
        raise SpecError(
            "%distributed put needs a host and a path of this machine.",
            "Write %distributed put gpu-a model.pt, and a folder of the host behind it for another place than its home.",
        )
    host, source, *folder = line.words
    to = folder[0] if folder else "~"
    for name in _folder(line, to).send(Path(source).expanduser()):
        print(sanitize.lines(f"{host}:{PurePosixPath(to) / name}"))


def _folder(line: CommandLine, path: str) -> RemoteFolder:
    """Return a folder of the host that the first word names: one of the notebook's, or any other."""
    name = line.words[0]
    found = [host for host in known_hosts(line) if host.name == name]
    hosts = tuple(found[:1]) or parse_hosts(name)
    if len(hosts) != 1:
        raise SpecError(f"{name!r} is more than one host.", "Name one of them.")
    return line.notebook.session().folder(reach(line, hosts), path)


def split_pattern(path: str) -> tuple[str, str]:
    """Return the folder of a path, and what is wanted of it: all behind the first part that is a pattern, or the last.

    Raises `SpecError` for a path that ends without a name.
    """
    parts = path.rstrip("/").split("/")
    count = len(parts) - 1
    for number, part in enumerate(parts):
        if any(char in part for char in _PATTERN):
            count = min(count, number)
    above, pattern = "/".join(parts[:count]), "/".join(parts[count:])
    if pattern in ("", ".", "..", "~"):
        raise SpecError(f"{path!r} names no file.", f"Write {path.rstrip('/')}/*.")
    return above or ("/" if path.startswith("/") else "~"), pattern

"""`%distributed get | put | env sync | clean`: what hosts store.

These are files of the user, environments, and what ended jobs keep.
"""

# ruff: noqa: T201  # what a magic prints is its output

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from distmagic import sanitize
from distmagic.errors import UsageError
from distmagic.notebook.job_hosts import jobs_of, known_hosts, reach
from distmagic.notebook.job_tables import table
from distmagic.notebook.settings import CommandLine, say
from distmagic.payload.sizes import plural
from distmagic.planning.jobs import Job, choose
from distmagic.render.quantities import duration
from distmagic.request.hosts import parse_hosts

if TYPE_CHECKING:
    from distmagic.connection.requests.remote_files import RemoteFolder
    from distmagic.remote.wire.protocol import EnvironmentProgress, KeptWorkDir
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
    files = f"{plural(count, 'file')} ({size_bytes / 1e6:,.1f} MB)"
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
        say(f"note: {note}")
    notebook = line.notebook
    hosts = known_hosts(line)
    # An environment is never made with a Python from an earlier sync.
    access = notebook.access(line.request, hosts, synced=False)
    first_links = notebook.session().reach(hosts, access, line.asker)
    show = partial(_show_progress, {})
    synced = line.housekeeping.sync_environment(first_links, packages, show)
    for host, ready in synced.ready.items():
        notebook.synced[host] = ready.python
        how = "existed already" if ready.was_there else "is ready"
        say(
            f"{host}: the environment {packages.name} {how} ({ready.elapsed_s:.0f} s): {ready.python}"
        )
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


# ---- what hosts keep


def clean(line: CommandLine) -> None:
    """Show the disk use of finished jobs on the hosts, or remove their files.

    `all` removes the jobs of this notebook, and files that only it uses: other users of the account
    may still need theirs.
    """
    what = line.words[0] if line.words else ""
    everybody = line.flags.everybody
    if everybody and what != "all":
        raise UsageError(
            "--everybody is for all jobs.", "Write %distributed clean all --everybody."
        )
    found = jobs_of(line)
    if what in ("", "all"):
        ended = [job for job in found if not job.is_running]
        if what:
            _remove_all(line, ended, everybody=everybody)
        else:
            _show_kept(line, ended)
        return
    job = choose(found, what)
    if job.is_running:
        raise UsageError(
            f"Job {job.name} still runs.", f"%distributed stop {job.name} ends it."
        )
    print(table([job], _owner()))
    # By the shown owner, so that a host with another record keeps it.
    first_links = reach(line, known_hosts(line))
    freed = line.housekeeping.remove(first_links, [job], job.terms.owner)
    print(f"removed: {freed / 1e6:,.1f} MB")


def _show_kept(line: CommandLine, ended: Sequence[Job]) -> None:
    """Print the disk use of finished jobs on the hosts, and what `clean all` would remove."""
    print(table(ended, _owner()))
    idle = _idle_work_dirs(line)
    kept = line.housekeeping.cached(reach(line, known_hosts(line)), owner=_owner())
    print(
        f"sent files and environments of this notebook that nobody uses: {kept / 1e6:,.1f} MB"
    )
    _print_work_dirs(
        "working directory that no job uses", "copied by %distributed put", idle
    )
    line.notebook.say(
        "%distributed clean all removes what this notebook alone uses; with --everybody also what other notebooks use. "
        "%distributed clean ID removes one job."
    )


def _remove_all(line: CommandLine, ended: Sequence[Job], *, everybody: bool) -> None:
    """Remove from the hosts what ended jobs have left there, and print it: what only this notebook
    uses, or, for `everybody`, what any notebook uses.
    """
    owner = "" if everybody else _owner()
    chosen = [job for job in ended if owner in ("", job.terms.owner)]
    print(table(chosen, _owner()))
    goes = {
        host: [one for one in dirs if everybody or _is_own(one)]
        for host, dirs in _idle_work_dirs(line).items()
    }
    names = {host: [one.name for one in dirs] for host, dirs in goes.items()}
    hosts, housekeeping = known_hosts(line), line.housekeeping
    freed = housekeeping.remove(reach(line, hosts), chosen, owner)
    freed += housekeeping.cached(reach(line, hosts), removes=True, owner=owner)
    freed += housekeeping.remove_work_dirs(reach(line, hosts), names)
    _print_work_dirs(
        "removed with all files in it",
        "removed, as far as %distributed put copied it",
        goes,
    )
    print(f"removed: {freed / 1e6:,.1f} MB")


def _idle_work_dirs(line: CommandLine) -> dict[str, list[KeptWorkDir]]:
    """Return the working directories that no job uses, by host."""
    found = line.housekeeping.work_dirs(reach(line, known_hosts(line)))
    return {
        host: [one for one in dirs if not one.is_used] for host, dirs in found.items()
    }


def _is_own(one: KeptWorkDir) -> bool:
    """Whether only this notebook uses a working directory: unnamed by the user, and unused by other
    owners.
    """
    from distmagic.names import own_origin

    return one.origin == own_origin() and one.owners == (_owner(),)


def _print_work_dirs(
    what: str, brought: str, idle: Mapping[str, Sequence[KeptWorkDir]]
) -> None:
    for host, dirs in idle.items():
        for one in dirs:
            size = f"{one.size_bytes / 1e6:,.1f} MB"
            whose = "" if _is_own(one) else f", {_whose(one)}"
            where = f"{what}: ~/.distmagic/work/{one.name}"
            used = "last used "
            if one.name.startswith("/"):
                where, used = f"{brought}: {one.name}", ""
            say(f"{where} on {host} ({size}, {used}{duration(one.age_s)} ago{whose})")


def _whose(one: KeptWorkDir) -> str:
    """Return a text about the owners of a working directory that others use too."""
    own = _owner()
    owners = ["this notebook" if name == own else name for name in one.owners]
    by = f"used by {', '.join(owners or ['somebody'])}"
    return by if one.origin else f"named by --name, {by}"


def _owner() -> str:
    """Return the name of this notebook as an owner of jobs."""
    from distmagic.names import owner

    return owner()

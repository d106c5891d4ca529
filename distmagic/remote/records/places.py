"""Where things lie on a host.

`~/.distmagic/` (or `$DISTMAGIC_HOME`), kept and bounded:
    blobs/SHA256          bundles and payloads, content-addressed
    jobs/JOB/NODE-HOST/   journal, logs and results of one node of one job (homes are often shared between hosts),
                          each log within `log_limit_bytes` while the job runs (logs.py)

`/tmp/distmagic-UID-JOB-NODE/`, gone with the job: sockets (they fail on NFS and beyond 107 bytes).
`/tmp/distmagic-UID-warm.OWNER.KEY.TOKEN/`, gone with a template: its socket and its log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KEPT_DAYS = 7.0
KEPT_BYTES = 2 << 30  # of all jobs, and again of all blobs
FULL_BYTES = 16 << 20  # a disk with less room than this is full
LOG_BYTES = 64 << 20  # of each of a rank's two streams: eight ranks stay well within what is kept of all jobs
REPORTS_BYTES = 16 << 20  # of what a rank reports
LOG_BYTES_NAME = "DISTMAGIC_LOG_BYTES"
_LEAST_LOG_BYTES = 64 << 10
_SETTLED_S = 10.0
_PARTIAL_S = 3600.0
_TIDY_S = 60.0
_TOUCHED_S = 120.0  # agents and templates touch what they need four times in that time
_YOUNG_S = 300.0  # what changed this recently may be in use
_LOOK_S = 5.0  # at jobs, and again at blobs: a notebook waits for its answer meanwhile
_FETCHED = ".fetched"  # beside a result


def home() -> Path:
    """Return the directory of all that is kept. Raises FileNotFoundError where this user has no home directory."""
    path = os.path.expanduser(os.environ.get("DISTMAGIC_HOME") or "~/.distmagic")
    if path.startswith("~"):  # Python leaves it as it is; a directory of that name invites `rm -rf ~`
        raise FileNotFoundError(f"{path} is nowhere: HOME is not set, and this user has no entry in the password file")
    return Path(os.path.abspath(path))


def log_limit_bytes(env: Mapping[str, str] | None = None) -> int:
    """Return how long the log of one stream of a rank may be, as the job's `env` or else this host's says.

    Raises ValueError for a setting that is no such size.
    """
    text = (env or {}).get(LOG_BYTES_NAME) or os.environ.get(LOG_BYTES_NAME) or str(LOG_BYTES)
    if not (text.isascii() and text.isdigit() and int(text) >= _LEAST_LOG_BYTES):
        raise ValueError(f"{LOG_BYTES_NAME}={text[:80]} is no number of bytes of at least {_LEAST_LOG_BYTES:,}")
    return int(text)


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, without those that go just now."""
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size if stat.S_ISREG(path.lstat().st_mode) else 0
    return size


def is_sha256(text: str) -> bool:
    """Whether a text is the name of a blob."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def blob(sha256: str) -> Path:
    """Return the place of a blob, whether or not it is there. Raises ValueError for what is no SHA-256."""
    if not is_sha256(sha256):
        raise ValueError(f"{sha256[:80]!r} is no SHA-256")
    return home() / "blobs" / sha256


def make_private(folder: Path) -> Path:
    """Make a folder of `home()` and home itself, or shut others out where they are there. Raises OSError."""
    for path, shut in ((home(), 0o022), (folder, 0o077)):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
        if found.st_mode & shut:
            path.chmod(stat.S_IMODE(found.st_mode) & ~shut)
    return folder


def is_private(found: os.stat_result) -> bool:
    """Whether this is a file of ours that nobody else may change."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _checked(job: str) -> str:
    if not job.replace("-", "").isalnum():
        raise ValueError(f"{job[:80]!r} is no job")
    return job


def job_dir(job: str, node_rank: int) -> Path:
    """Return the directory of one node of a job, whether or not it is there. Raises ValueError for what is no job."""
    return home() / "jobs" / _checked(job) / f"{node_rank}-{socket.gethostname()}"


def run_dir(job: str, node_rank: int) -> Path:
    """Return the directory of a job's sockets, whether or not it is there. Raises ValueError for what is no job."""
    return Path(f"/tmp/distmagic-{os.getuid()}-{_checked(job)}-{node_rank}")


def run_dirs(job: str) -> tuple[Path, ...]:
    """Return the directories of a job's sockets that are there, of all its nodes; none that others have made."""
    return tuple(path for path in Path("/tmp").glob(f"distmagic-{os.getuid()}-{_checked(job)}-*") if _is_ours(path))


def make_run_dir(job: str, node_rank: int) -> Path:
    """Make the directory of the sockets, 0700. Raises OSError, also if anything of that name is there already."""
    path = run_dir(job, node_rank)
    path.mkdir(mode=0o700)
    return path


TEMPLATE = "template"  # the socket in a template's directory


def warm_dirs(owner: str = "*", key: str = "*") -> tuple[Path, ...]:
    """Return the directories of this user's templates that are there: of one notebook, of one kind."""
    found = Path("/tmp").glob(f"distmagic-{os.getuid()}-warm.{owner}.{key}.*")
    return tuple(path for path in found if _is_ours(path))


def make_warm_dir(owner: str, key: str) -> Path:
    """Make the directory of a new template, 0700. Raises OSError, and ValueError for an owner that can't be one."""
    if not (owner + key).isalnum():
        raise ValueError(f"{owner[:80]!r} is no owner of a template")
    path = Path(f"/tmp/distmagic-{os.getuid()}-warm.{owner}.{key}.{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    return path


def dead_templates() -> list[Path]:
    """Return the directories of templates of this user that were killed."""
    return [path for path in warm_dirs() if _is_deserted(path, TEMPLATE)]


def check_run_dir(path: Path) -> None:
    """Raise PermissionError unless `path` is a directory of ours that nobody else may enter, and no link."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise PermissionError(f"{path} is not a private directory of this user")


def _is_ours(path: Path) -> bool:
    try:
        check_run_dir(path)
    except OSError:
        return False  # gone just now, or another's, who only wants us to believe it
    return True


def dead_runs() -> dict[str, list[Path]]:
    """Return {job: its directories} of this user's jobs whose agents on this host are all gone, without their goodbye."""
    jobs: dict[str, list[tuple[Path, bool]]] = {}
    prefix = f"distmagic-{os.getuid()}-"
    for path in Path("/tmp").glob(f"{prefix}*-*-*"):
        if not _is_ours(path):
            continue
        job = path.name.removeprefix(prefix).rpartition("-")[0]
        jobs.setdefault(job, []).append((path, _is_deserted(path)))
    return {job: [path for path, _ in found] for job, found in jobs.items() if all(dead for _, dead in found)}


def live_runs() -> list[tuple[str, int]]:
    """Return (job, node_rank) of this user's agents on this host."""
    names = [
        path.name.removeprefix(f"distmagic-{os.getuid()}-")
        for path in Path("/tmp").glob(f"distmagic-{os.getuid()}-*-*")
    ]
    return [(job, int(node)) for job, _, node in (name.rpartition("-") for name in names) if node.isdecimal()]


def listens(path: Path) -> bool:
    """Whether a process listens at a unix socket. It need not have time to answer: nothing here waits for it."""
    with socket.socket(socket.AF_UNIX) as conn:
        conn.setblocking(False)
        return conn.connect_ex(str(path)) in (0, errno.EAGAIN)  # the second: it has not taken those before us


def _is_deserted(path: Path, listener: str = "readers") -> bool:
    try:
        if time.time() - path.lstat().st_mtime < _SETTLED_S:
            return False  # its agent may be about to listen, or about to go
    except OSError:
        return False  # gone just now
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path / listener)) in (errno.ECONNREFUSED, errno.ENOENT)


def touch(paths: Iterable[str | Path]) -> None:
    """Make files look young, so that nobody expires them while their job lives. One that is gone makes no job fail."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path)


def tidy() -> None:
    """`expire`, unless somebody has within the last minute: it looks at every file, which takes long where many are."""
    stamp = home() / "tidied"
    with contextlib.suppress(OSError):
        if 0 <= time.time() - stamp.stat().st_mtime < _TIDY_S:
            return
    with contextlib.suppress(OSError):  # no folder yet, or no room
        stamp.touch(mode=0o600)
    expire()


def expire(now: float | None = None) -> None:
    """Remove jobs and blobs that are older than `KEPT_DAYS` or beyond `KEPT_BYTES`, the oldest first.

    A job that still runs is kept, and what it came from: its agent touches them while it lives. The newest job does not
    count against the size, nor does one with results that nobody has fetched, unless the disk is full. On a disk that is
    slow not all is looked at each time.
    """
    now = time.time() if now is None else now
    _expire_jobs(now)
    _expire_blobs(now)


def _expire_jobs(now: float) -> None:
    jobs = sorted(_entries(home() / "jobs"), key=lambda entry: entry.changed_s, reverse=True)
    is_full = bool(jobs) and shutil.disk_usage(home()).free < FULL_BYTES
    kept_bytes = 0
    for number, job in enumerate(jobs):
        age_s = now - job.changed_s
        if age_s > KEPT_DAYS * 86400:
            _remove(job.path)
            continue
        if number == 0 or (job.has_unfetched_results and not is_full):
            continue
        kept_bytes += job.size_bytes
        if kept_bytes > KEPT_BYTES and age_s > _YOUNG_S:
            _remove(job.path)


def _expire_blobs(now: float) -> None:
    blobs = sorted(_entries(home() / "blobs"), key=lambda entry: entry.changed_s, reverse=True)
    # The first blobs of a large payload grow old while the last ones arrive.
    arriving = [
        blob for blob in blobs if is_sha256(blob.path.name.strip(".").partition(".")[0]) and "." in blob.path.name
    ]
    is_receiving = any(now - blob.changed_s <= _YOUNG_S for blob in arriving)
    kept_bytes = 0
    for blob in blobs:
        kept_bytes += blob.size_bytes
        age_s = now - blob.changed_s
        is_partial = len(blob.path.name) != 64  # the process that wrote it was killed
        is_old = age_s > (_PARTIAL_S if is_partial else KEPT_DAYS * 86400)
        is_beyond = kept_bytes > KEPT_BYTES and age_s > _YOUNG_S and not is_receiving
        if is_old or is_beyond:
            _remove(blob.path)


def mark_fetched(result: Path) -> None:
    """Note that a result has been sent to a notebook as a whole. A disk that is full makes no job fail."""
    with contextlib.suppress(OSError):
        result.with_name(result.name + _FETCHED).touch(mode=0o600)


def write_error() -> str:
    """Return why the disk takes no blob at present, "" if it does."""
    trial = home() / "blobs" / f"trial-{secrets.token_hex(6)}"
    try:
        trial.write_bytes(bytes(4096))
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
    return ""


def unused(bundle: str, now: float | None = None) -> list[tuple[Path, int]]:
    """Return the blobs that nobody uses, and their bytes: not this bundle, nor what a living process touches."""
    now = time.time() if now is None else now
    entries = [entry for entry in _entries(home() / "blobs") if entry.path.name != bundle]
    return [(entry.path, entry.size_bytes) for entry in entries if now - entry.changed_s > _TOUCHED_S]


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders, as far as that can be done."""
    for path in paths:
        _remove(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A job's folder, or a blob: when something of it was changed last, in seconds since 1970, and its size."""

    path: Path
    changed_s: float
    size_bytes: int
    has_unfetched_results: bool


def _entries(folder: Path) -> list[_Entry]:
    """Return the entries of a folder that can be looked at, in any order; as many as there is time for."""
    if not folder.is_dir():
        return []
    paths = list(folder.iterdir())
    random.shuffle(paths)  # where there is no time for all, each has its turn
    until = time.monotonic() + _LOOK_S
    found = []
    for path in paths:
        if time.monotonic() > until:
            break
        try:
            files = [path, *path.rglob("*")] if _is_folder(path) else [path]
            stats = {file.relative_to(path): stat for file in files if (stat := _look(file)) is not None}
        except OSError:
            continue  # another contact removes at the same time; or not ours, and then not ours to remove
        if stats:
            entry = _Entry(
                path=path,
                changed_s=max(stat.st_mtime for stat in stats.values()),
                size_bytes=sum(stat.st_size for stat in stats.values()),
                has_unfetched_results=_has_unfetched(stats),
            )
            found.append(entry)
    return found


def _has_unfetched(stats: Mapping[Path, os.stat_result]) -> bool:
    results = [file for file, stat in stats.items() if file.suffix == ".result" and stat.st_size]
    return any(file.with_name(file.name + _FETCHED) not in stats for file in results)


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:  # gone just now, as the old pieces of a log that is written to
        return None


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)  # a link is not followed


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if _is_folder(path) else path.unlink()
    except OSError:
        return  # gone already, or it can't be removed: it makes no run fail

"""The paths of all files on a host.

`~/.distmagic/` (or `$DISTMAGIC_HOME`), kept, with size limits:
    blobs/SHA256          bundles and payloads, content-addressed
    jobs/JOB/NODE-HOST/   journal, logs and results of one node of one job (homes are often shared
                          between hosts), each log within `log_limit_bytes` while the job runs
                          (logs.py)
    work/NAME/            the working directory of all runs with one name (work_dirs.py)
    setup/SETUP-HOST-...  variables of a host after a --setup (request/command_prefix.py)
    envs/NAME/            virtual environments (environments.py)

`/tmp/distmagic-UID-HOST-JOB-NODE/`, removed with the job: sockets (they fail on NFS and with paths
over 107 bytes), the agent's pid. `/tmp/distmagic-UID-HOST-warm.OWNER.KEY.TOKEN/`, removed with a
template: its socket, its pid and its log.

Several hosts may share one /tmp, for example containers on one machine. HOST distinguishes them: no
host finds, contacts or removes files of another one.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import functools
import hashlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

FULL_BYTES = 16 << 20  # a disk with less free space counts as full
# For each of a rank's two streams: eight ranks stay well within the limit for all jobs.
LOG_BYTES = 64 << 20
REPORTS_BYTES = 16 << 20  # for a rank's reports
LOG_BYTES_NAME = "DISTMAGIC_LOG_BYTES"
_LEAST_LOG_BYTES = 64 << 10
_SETTLED_S = 10.0
_FORGOTTEN_S = 86400.0  # agents and templates touch their directories twice a minute
# Hosts that share a kernel and a /tmp differ in one of these: in their processes, network or file
# system.
_VIEWS = ("/proc/self/ns/pid", "/proc/self/ns/net", "/")
# For this kernel since its start.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def home() -> Path:
    """Return the directory of all stored files.

    Raises FileNotFoundError if this user has no home directory.
    """
    path = os.path.expanduser(os.environ.get("DISTMAGIC_HOME") or "~/.distmagic")
    # Python leaves `~` unchanged if it can't expand it; a directory of that name invites `rm -rf
    # ~`.
    if path.startswith("~"):
        raise FileNotFoundError(
            f"{path} is nowhere: HOME is not set, and this user has no entry in the password file"
        )
    return Path(os.path.abspath(path))


def log_limit_bytes(env: Mapping[str, str] | None = None) -> int:
    """Return the size limit of the log of one stream of a rank, from the job's `env` or else from
    this host's.

    Raises ValueError for a setting that is no valid size.
    """
    text = (
        (env or {}).get(LOG_BYTES_NAME)
        or os.environ.get(LOG_BYTES_NAME)
        or str(LOG_BYTES)
    )
    if not (text.isascii() and text.isdigit() and int(text) >= _LEAST_LOG_BYTES):
        raise ValueError(
            f"{LOG_BYTES_NAME}={text[:80]}: the value must be a whole number of bytes, {_LEAST_LOG_BYTES} or more"
        )
    return int(text)


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a shell pattern, in order; none if the folder is
    gone.

    Raises OSError for a temporarily unreadable path, which may be in use. `Path.glob` of Python
    3.13 would skip it.
    """
    found = [folder]
    for part in pattern.split("/"):
        inner = []
        for path in found:
            with suppress(FileNotFoundError, NotADirectoryError):
                inner += [path / name for name in os.listdir(path)]
        found = [path for path in inner if fnmatch.fnmatchcase(path.name, part)]
    return sorted(found)


def lock(file: IO[bytes], how: int) -> None:
    """Lock a file by flock(2), if its file system has locks. Raises OSError."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def file_type(path: Path) -> int:
    """Return the type of a path, as in `stat.S_IFMT`; 0 if it does not exist.

    Raises OSError if the type is temporarily unknown. (`Path.exists` would return False then, and
    the caller would replace the file.)
    """
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def now_at(folder: Path) -> float:
    """Return the time by the clock that dates a folder's files: for a home on a file server, the
    server's clock.

    Ages of files are computed with it, because the clocks of hosts that share a home differ. Raises
    OSError.
    """
    os.utime(folder)
    return folder.stat().st_mtime


def changed_s(path: Path) -> float:
    """Return when a file was last written, in seconds since 1970; 0 if it does not exist.

    Raises OSError.
    """
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def size_below(folder: Path) -> int:
    """Return the bytes of the files below a folder, as far as they are readable."""
    size = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(inner, name)).st_size
    return size


def is_sha256(text: str) -> bool:
    """Whether a text can be the name of a blob."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def blob(sha256: str) -> Path:
    """Return the path of a blob, which may not exist. Raises ValueError for an invalid SHA-256."""
    if not is_sha256(sha256):
        raise ValueError(f"{sha256[:80]!r} is no SHA-256")
    return home() / "blobs" / sha256


def make_private(folder: Path) -> Path:
    """Make a folder of `home()` and home itself, or make existing ones private. Raises OSError."""
    for path, shut in ((home(), 0o022), (folder, 0o077)):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.getuid():
            raise PermissionError(
                f"{path} belongs to another user (uid {found.st_uid})"
            )
        if found.st_mode & shut:
            path.chmod(stat.S_IMODE(found.st_mode) & ~shut)
    return folder


def is_private(found: os.stat_result) -> bool:
    """Whether a file belongs to this user and no other user may change it."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _checked(job: str) -> str:
    if not job.replace("-", "").isalnum():
        raise ValueError(f"{job[:80]!r} is not a job")
    return job


def job_dir(job: str, node_rank: int) -> Path:
    """Return the directory of one node of a job, which may not exist.

    Raises ValueError for an invalid job name.
    """
    return home() / "jobs" / _checked(job) / f"{node_rank}-{socket.gethostname()}"


@functools.cache
def host_id() -> str:
    """Return an ID in hex that distinguishes this host from others with the same kernel and /tmp.

    A reboot changes it.
    """
    words = []
    for view in _VIEWS:
        with suppress(OSError):
            found = os.stat(view)
            words.append(f"{found.st_dev}:{found.st_ino}")
    with suppress(OSError):
        words.append(_BOOT_ID.read_text())
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _prefix() -> str:
    """Return the prefix of all directory names of this user and this host in /tmp."""
    return f"distmagic-{os.getuid()}-{host_id()}-"


def run_dir(job: str, node_rank: int) -> Path:
    """Return the directory of a job's sockets, which may not exist.

    Raises ValueError for an invalid job name.
    """
    return Path(f"/tmp/{_prefix()}{_checked(job)}-{node_rank}")


def run_dirs(job: str) -> tuple[Path, ...]:
    """Return the existing directories of a job's sockets, for all its nodes; none of other
    users.
    """
    return _own_dirs(f"{_prefix()}{_checked(job)}-*")


def make_run_dir(job: str, node_rank: int) -> Path:
    """Make the directory of the sockets, mode 0700.

    Raises OSError, also if anything of that name exists.
    """
    path = run_dir(job, node_rank)
    path.mkdir(mode=0o700)
    return path


TEMPLATE = "template"  # the socket in a template's directory
READERS = "readers"  # the socket in a run directory to which contacts connect
RANKS = "ranks"  # the socket to which ranks connect
# How many connections may wait at either socket while its process loads torch. Each check that it
# listens is one too.
BACKLOG = 1024
# In both directories: pid and start time of the process to which the directory belongs.
PID = "pid"


def warm_dirs(owner: str = "*", key: str = "*") -> tuple[Path, ...]:
    """Return the existing directories of this user's templates, optionally of one owner and key."""
    return _own_dirs(f"{_prefix()}warm.{owner}.{key}.*")


def make_warm_dir(owner: str, key: str) -> Path:
    """Make the directory of a new template, mode 0700.

    Raises OSError, and ValueError for an invalid owner.
    """
    if not (owner + key).isalnum():
        raise ValueError(f"{owner[:80]!r} is not an owner of a template")
    path = Path(f"/tmp/{_prefix()}warm.{owner}.{key}.{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    return path


def check_run_dir(path: Path) -> None:
    """Raise PermissionError unless `path` is a directory, not a link, of this user that no other
    user may enter.
    """
    found = path.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) != 0o700
    ):
        raise PermissionError(f"{path} is not a private directory of this user")


def _own_dirs(pattern: str) -> tuple[Path, ...]:
    """Return the private directories of this user in /tmp whose names match a shell pattern."""
    found = []
    for path in Path("/tmp").glob(pattern):
        # Just removed, or of another user, who may want to deceive this one.
        with suppress(OSError):
            check_run_dir(path)
            found.append(path)
    return tuple(found)


def dead_runs() -> dict[str, list[Path]]:
    """Return {job: its directories} for this user's jobs on this host whose agents were killed."""
    jobs: dict[str, list[Path]] = {}
    for path in _own_dirs(f"{_prefix()}*-*-*"):
        job = path.name.removeprefix(_prefix()).rpartition("-")[0]
        jobs.setdefault(job, []).append(path)
    return {job: found for job, found in jobs.items() if all(map(is_deserted, found))}


def live_runs() -> list[tuple[str, int]]:
    """Return (job, node_rank) of this user's running agents on this host."""
    names = [
        path.name.removeprefix(_prefix()).rpartition("-")
        for path in Path("/tmp").glob(f"{_prefix()}*-*")
    ]
    return [(job, int(node)) for job, _, node in names if node.isdecimal()]


def forgotten() -> list[Path]:
    """Return unused directories in /tmp of this user's other hosts: no process listens in them, and
    they were untouched for a day.

    A rebooted host has a new name in /tmp, so it does not find its old directories itself.
    """
    found = []
    for path in _own_dirs(f"distmagic-{os.getuid()}-*-*"):
        if path.name.startswith(_prefix()):
            continue
        if is_deserted(path, after_s=_FORGOTTEN_S):
            found.append(path)
    return found


def reader_listener(run_dir: Path) -> socket.socket:
    """Return a new socket that listens for contacts in a run directory. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    # An existing socket that refuses connections belongs to an agent that has ended.
    unready = run_dir / f"{READERS}.new"
    try:
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(BACKLOG)
        unready.rename(run_dir / READERS)
    except BaseException:
        listener.close()
        raise
    return listener


def listens(path: Path) -> bool:
    """Whether a process listens at a unix socket.

    It need not answer: this function does not wait for it.
    """
    # EAGAIN: it has not accepted earlier connections yet.
    return _dialled(path) in (0, errno.EAGAIN)


def _dialled(path: Path) -> int:
    """Connect to a unix socket, and return the error number, 0 for success."""
    with socket.socket(socket.AF_UNIX) as conn:
        conn.setblocking(False)
        return conn.connect_ex(str(path))


def is_deserted(path: Path, *, after_s: float = _SETTLED_S) -> bool:
    """Whether no process listens in a directory of sockets, and it is neither new nor about to be
    removed.
    """
    try:
        # A date in the future comes from before the clock was set back.
        if 0 <= time.time() - path.lstat().st_mtime < after_s:
            return False  # its agent may be about to listen, or about to end
    except OSError:
        return False  # just removed
    listener = TEMPLATE if "-warm." in path.name else READERS
    return _dialled(path / listener) in (errno.ECONNREFUSED, errno.ENOENT)


def touch(paths: Iterable[str | Path]) -> None:
    """Set the times of files to now, so that they do not expire while their job lives.

    A missing file is no error.
    """
    for path in paths:
        with suppress(OSError):
            os.utime(path)


def write_error() -> str:
    """Return why the disk accepts no blob now, "" if it does."""
    trial = home() / "blobs" / f"trial-{secrets.token_hex(6)}"
    try:
        trial.write_bytes(bytes(4096))
    except OSError as error:
        return str(error)
    finally:
        with suppress(OSError):
            trial.unlink()
    return ""

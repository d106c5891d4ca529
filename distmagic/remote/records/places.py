"""Where things lie on a host.

`~/.distmagic/` (or `$DISTMAGIC_HOME`), kept and bounded:
    blobs/SHA256          bundles and payloads, content-addressed
    jobs/JOB/NODE-HOST/   journal, logs and results of one node of one job (homes are often shared between hosts),
                          each log within `log_limit_bytes` while the job runs (logs.py)
    work/NAME/            the working directory of the runs of one name (work_dirs.py)
    setup/SETUP-HOST-...  what a --setup did to the variables of a host (request/command_prefix.py)
    envs/NAME/            virtual environments (environments.py)

`/tmp/distmagic-UID-HOST-JOB-NODE/`, gone with the job: sockets (they fail on NFS and beyond 107 bytes), the agent's pid.
`/tmp/distmagic-UID-HOST-warm.OWNER.KEY.TOKEN/`, gone with a template: its socket, its pid and its log.

Several hosts may share one /tmp, as containers on one machine do. HOST keeps them apart: no host finds, asks or removes
what lies there of another one.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import IO

FULL_BYTES = 16 << 20  # a disk with less room than this is full
# Of each of a rank's two streams: eight ranks stay well within what is kept of all jobs.
LOG_BYTES = 64 << 20
REPORTS_BYTES = 16 << 20  # of what a rank reports
LOG_BYTES_NAME = "DISTMAGIC_LOG_BYTES"
_LEAST_LOG_BYTES = 64 << 10
_SETTLED_S = 10.0
_FORGOTTEN_S = 86400.0  # agents and templates touch their directories twice a minute
# Hosts that share a kernel and a /tmp differ in one of these: in the processes, the network or the files that they see.
_VIEWS = ("/proc/self/ns/pid", "/proc/self/ns/net", "/")
# Of this kernel since it was started.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def home() -> Path:
    """Return the directory of all that is kept. Raises FileNotFoundError where this user has no home directory."""
    path = os.path.expanduser(os.environ.get("DISTMAGIC_HOME") or "~/.distmagic")
    # Python leaves it as it is; a directory of that name invites `rm -rf ~`.
    if path.startswith("~"):
        raise FileNotFoundError(
            f"{path} is nowhere: HOME is not set, and this user has no entry in the password file"
        )
    return Path(os.path.abspath(path))


def log_limit_bytes(env: Mapping[str, str] | None = None) -> int:
    """Return how long the log of one stream of a rank may be, as the job's `env` or else this host's says.

    Raises ValueError for a setting that is no such size.
    """
    text = (
        (env or {}).get(LOG_BYTES_NAME)
        or os.environ.get(LOG_BYTES_NAME)
        or str(LOG_BYTES)
    )
    if not (text.isascii() and text.isdigit() and int(text) >= _LEAST_LOG_BYTES):
        raise ValueError(
            f"{LOG_BYTES_NAME}={text[:80]} is not a number of bytes of at least {_LEAST_LOG_BYTES:,}"
        )
    return int(text)


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a shell pattern, in order; none of a folder that is gone.

    Raises OSError for what can't be read just now: it may be in use. `Path.glob` of Python 3.13 passes over it.
    """
    found = [folder]
    for part in pattern.split("/"):
        inner = []
        for path in found:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                inner += [path / name for name in os.listdir(path)]
        found = [path for path in inner if fnmatch.fnmatchcase(path.name, part)]
    return sorted(found)


def lock(file: IO[bytes], how: int) -> None:
    """Lock a file by flock(2), where its file system has locks. Raises OSError."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def file_type(path: Path) -> int:
    """Return what is at a path, as `stat.S_IFMT` tells; 0 where nothing is.

    Raises OSError where that can't be seen just now: `exists` and its like say that nothing is there, and it is replaced.
    """
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def now_at(folder: Path) -> float:
    """Return the time by the clock that dates a folder's files: of a home on a file server that of the server.

    An age of a file is counted from it: the clocks of the hosts that share a home differ. Raises OSError.
    """
    os.utime(folder)
    return folder.stat().st_mtime


def changed_s(path: Path) -> float:
    """Return when a file was written last, in seconds since 1970; 0 where there is none. Raises OSError."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def size_below(folder: Path) -> int:
    """Return the bytes of the files below a folder, as far as they can be seen."""
    size = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(inner, name)).st_size
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
            raise PermissionError(
                f"{path} belongs to another user (uid {found.st_uid})"
            )
        if found.st_mode & shut:
            path.chmod(stat.S_IMODE(found.st_mode) & ~shut)
    return folder


def is_private(found: os.stat_result) -> bool:
    """Whether this is a file of ours that nobody else may change."""
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _checked(job: str) -> str:
    if not job.replace("-", "").isalnum():
        raise ValueError(f"{job[:80]!r} is not a job")
    return job


def job_dir(job: str, node_rank: int) -> Path:
    """Return the directory of one node of a job, whether or not it is there. Raises ValueError for what is no job."""
    return home() / "jobs" / _checked(job) / f"{node_rank}-{socket.gethostname()}"


@functools.cache
def host_id() -> str:
    """Return what tells this host from others with the same kernel and /tmp, in hex. It changes when the host starts."""
    words = []
    for view in _VIEWS:
        with contextlib.suppress(OSError):
            found = os.stat(view)
            words.append(f"{found.st_dev}:{found.st_ino}")
    with contextlib.suppress(OSError):
        words.append(_BOOT_ID.read_text())
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _prefix() -> str:
    """Return how the names of all directories of this user and this host begin in /tmp."""
    return f"distmagic-{os.getuid()}-{host_id()}-"


def run_dir(job: str, node_rank: int) -> Path:
    """Return the directory of a job's sockets, whether or not it is there. Raises ValueError for what is no job."""
    return Path(f"/tmp/{_prefix()}{_checked(job)}-{node_rank}")


def run_dirs(job: str) -> tuple[Path, ...]:
    """Return the directories of a job's sockets that are there, of all its nodes; none that others have made."""
    return tuple(
        path
        for path in Path("/tmp").glob(f"{_prefix()}{_checked(job)}-*")
        if _is_ours(path)
    )


def make_run_dir(job: str, node_rank: int) -> Path:
    """Make the directory of the sockets, 0700. Raises OSError, also if anything of that name is there already."""
    path = run_dir(job, node_rank)
    path.mkdir(mode=0o700)
    return path


TEMPLATE = "template"  # the socket in a template's directory
READERS = "readers"  # the socket in a run directory to which contacts connect
RANKS = "ranks"  # that to which ranks connect
# How many connections may wait at either socket while its process loads torch. Each look whether it listens is one too.
BACKLOG = 1024
PID = (
    "pid"  # in both: number and start time of the process that the directory belongs to
)


def warm_dirs(owner: str = "*", key: str = "*") -> tuple[Path, ...]:
    """Return the directories of this user's templates that are there: of one notebook, of one kind."""
    found = Path("/tmp").glob(f"{_prefix()}warm.{owner}.{key}.*")
    return tuple(path for path in found if _is_ours(path))


def make_warm_dir(owner: str, key: str) -> Path:
    """Make the directory of a new template, 0700. Raises OSError, and ValueError for an owner that can't be one."""
    if not (owner + key).isalnum():
        raise ValueError(f"{owner[:80]!r} is not an owner of a template")
    path = Path(f"/tmp/{_prefix()}warm.{owner}.{key}.{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    return path


def dead_templates() -> list[Path]:
    """Return the directories of templates of this user that were killed."""
    return [path for path in warm_dirs() if is_deserted(path, TEMPLATE)]


def check_run_dir(path: Path) -> None:
    """Raise PermissionError unless `path` is a directory of ours that nobody else may enter, and no link."""
    found = path.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) != 0o700
    ):
        raise PermissionError(f"{path} is not a private directory of this user")


def _is_ours(path: Path) -> bool:
    try:
        check_run_dir(path)
    except OSError:
        return False  # gone just now, or another's, who only wants us to believe it
    return True


def dead_runs() -> dict[str, list[Path]]:
    """Return {job: its directories} of this user's jobs whose agents on this host no longer listen, and left these behind."""
    jobs: dict[str, list[Path]] = {}
    for path in Path("/tmp").glob(f"{_prefix()}*-*-*"):
        if not _is_ours(path):
            continue
        job = path.name.removeprefix(_prefix()).rpartition("-")[0]
        jobs.setdefault(job, []).append(path)
    return {job: found for job, found in jobs.items() if all(map(is_deserted, found))}


def live_runs() -> list[tuple[str, int]]:
    """Return (job, node_rank) of this user's agents on this host."""
    names = [
        path.name.removeprefix(_prefix())
        for path in Path("/tmp").glob(f"{_prefix()}*-*")
    ]
    return [
        (job, int(node))
        for job, _, node in (name.rpartition("-") for name in names)
        if node.isdecimal()
    ]


def forgotten() -> list[Path]:
    """Return the directories of this user's other hosts that nobody uses: nobody listens there, or touched them for a day.

    A host that starts anew has another name in /tmp than before, so it does not find what it left there itself.
    """
    found = []
    for path in Path("/tmp").glob(f"distmagic-{os.getuid()}-*-*"):
        if path.name.startswith(_prefix()) or not _is_ours(path):
            continue
        listener = TEMPLATE if "-warm." in path.name else READERS
        if is_deserted(path, listener, after_s=_FORGOTTEN_S):
            found.append(path)
    return found


def reader_listener(run_dir: Path) -> socket.socket:
    """Return a new socket that listens for contacts in a run directory. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    # A socket that is there and refuses is that of an agent which has ended.
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
    """Whether a process listens at a unix socket. It need not have time to answer: nothing here waits for it."""
    return _dialled(path) in (
        0,
        errno.EAGAIN,
    )  # the second: it has not taken those before us


def _dialled(path: Path) -> int:
    """Return the error number of a connection to a unix socket, 0 for none."""
    with socket.socket(socket.AF_UNIX) as conn:
        conn.setblocking(False)
        return conn.connect_ex(str(path))


def is_deserted(
    path: Path, listener: str = READERS, *, after_s: float = _SETTLED_S
) -> bool:
    """Whether nobody listens in a directory of sockets, and nobody has just made it or is about to go."""
    try:
        # A date in the future is of before the clock was set back.
        if 0 <= time.time() - path.lstat().st_mtime < after_s:
            return False  # its agent may be about to listen, or about to go
    except OSError:
        return False  # gone just now
    return _dialled(path / listener) in (errno.ECONNREFUSED, errno.ENOENT)


def touch(paths: Iterable[str | Path]) -> None:
    """Set the times of files to now, so that they are not expired while their job lives. A missing file is no error."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path)


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

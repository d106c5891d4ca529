"""A secret in a file of the shared home of a job's nodes: node 0 writes it, and removes it when all
have arrived.

    ~/.distmagic/inside/NAME    one text, random, 0600; NAME follows from the job and its step

One node can't know whether others share its home. Only a network file system is assumed to be
shared. The connection then proves it: only a node that has read the current node 0's file knows its
text. A file from an earlier start of the job, or from another machine, is useless.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from distmagic.remote.records import places
from distmagic.remote.records.atomic_file import atomic_write

# Names in /proc/self/mountinfo. Containers have their own disk as overlay, a node's disk is ext4,
# xfs, tmpfs, ...
NETWORK_TYPES = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "orangefs", "pvfs2", "afs", "cifs", "smb3",
     "gfs2", "ocfs2", "glusterfs", "9p", "virtiofs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs",
     "fuse.juicefs", "fuse.beegfs", "fuse.quobyte", "fuse.moosefs", "fuse.mfs")
)  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")
_LONGEST = 1024
_KEPT_S = 30 * 86400.0  # for the file of a killed node 0; jobs are shorter


def is_there(mounts: Path = _MOUNTS) -> bool:
    """Whether the home is on a file system that other nodes share, and is writable."""
    home = Path(os.path.expanduser("~"))
    try:
        return os.access(home, os.W_OK) and _type_of(home, mounts) in NETWORK_TYPES
    except OSError:
        return False


def _type_of(folder: Path, mounts: Path) -> str:
    """Return the type of the file system of a folder, "" if unknown. Raises OSError."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def _path(key: str) -> Path:
    """Return the file for a job's step, whatever characters its name has."""
    return places.home() / "inside" / hashlib.sha256(key.encode()).hexdigest()[:32]


def offer(key: str) -> str:
    """Write a new secret for the nodes of a job, replacing one from an earlier start, and return
    it.

    Raises OSError.
    """
    path = _path(key)
    folder = places.make_private(path.parent)
    now = places.now_at(folder)
    for other in folder.iterdir():
        with suppress(OSError):  # gone just now
            if now - other.lstat().st_mtime > _KEPT_S:
                other.unlink()
    text = secrets.token_hex(32)
    with atomic_write(path) as file:
        file.write(text.encode())
    return text


def find(key: str) -> str:
    """Return the secret that node 0 has written.

    Raises OSError if there is none, or other users can read or change it.
    """
    path = _path(key)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OSError(
            f"node 0 has left no secret in {path.parent}, so the nodes may have separate home directories"
        ) from None
    with open(descriptor, encoding="ascii") as file:
        about = os.fstat(descriptor)
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        return file.read(_LONGEST)


def withdraw(key: str, text: str) -> None:
    """Remove the secret of a job, unless a later node 0 has written another one."""
    with suppress(OSError):
        if find(key) == text:
            _path(key).unlink()

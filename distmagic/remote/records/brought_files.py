"""Lists the files that `%distributed put` has copied to this host, so that `clean` can remove them.

For each file or folder that a user has copied:

    ~/.distmagic/brought/KEY-HOST/
        root      the origin (see names.py) and the path, a line each
        owners    the owners that have copied something of it
        files     size, time and path of each copied file, a line each
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from distmagic.remote.records import listing, owners, places
from distmagic.remote.records.atomic_file import atomic_write
from distmagic.remote.wire import file_names
from distmagic.remote.wire.protocol import KeptWorkDir

# Units in which file systems keep dates: CIFS 100 ns, some NFS servers 1 us, Lustre 1 s.
_UNITS_NS = (1, 100, 1000, 1_000_000_000)


def place(sha256: str, target: str, mode: int, *, keeps: bool) -> None:
    """Turn a blob into a file of the user; with `keeps` it also remains a blob. Raises OSError."""
    blob = places.blob(sha256)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    if not keeps and _has_group_for(blob, folder):
        blob.chmod(mode)
        try:
            os.replace(blob, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return
    # Other hosts may share the blob. It is removed when it is old, or when there are too many.
    with blob.open("rb") as source, atomic_write(Path(target)) as file:
        shutil.copyfileobj(source, file, 1 << 20)
        os.fchmod(file.fileno(), mode)


def _has_group_for(blob: Path, folder: str) -> bool:
    """Give a blob the group of a setgid folder, which new files in that folder get; return whether
    the blob has it.
    """
    status = os.stat(folder)
    if status.st_mode & stat.S_ISGID:
        try:
            os.chown(blob, -1, status.st_gid)
        except OSError:
            return False
    return True


def has_look(path: str, size_bytes: int, mode: int, changed_ns: int) -> bool:
    """Whether a regular file has this size, these permissions and this last change in
    nanoseconds, as far as its file system keeps them.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return False
    found = stat.S_ISREG(status.st_mode), status.st_size, stat.S_IMODE(status.st_mode)
    if found != (True, size_bytes, mode):
        return False
    return any(
        status.st_mtime_ns == changed_ns // unit_ns * unit_ns for unit_ns in _UNITS_NS
    )


def set_look(path: str, mode: int, changed_ns: int) -> None:
    """Give a copy the permissions and the last change of its source, by which `has_look` finds it
    unchanged.

    A file of another user keeps its own, and is compared by its content the next time.
    """
    with suppress(OSError):
        os.chmod(path, mode)
        os.utime(path, ns=(changed_ns, changed_ns))


def share(root: str, owner: str) -> None:
    """Record that an owner also uses a copied file or folder that is on this host already, and that
    it was used now. Raises OSError.

    A host with the same home may have copied it: its list becomes that of this host, too. Without
    any list it was not copied by `put`.
    """
    about = _about(os.path.normpath(root))
    if not about.exists():
        key = about.name.partition("-")[0]
        for other in places.matching(about.parent, f"{key}-*")[:1]:
            shutil.copytree(other, about, dirs_exist_ok=True)
    if about.exists():
        owners.note(about, owner)
        places.touch([about / "files"])


def note(folder: str, paths: Sequence[str], origin: str, owner: str) -> None:
    """Record that these files below a folder were copied to this host. Raises OSError."""
    # By the copied file or folder: the first part of a path.
    lines: dict[str, list[str]] = {}
    for path in paths:
        status = os.lstat(os.path.join(folder, path))
        root = os.path.normpath(os.path.join(folder, path.partition("/")[0]))
        inner = file_names.quoted(path.partition("/")[2])
        line = f"{status.st_size} {status.st_mtime_ns} {inner}\n"
        lines.setdefault(root, []).append(line)
    for root, found in lines.items():
        about = _about(root)
        places.make_private(about.parent)
        about.mkdir(mode=0o700, exist_ok=True)
        with atomic_write(about / "root") as file:
            file.write(os.fsencode(f"{origin}\n{root}"))
        owners.note(about, owner)
        with open(about / "files", "a", encoding="ascii") as text:
            text.writelines(found)


def kept() -> Iterator[KeptWorkDir]:
    """Yield the copied files that still exist unchanged.

    They count as in use while any job runs on this host.
    """
    for about in places.matching(_folder(), f"*-{socket.gethostname()}"):
        with suppress(OSError):
            origin, _, root = os.fsdecode((about / "root").read_bytes()).partition("\n")
            sizes = [os.lstat(path).st_size for path in _unchanged(about, root)]
            age_s = places.now_at(about.parent) - (about / "files").stat().st_mtime
            if not sizes:
                shutil.rmtree(about)
                continue
            yield KeptWorkDir(
                name=root,
                origin=origin,
                owners=owners.of(about),
                size_bytes=sum(sizes),
                age_s=max(0.0, age_s),
                is_used=bool(listing.running()),
            )


def remove(root: str) -> int:
    """Remove copied files that are unchanged, and folders that are empty then; return the bytes.

    Raises OSError.
    """
    about = _about(root)
    size = 0
    for path in _unchanged(about, root):
        size += os.lstat(path).st_size
        os.unlink(path)
        folder = os.path.dirname(path)
        with suppress(OSError):  # it has more files, perhaps of another origin
            while folder.startswith(root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)
    shutil.rmtree(about, ignore_errors=True)
    return size


def _folder() -> Path:
    return places.home() / "brought"


def _about(root: str) -> Path:
    """Return the folder of one file's or folder's list.

    It includes the host, because homes may be shared and paths may differ.
    """
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return _folder() / f"{key}-{socket.gethostname()}"


def _unchanged(about: Path, root: str) -> Iterator[str]:
    """Yield the files of a list that are unchanged. Raises OSError if there is no list."""
    latest: dict[str, tuple[int, int]] = {}
    for line in (about / "files").read_text("ascii").splitlines():
        # A full disk may have cut a line; the next one then follows it.
        with suppress(ValueError):
            size, time_ns, inner = line.split(" ")
            latest[inner] = int(size), int(time_ns)
    for inner, looks in latest.items():
        path = os.path.join(root, file_names.unquoted(inner)) if inner else root
        with suppress(OSError):
            status = os.lstat(path)
            if (status.st_size, status.st_mtime_ns) == looks:
                yield path

"""Virtual environments that this host has made for notebooks, in ~/.distmagic/envs, for reuse.

    NAME            a link to the environment that was last synced under this name
    .DIGEST/        an environment: the digest is of its packages and of its Python
        ready       written when all packages are installed; without it the environment is never
                    used
        owners      the owners that have requested it, a line each
        tmp/        temporary files of the installers
    .DIGEST-TOKEN/  the same, made by a host that did not see another host's lock
    .DIGEST.lock    held while it is made

An environment is made at its final path, because the programs in its `bin` contain that path. The
link with its name appears last, atomically. Hosts with the same home and the same Python share an
environment. Other files in this folder are the user's.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.records import owners, places
from distmagic.remote.records.atomic_file import atomic_write

# Writes a uv.lock as requirements into the file named next; the project itself is left out, because
# its modules are sent with each run.
UV_EXPORT = (
    "export", "--frozen", "--quiet", "--no-emit-project", "--no-emit-workspace",
    "--format", "requirements.txt", "--output-file",
)  # fmt: skip
_DIGEST = re.compile(r"\.[0-9a-f]{16}(-[0-9a-f]{8})?")
_DIGEST_CHARS = 17  # with the dot
# Of this process, for its whole life: the link of a name may change later.
_OWN = Path(os.path.realpath(sys.prefix))
_IN_USE_S = 120.0  # contacts, agents and templates touch theirs four times in that time


def root() -> Path:
    """Return the folder of all environments, which may not exist."""
    return places.home() / "envs"


def base_python() -> str:
    """Return the Python for new environments: this one, or the one of which it is an
    environment.
    """
    return getattr(sys, "_base_executable", "") or sys.executable


def digest(packages: object) -> str:
    """Return the name of the environment with these packages, given as any JSON value."""
    python = (base_python(), sys.version, platform.machine(), platform.libc_ver())
    text = json.dumps((packages, python), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@frozen
class Environment:
    """One environment, which may not exist yet."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def is_ready(self) -> bool:
        """Whether the environment is complete.

        Raises OSError if that is unknown: one that can't be read for a while may be in use.
        """
        try:
            return bool((self.path / "ready").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return False

    @property
    def tmp(self) -> Path:
        """Temporary files of its installers; a killed pip leaves its downloads in them."""
        return self.path / "tmp"

    def finish(self) -> None:
        """Mark the environment as complete. Raises OSError."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        about = {"size_bytes": places.size_below(self.path)}
        with atomic_write(self.path / "ready") as file:
            file.write(json.dumps(about).encode())

    def size_bytes(self) -> int:
        """Return its size in bytes, even if it is incomplete."""
        try:
            return int(json.loads((self.path / "ready").read_text())["size_bytes"])
        except (OSError, ValueError, KeyError):
            return places.size_below(self.path)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Yield whether this process has locked the environment: then no other process of this
        host makes it within the block.

        Nor does a process of another host, unless each host has its own locks, or the home has
        none. Raises OSError.
        """
        with open(self._lock, "wb") as file:
            try:
                places.lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Otherwise the environment was removed, with its lock, since the file was opened.
                is_free = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
            except (BlockingIOError, FileNotFoundError):
                is_free = False
            yield is_free

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name[:_DIGEST_CHARS]}.lock")

    def name_it(self, name: str) -> None:
        """Make a name link to it. Raises OSError."""
        check_name(name)
        aside = root() / f".{secrets.token_hex(6)}.link"
        aside.symlink_to(self.path.name)
        try:
            os.replace(aside, root() / name)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def find(digest: str) -> Environment | None:
    """Return the complete environment of a digest, if any. Raises OSError if that is unknown."""
    return next((one for one in _made(digest) if one.is_ready()), None)


def _made(digest: str) -> list[Environment]:
    """Return the environments of a digest, including incomplete ones. Raises OSError."""
    found = places.matching(root(), f".{digest}*")
    return [Environment(path=path) for path in found if _DIGEST.fullmatch(path.name)]


def begin(digest: str) -> Environment:
    """Make the folder of a new environment, after removing incomplete ones. Raises OSError."""
    now = places.now_at(root())
    for half in _made(digest):
        if not half.is_ready() and now - half.path.stat().st_mtime > _IN_USE_S:
            shutil.rmtree(half.path)
    path = root() / f".{digest}"
    try:
        path.mkdir()
    except FileExistsError:  # another host is making it now
        path = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        path.mkdir()
    return Environment(path=path)


def check_name(name: str) -> None:
    """Raise FileExistsError if this name exists and is not one of distmagic's links."""
    path = root() / name
    if places.file_type(path) and not _is_link_of_ours(path):
        raise FileExistsError(
            f"{path} exists, and env sync did not create it: move it away, or choose another --name"
        )


def touch_own() -> None:
    """Mark the environment of this process as in use, if distmagic made it."""
    with suppress(OSError):
        if _OWN.parent.samefile(root()):
            places.touch([_OWN])


def unused(older_s: float, now: float, owner: str = "") -> list[tuple[Path, int]]:
    """Return the environments that were unused for so long, but at least two minutes, and their
    bytes.

    With an `owner`, only those that no other owner has requested.
    """
    found = []
    for path in root().glob(".*"):
        with suppress(OSError):
            age_s = now - path.lstat().st_mtime
            is_ours = _DIGEST.fullmatch(path.name) and not path.is_symlink()
            if owner and owners.of(path) != (owner,):
                continue
            if is_ours and path.is_dir() and age_s > max(older_s, _IN_USE_S):
                found.append((path, Environment(path=path).size_bytes()))
    return found


def remove(path: Path) -> None:
    """Remove an environment and the names that link to it, unless it is being made or in use."""
    with suppress(OSError), Environment(path=path).locked() as is_free:
        # Removing earlier ones may have taken long, and a job may have started in it since.
        age_s = places.now_at(root()) - path.lstat().st_mtime
        if not is_free or age_s < _IN_USE_S:
            return
        (path / "ready").unlink(missing_ok=True)  # first: an incomplete one is not used
        shutil.rmtree(path)
        Environment(path=path)._lock.unlink(missing_ok=True)  # noqa: SLF001
    for link in root().glob("[!.]*"):
        with suppress(OSError):
            if _is_link_of_ours(link) and not places.file_type(link.resolve()):
                link.unlink(missing_ok=True)


def _is_link_of_ours(path: Path) -> bool:
    return path.is_symlink() and bool(_DIGEST.fullmatch(os.readlink(path)))

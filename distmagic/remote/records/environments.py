"""Virtual environments that this host has made for notebooks, kept and used again.

    ~/.distmagic/envs/NAME            a link to the environment that was synced last under this name
    ~/.distmagic/envs/.DIGEST/        an environment: the digest is that of the packages and of the Python it is made with
        ready                         written when all packages are there; without it the environment is never used
        owners                        who has asked for it, a line each
        tmp/                          what the installers write meanwhile
    ~/.distmagic/envs/.DIGEST-TOKEN/  the same, by a host that did not see the lock of another one, which makes it as well
    ~/.distmagic/envs/.DIGEST.lock    held while it is made

It is made where it stays, because the programs in its `bin` name their own path. What appears last and at once is the
link of its name. Hosts of one home with the same Python share an environment. What else is in this folder is the user's.
"""

from __future__ import annotations

import contextlib
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distmagic.remote.records import owners, places
from distmagic.remote.records.atomic_file import atomic_write

# Writes a uv.lock as requirements into the file that is named next; the project itself is left out: its modules travel with each run.
UV_EXPORT = (
    "export", "--frozen", "--quiet", "--no-emit-project", "--no-emit-workspace",
    "--format", "requirements.txt", "--output-file",
)  # fmt: skip
_DIGEST = re.compile(r"\.[0-9a-f]{16}(-[0-9a-f]{8})?")
_DIGEST_CHARS = 17  # with the dot
# Of this process, as long as it lives: the link of a name may lead elsewhere later.
_OWN = Path(os.path.realpath(sys.prefix))
_IN_USE_S = 120.0  # contacts, agents and templates touch theirs four times in that time


def root() -> Path:
    """Return the folder of all environments, whether or not it is there."""
    return places.home() / "envs"


def base_python() -> str:
    """Return the Python to make environments with: this one, or that of which it is an environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def digest(packages: object) -> str:
    """Return the name of the environment with these packages, which are anything that JSON can hold."""
    python = (base_python(), sys.version, platform.machine(), platform.libc_ver())
    text = json.dumps((packages, python), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment, whether or not it is there."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def is_ready(self) -> bool:
        """Whether all of it is there. Raises OSError where that can't be told: what can't be read just now may be in use."""
        try:
            return bool((self.path / "ready").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return False

    @property
    def tmp(self) -> Path:
        """What its installers write meanwhile; pip leaves there what it has fetched when it is ended."""
        return self.path / "tmp"

    def finish(self) -> None:
        """Note that all of it is there. Raises OSError."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        about = {"size_bytes": places.size_below(self.path)}
        with atomic_write(self.path / "ready") as file:
            file.write(json.dumps(about).encode())

    def size_bytes(self) -> int:
        """Return the bytes of it; of one that was never finished those that are there."""
        try:
            return int(json.loads((self.path / "ready").read_text())["size_bytes"])
        except (OSError, ValueError, KeyError):
            return places.size_below(self.path)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Give whether nobody else is making it; if so, nobody else of this host can within the block. Raises OSError.

        Nor can one of another host, unless each host has locks of its own, or the home has none.
        """
        with open(self._lock, "wb") as file:
            try:
                places.lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Else the environment was removed, and its lock with it, since the file was opened.
                is_free = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
            except (BlockingIOError, FileNotFoundError):
                is_free = False
            yield is_free

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name[:_DIGEST_CHARS]}.lock")

    def name_it(self, name: str) -> None:
        """Have a name lead to it. Raises OSError."""
        check_name(name)
        aside = root() / f".{secrets.token_hex(6)}.link"
        aside.symlink_to(self.path.name)
        try:
            os.replace(aside, root() / name)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def find(digest: str) -> Environment | None:
    """Return the environment of a digest that is ready, if there is one. Raises OSError where that can't be told."""
    return next((one for one in _made(digest) if one.is_ready()), None)


def _made(digest: str) -> list[Environment]:
    """Return the environments of a digest, with those that are not finished. Raises OSError."""
    found = places.matching(root(), f".{digest}*")
    return [Environment(path=path) for path in found if _DIGEST.fullmatch(path.name)]


def begin(digest: str) -> Environment:
    """Make the folder of a new environment, after removing what others have not finished. Raises OSError."""
    now = places.now_at(root())
    for half in _made(digest):
        if not half.is_ready() and now - half.path.stat().st_mtime > _IN_USE_S:
            shutil.rmtree(half.path)
    path = root() / f".{digest}"
    try:
        path.mkdir()
    except FileExistsError:  # another host makes it just now
        path = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        path.mkdir()
    return Environment(path=path)


def check_name(name: str) -> None:
    """Raise FileExistsError where something else than one of our links has this name."""
    path = root() / name
    if places.file_type(path) and not _is_link_of_ours(path):
        raise FileExistsError(
            f"{path} exists, and env sync did not create it: move it away, or choose another --name"
        )


def touch_own() -> None:
    """Note that the environment of this process is in use, if it is one of ours."""
    with contextlib.suppress(OSError):
        if _OWN.parent.samefile(root()):
            places.touch([_OWN])


def unused(older_s: float, now: float, owner: str = "") -> list[tuple[Path, int]]:
    """Return the environments that nobody has used for so long, but at least two minutes, and their bytes.

    With an `owner` only those that nobody else has asked for.
    """
    found = []
    for path in root().glob(".*"):
        with contextlib.suppress(OSError):
            age_s = now - path.lstat().st_mtime
            is_ours = _DIGEST.fullmatch(path.name) and not path.is_symlink()
            if owner and owners.of(path) != (owner,):
                continue
            if is_ours and path.is_dir() and age_s > max(older_s, _IN_USE_S):
                found.append((path, Environment(path=path).size_bytes()))
    return found


def remove(path: Path) -> None:
    """Remove an environment, unless somebody is making it, or uses it by now; and the names that lead to it."""
    with contextlib.suppress(OSError), Environment(path=path).locked() as is_free:
        # Those before it may have taken long to remove, and a job have begun in it since they were found.
        age_s = places.now_at(root()) - path.lstat().st_mtime
        if not is_free or age_s < _IN_USE_S:
            return
        (path / "ready").unlink(missing_ok=True)  # first: half of it is not used
        shutil.rmtree(path)
        Environment(path=path)._lock.unlink(missing_ok=True)  # noqa: SLF001
    for link in root().glob("[!.]*"):
        with contextlib.suppress(OSError):
            if _is_link_of_ours(link) and not places.file_type(link.resolve()):
                link.unlink(missing_ok=True)


def _is_link_of_ours(path: Path) -> bool:
    return path.is_symlink() and bool(_DIGEST.fullmatch(os.readlink(path)))

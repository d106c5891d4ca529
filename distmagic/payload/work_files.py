"""Collects the files for a run's working directory on hosts: a folder of this machine, and the
call's local modules.

The place of a folder's files depends on its path relative to the current directory. Ranks start in
the directory that corresponds to the current one, so that relative paths have the same meaning on
hosts.

    the folder is               its files go to          ranks begin in
    the current directory       the working directory    the same
    below it: src/data          src/data                 the working directory
    above it (current: nb/)     the working directory    nb
    elsewhere                   the working directory    the same
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from distmagic.errors import PayloadError, UsageError
from distmagic.payload import blobs
from distmagic.payload.folder import (
    Contents,
    add_folder,
    check_size,
    contents_of,
    file_of,
)
from distmagic.payload.local_modules import LocalModule, python_files
from distmagic.payload.pack import Payload
from distmagic.payload.sizes import plural, size_text
from distmagic.payload.tree import packed

_IGNORE_FILE = ".distmagicignore"
_LARGE_BYTES = 50_000_000
_SNAPSHOTS = (".pt", ".pth", ".ckpt", ".safetensors")
# The last part of a path, or a whole name, at the end of a Python string.
_END_OF_STRING = re.compile(r"""([^'"/\\\n]+)['"]""")


def place_of(folder: Path, current: Path) -> tuple[str, str]:
    """Return (place of a folder's files, start directory of ranks), both below the working
    directory, "" for itself.
    """
    if folder.is_relative_to(current):
        return _inner(folder, current), ""
    if current.is_relative_to(folder):
        return "", _inner(current, folder)
    return "", ""


def _inner(path: Path, above: Path) -> str:
    inner = path.relative_to(above).as_posix()
    return "" if inner == "." else inner


def with_tree(
    payload: Payload, sync: str | None, current: Path, *, is_fresh: bool = False,
) -> Payload:  # fmt: skip
    """Return a payload with all files that hosts need.

    `sync` is the folder that the user has named, instead of a script's own. Raises `UsageError` for
    a path that is no folder or is the user's home, and `PayloadError`, or `PayloadTooLarge` above
    the payload's limit.
    """
    folder = named_folder(sync, payload.folder)
    contents, owned, inside = gather(folder, payload.modules, current, payload.script)
    if not owned:
        return payload
    if folder is not None:
        what = f"The folder {folder.resolve()}"
    else:
        names = ", ".join(module.name for module in payload.modules)
        what = f"The local package{'s' if len(payload.modules) > 1 else ''} {names}"
    check_size(contents, payload.limit_bytes, what)
    tree = packed(contents, sorted(set(owned)), blobs.folder(), inside)
    notices = [payload.notice, _large(contents, what) if sync is None else ""]
    if contents.private:
        first = _first_of(contents.private)
        notices.append(
            f"not sent: {first} (keys and distmagic's own files never leave this machine)"
        )
    if contents.left_out:
        why = "links that lead" if len(contents.left_out) > 1 else "a link that leads"
        notices.append(
            f"not sent: {_first_of(contents.left_out)} ({why} out of the folder)"
        )
    notices.append(_ignored_but_named(contents))
    snapshots = [path for path in contents.files if path.endswith(_SNAPSHOTS)]
    if is_fresh and snapshots:
        notices.append(
            f"--fresh empties the working directory, and the folder brings {_first_of(snapshots)}: a program may resume from it"
        )
    notice = "; ".join(text for text in notices if text)
    return replace(payload, tree=tree, notice=notice)


def _large(contents: Contents, what: str) -> str:
    """Return a notice that much is sent that the user has not named, "" if it is little."""
    if contents.size_bytes < _LARGE_BYTES:
        return ""
    size, count = size_text(contents.size_bytes), len(contents.files)
    return (
        f"{what} travels, {size} in {plural(count, 'file')}, once to each host: what hosts don't need can stand in "
        f"{_IGNORE_FILE}, written as .gitignore"
    )


def gather(
    folder: Path | None,
    modules: Iterable[LocalModule],
    current: Path,
    script: Path | None = None,
) -> tuple[Contents, list[str], str]:
    """Return the files to send, the paths on the hosts that this run owns, and the ranks' directory
    within them.

    `script` must be in `folder`. Raises the errors of `with_tree`, except the size limit.
    """
    contents = Contents()
    owned = []
    inside = ""
    if folder is not None:
        folder, current = folder.resolve(), current.resolve()
        _check_not_home(folder, script)
        at, inside = place_of(folder, current)
        add_folder(contents, folder, at)
        owned.append(at)
        _check_script(script, contents)
    owned += [add_module(contents, module) for module in modules]
    # A package's own rules leave out what the folder, or the import, brings.
    sent = contents.files.keys() | contents.links.keys()
    for left in (contents.left_out, contents.ignored):
        left[:] = [path for path in dict.fromkeys(left) if path not in sent]
    return contents, owned, inside


def named_folder(sync: str | None, own: Path | None) -> Path | None:
    """Return the folder after `--sync`, else the program's own.

    Raises `UsageError` if it is none.
    """
    if sync is None:
        return own
    folder = Path(os.path.expanduser(sync))
    if not folder.is_dir():
        raise UsageError(
            f"--sync {sync}: there is no such folder on this machine.",
            "Name a folder of this machine.",
        )
    return folder


def new_folder(text: str, where: str) -> Path:
    """Return a folder of this machine, which may not exist.

    Raises `UsageError` naming `where` for an unknown home.
    """
    folder = os.path.expanduser(text)
    # Python leaves `~name` of an unknown user unchanged; a folder of that name invites `rm -rf ~`.
    if folder.startswith("~"):
        raise UsageError(
            f"{where} can't find the folder {text}: this machine has no such home directory.",
            "Name the folder by its full path.",
        )
    return Path(folder)


def may_travel(folder: Path, limit_bytes: int) -> bool:
    """Whether `with_tree` would accept a folder that the user has not named: no home, not too
    large, and readable.
    """
    try:
        _check_not_home(folder, None)
        return contents_of(folder).size_bytes <= limit_bytes
    except (UsageError, PayloadError):
        return False


def check_folder(payload: Payload, sync: str | None) -> None:
    """Raise `UsageError` if `with_tree` would reject the folder regardless of its content, before
    waiting for hosts.
    """
    folder = named_folder(sync, payload.folder)
    if folder is not None:
        _check_not_home(folder.resolve(), payload.script)


def _check_not_home(folder: Path, script: Path | None) -> None:
    """Raise `UsageError` for the user's home: hosts must not get keys, passwords and everything
    else in it.

    An ignore file in the home allows it.
    """
    home = os.path.expanduser("~")  # unchanged if this user is unknown
    if not Path(home).is_absolute() or (folder / _IGNORE_FILE).exists():
        return
    home = os.path.realpath(home)
    if not Path(home).is_relative_to(folder):
        return
    what = "is" if str(folder) == home else "contains"
    cure = "Name a folder that has only what hosts need"
    if script is not None:
        cure = f"Put {script.name} into a folder of its own, with what it needs, or name another folder that has it"
    raise UsageError(
        f"The folder {folder} {what} your home directory; it is not sent to hosts.",
        f"{cure}: --sync DIR. Or list the files to leave out in its {_IGNORE_FILE}.",
    )


def _check_script(script: Path | None, contents: Contents) -> None:
    if script is None or any(file.path == script for file in contents.files.values()):
        return
    raise PayloadError(
        f"The script {script} is not sent to hosts: an ignore file names it, or it is a link that leads out of its folder.",
        f"Write !{script.name} in a .distmagicignore next to it, or run the file that the link leads to.",
    )


def add_module(contents: Contents, module: LocalModule) -> str:
    """Add the files of a local module at their import path; return their place."""
    path = f"{module.at}/{module.name}" if module.at else module.name
    if module.file is not None:
        path = _led_to(f"{path}.py", contents)
        contents.files[path] = file_of(module.file)
        return path
    path = _led_to(path, contents)
    for place in module.places:
        add_folder(contents, place, path)
        # Including files that git ignores, such as a generated _version.py.
        for file in python_files(place):
            inner = _led_to(f"{path}/{file.relative_to(place).as_posix()}", contents)
            contents.files[inner] = file_of(file)
    return path


def _led_to(path: str, contents: Contents) -> str:
    """Return the path to which a link leads, or `path` if no link is sent under that name."""
    target = contents.links.get(path)
    if target is None:
        return path
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _ignored_but_named(contents: Contents) -> str:
    """Return a notice about files that .gitignore excludes although the code that is sent names
    them.
    """
    if not contents.ignored:
        return ""
    in_code = set()
    for path, file in contents.files.items():
        if path.endswith(".py"):
            text = file.path.read_text(encoding="utf-8", errors="replace")
            in_code.update(_END_OF_STRING.findall(text))
    named = [path for path in contents.ignored if path.rpartition("/")[2] in in_code]
    if not named:
        return ""
    them = "them" if len(named) > 1 else "it"
    return (
        f"not sent: {_first_of(named)} (.gitignore excludes {them}, but the code names {them}; a .distmagicignore "
        f"can send {them}, %distributed help files)"
    )


def _first_of(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")

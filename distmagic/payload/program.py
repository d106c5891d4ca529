"""Packs a script, or a module, for every rank, with its folder."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.payload import on_ranks
from distmagic.payload.folder import content_of
from distmagic.payload.local_modules import LocalModule, found, imports_of_text
from distmagic.payload.pack import Payload, dumped, write_code
from distmagic.payload.work_files import may_travel, place_of
from distmagic.remote.values.call import Script
from distmagic.remote.values.seen import Seen
from distmagic.request.flags import Program

# below the working directory: modules that a program imports from elsewhere on this machine
_MODULES = ".local-modules"


def pack_program(
    program: Program,
    *,
    sync: str | None,
    current: Path,
    limit_bytes: int,
) -> Payload:
    """Pack a program. `sync` is the folder that the user has named, if any, `current` the current
    directory.

    Raises `UsageError` if the script does not exist.
    """
    current = current.resolve()
    script = None if program.is_module else _file_of(program.target, current)
    own = current if script is None else script.parent
    folder = _folder(program, script, current, limit_bytes)
    named = Path(os.path.expanduser(sync)).resolve() if sync else folder
    modules, roots = _modules(program, script, named, current)
    call = Script(program.target, program.args, is_module=True)
    if script is not None:
        call = _script(program, script, named or own, current)
    start = script or _file_of_module(program.target, current)
    shown = on_ranks.look(on_ranks.of_program(start, own) if start else ())
    return Payload(
        call=dumped(replace(call, roots=roots), Seen(), None),
        code=write_code(modules, {}, {}, shown),
        modules=tuple(one for one in modules if one.at),
        folder=folder,
        roots=roots,
        script=script,
        name=program.target if script is None else script.stem,
        notice=shown.notice,
        title=shlex.join([program.target, *program.args]),
        limit_bytes=limit_bytes,
    )


def _folder(
    program: Program, script: Path | None, current: Path, limit_bytes: int
) -> Path | None:
    """Return the folder to send: the current directory, to which paths are relative, unless the
    program is outside of it.

    If that can't be sent, it is the script's own folder, or none for a module that hosts have
    installed.
    """
    own = None
    top = current / program.target.partition(".")[0]
    if script is not None:
        own = script.parent
    elif top.is_dir() or top.with_name(f"{top.name}.py").is_file():
        own = current  # otherwise hosts have it installed
    if own == current or (own is not None and not own.is_relative_to(current)):
        return own
    return current if may_travel(current, limit_bytes) else own


def _modules(
    program: Program, script: Path | None, folder: Path | None, current: Path
) -> tuple[tuple[LocalModule, ...], tuple[str, ...]]:
    """Return the local modules that a program imports, and the directories to import from, below
    the working directory.

    A module in the sent folder is imported from it; another one has `at` set, and is sent
    separately.
    """
    own = current if script is None else script.parent
    names = [program.target]
    if script is not None:
        names = list(imports_of_text(content_of(script)))
    modules, roots = [], []
    at = place_of(folder, current)[0] if folder is not None else ""
    for one in found(names, own, current):
        root, place = one.root.resolve(), _MODULES
        if root == own:
            continue  # Python finds it without help
        if folder is not None and root.is_relative_to(folder):
            place = posixpath.join(at, root.relative_to(folder).as_posix())
            modules.append(one)
        else:
            modules.append(replace(one, at=_MODULES))
        roots.append(place)
    return tuple(modules), tuple(dict.fromkeys(roots))


def placed(program: Program, folder: Path | None, current: Path) -> str:
    """Return the name by which ranks run a program of this folder, from where they start.

    Raises the errors of `pack_program`.
    """
    if program.is_module:
        return program.target
    current = current.resolve()
    script = _file_of(program.target, current)
    folder = folder or script.parent
    call = _script(program, script, folder, current)
    _, inside = place_of(folder.resolve(), current)
    return call.shown or posixpath.relpath(call.path, inside or ".")


def _file_of(target: str, current: Path) -> Path:
    """Return the path of a script, with its folder's links resolved. Raises `UsageError`."""
    path = current / os.path.expanduser(target)
    command = Path(sys.executable).parent / target
    is_command = command.is_file() and not path.exists()
    path = command if is_command else path
    if not path.exists():
        raise UsageError(
            f"There is no script {target} in {current}.",
            "Check the path, or name a module with -m.",
        )
    if not path.is_file():
        raise UsageError(
            f"{target} is not a script.", "Name a Python file, or a module with -m."
        )
    if path.suffix in (".ipynb", ".sh"):
        raise UsageError(
            f"{target} is not a Python program.",
            "jupyter nbconvert --to script makes one of a notebook. Of a shell script, name the program that it starts.",
        )
    is_in_venv = (path.parent.parent / "pyvenv.cfg").is_file()
    if is_command or (path.parent.name == "bin" and is_in_venv):
        module = re.search(rb"^from ([\w.]+) import", path.read_bytes(), re.MULTILINE)
        name = module[1].decode() if module else "MODULE"
        raise UsageError(
            f"{target} is a command of an environment on this machine, and hosts have environments of their own.",
            f"Name the module that it starts: -m {name}",
        )
    return path.parent.resolve() / path.name


def _file_of_module(module: str, current: Path) -> Path | None:
    """Return the file that `python -m` would run on this machine; None if there is none.

    Nothing is imported.
    """
    for folder in (current, *map(Path, sys.path)):
        path = folder.joinpath(*module.split("."))
        for file in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
            if file.is_file():
                return file
    return None


def _script(program: Program, script: Path, folder: Path, current: Path) -> Script:
    """Return the script for a rank: below its working directory, or at its own path on this
    machine.
    """
    folder = folder.resolve()
    if not script.is_relative_to(folder):
        raise UsageError(
            f"The script {program.target} does not lie in {folder}.",
            "Name a folder that has it: --sync DIR.",
        )
    at, _ = place_of(folder, current)
    has_same_place = folder.is_relative_to(current) or current.is_relative_to(folder)
    is_absolute = Path(os.path.expanduser(program.target)).is_absolute()
    inner = script.relative_to(folder).as_posix()
    return Script(
        posixpath.join(at, inner),
        program.args,
        shown=program.target if has_same_place and not is_absolute else "",
        origin=str(script),
    )

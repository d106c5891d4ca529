"""A script, or a module, as what every rank runs; its folder travels with it."""

from __future__ import annotations

import os
import posixpath
import shlex
import sys
from pathlib import Path

from distmagic.errors import SpecError
from distmagic.payload import on_ranks
from distmagic.payload.pack import Payload, dumped, payload_folder, write_code
from distmagic.payload.work_files import place_of
from distmagic.remote.values.call import Script
from distmagic.remote.values.pickling import Seen
from distmagic.request.program import Program


def pack_program(
    program: Program,
    *,
    sync: str | None,
    current: Path,
    limit_bytes: int,
    scratch: Path | None = None,
) -> Payload:
    """Pack a program. `sync` is the folder that travels where the user has named one, `current` the current directory.

    Raises `SpecError` for a script that isn't there.
    """
    scratch = payload_folder(scratch)
    current = current.resolve()
    if program.is_module:
        call = Script(program.target, program.args, is_module=True)
        name, script = program.target, None
        folder = current if _is_below(program.target, current) else None
    else:
        script = _file_of(program.target, current)
        name, folder = script.stem, script.parent
        call = _script(
            program, script, Path(os.path.expanduser(sync)) if sync else folder, current
        )
    start = script or _file_of_module(program.target, current)
    root = script.parent if script else current
    shown = on_ranks.look(on_ranks.of_program(start, root) if start else ())
    return Payload(
        call=dumped(call, scratch, Seen(), None),
        code=write_code((), {}, {}, scratch, shown),
        folder=folder,
        script=script,
        name=name,
        notice=shown.notice,
        title=shlex.join([program.target, *program.args]),
        limit_bytes=limit_bytes,
    )


def placed(program: Program, *, sync: str | None, current: Path) -> str:
    """Return the name by which ranks run a program, from where they begin. Raises what `pack_program` raises."""
    if program.is_module:
        return program.target
    current = current.resolve()
    script = _file_of(program.target, current)
    folder = Path(os.path.expanduser(sync)) if sync else script.parent
    call = _script(program, script, folder, current)
    _, inside = place_of(folder.resolve(), current)
    return call.shown or posixpath.relpath(call.path, inside or ".")


def _file_of(target: str, current: Path) -> Path:
    """Return where a script lies, its folder without links. Raises `SpecError`."""
    path = current / os.path.expanduser(target)
    if not path.exists():
        raise SpecError(
            f"There is no script {target} in {current}.",
            "Name one that is there, or a module with -m.",
        )
    if not path.is_file():
        raise SpecError(
            f"{target} is not a script.", "Name a Python file, or a module with -m."
        )
    return path.parent.resolve() / path.name


def _is_below(module: str, folder: Path) -> bool:
    """Whether a module is imported from this folder; else it is one that hosts have installed."""
    top = folder / module.partition(".")[0]
    return top.is_dir() or top.with_name(f"{top.name}.py").is_file()


def _file_of_module(module: str, current: Path) -> Path | None:
    """Return the file that `python -m` would run here; None where it is not on this machine. Nothing is imported."""
    for folder in (current, *map(Path, sys.path)):
        path = folder.joinpath(*module.split("."))
        for file in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
            if file.is_file():
                return file
    return None


def _script(program: Program, script: Path, folder: Path, current: Path) -> Script:
    """Return the script as a rank finds it: below its working directory, or at its own place on this machine."""
    folder = folder.resolve()
    if not script.is_relative_to(folder):
        raise SpecError(
            f"The script {program.target} does not lie in {folder}.",
            "Name a folder that has it: --sync DIR.",
        )
    at, _ = place_of(folder, current)
    has_same_place = folder.is_relative_to(current) or current.is_relative_to(folder)
    names_absolute = Path(os.path.expanduser(program.target)).is_absolute()
    is_as_named = has_same_place and not names_absolute
    inner = script.relative_to(folder).as_posix()
    return Script(
        f"{at}/{inner}" if at else inner,
        program.args,
        shown=program.target if is_as_named else "",
        origin=str(script),
    )

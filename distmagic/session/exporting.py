"""`--export SYSTEM DIR`: turns a cell, or a script, into a folder that starts the same job on a
cluster.
"""

from __future__ import annotations

import posixpath
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.exports import folder, systems
from distmagic.exports.job import PROGRAM, ExportedJob, ExportedProgram, File, text_file
from distmagic.exports.on_nodes import run_call, run_node, run_rank
from distmagic.payload import bundle, local_modules, work_files
from distmagic.payload.folder import Contents, check_size, content_of
from distmagic.payload.local_modules import LocalModule
from distmagic.payload.pack import Payload
from distmagic.remote.records.found_files import mode_of_copy
from distmagic.request.flags import Program, Request
from distmagic.request.hosts import Host
from distmagic.session.programs import packed

_SCRIPT, _RUNNER, _ZIP = ("cell.py", "run_call.py", "distmagic.zip")
_SECRET = "DISTMAGIC_SECRET"  # noqa: S105 - the variable's name


def of_script(text: str, request: Request) -> ExportedProgram:
    """Return a program from the whole text of a cell, with the local modules that it imports."""
    names = local_modules.imports_of_text(text)
    files, inside = _of_cell(local_modules.found(names), request)
    script = _free_name(_SCRIPT, files)  # a local module may have this name
    files.append(text_file(script, text))
    words = (posixpath.relpath(script, inside or "."), *request.args)
    return _as_started(files, words=words, inside=inside)


def of_payload(payload: Payload, why: str, request: Request) -> ExportedProgram:
    """Return a program that runs a pickled call; `why` is the reason why the cell's text can't be
    used as a program.
    """
    files, inside = _of_cell(payload.modules, request)
    own = {_RUNNER: Path(run_call.__file__), _ZIP: bundle.build().path}
    files += [File(path=name, data=content_of(path)) for name, path in own.items()]
    # Values and texts of other cells may contain a secret.
    of_cells = {
        "call": payload.call.path,
        "code.zip": payload.code.path,
        **{blob.path.name: blob.path for blob in payload.side_files},
    }
    for name, path in of_cells.items():
        files.append(File(path=name, data=content_of(path), is_private=True))
    return _as_started(
        files,
        words=(posixpath.relpath(_RUNNER, inside or "."),),
        inside=inside,
        is_bundle=True,
        why=why,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
    )


def _of_cell(
    modules: Iterable[LocalModule], request: Request
) -> tuple[list[File], str]:
    """Return the files of a cell (its local modules and the folder of `--sync`), and the working
    directory of ranks.
    """
    named = work_files.named_folder(request.spec.sync, None)
    contents, _, inside = work_files.gather(named, modules, Path.cwd())
    check_size(contents, request.payload_limit_bytes, "What the cell brings")
    return _files(contents), inside


def export_program(program: Program, request: Request, hosts: Sequence[Host]) -> str:
    """Write the folder for a script, or a module, and return a message for the user.

    Raises the errors of `pack_program`.
    """
    payload = packed(program, request)
    named = work_files.named_folder(request.spec.sync, payload.folder)
    contents, _, inside = work_files.gather(
        named, payload.modules, Path.cwd().resolve(), payload.script
    )
    check_size(contents, request.payload_limit_bytes, f"The folder {named}")
    words: tuple[str, ...] = ("-m", program.target)
    if not program.is_module:
        # The script is among the files: this was checked before.
        paths = [
            path for path, file in contents.files.items() if file.path == payload.script
        ]
        words = (posixpath.relpath(paths[0], inside or "."),)
    exported = _as_started(
        _files(contents),
        words=(*words, *program.args),
        inside=inside,
        imports=payload.roots,
    )
    return write(exported, payload.name, request, hosts)


def _free_name(name: str, files: Sequence[File]) -> str:
    while any(file.path == name for file in files):
        name = f"_{name}"
    return name


def _as_started(
    files: list[File],
    *,
    words: tuple[str, ...],
    inside: str,
    imports: tuple[str, ...] = (),
    is_bundle: bool = False,
    **more: str,
) -> ExportedProgram:
    """Return a program with its start command, and the zip of distmagic for hosts if a file imports
    it.
    """
    tops: set[str] = set()
    for file in files:
        if file.path.endswith(".py") and b"distmagic" in file.data:
            names = local_modules.imports_of_text(file.data)
            tops.update(name.partition(".")[0] for name in names)
            # A shell's command with {values} (`with_commands` in request/cells/shell_commands.py).
            if b'__import__("distmagic.' in file.data:
                tops.add("distmagic")
    starters = []
    for module in (run_node, run_rank):
        path = Path(module.__file__ or "")
        name = _free_name(path.name, files)
        files.append(File(path=name, data=path.read_bytes()))
        starters.append(posixpath.relpath(name, inside or "."))
    if not is_bundle and "distmagic" in tops:
        files.append(File(path=_ZIP, data=bundle.build().path.read_bytes()))
        imports = (*imports, _ZIP)
    node, rank = starters
    return ExportedProgram(
        files=tuple(files),
        words=(rank, *words),
        inside=inside,
        imports=imports,
        is_bundle=is_bundle,
        launcher=(node,),
        **more,
    )


def _files(contents: Contents) -> list[File]:
    """Return all files, except folders that an earlier export wrote; a link to a file becomes a
    file.

    Raises `PayloadError` for an unreadable file.
    """
    exported = tuple(
        f"{posixpath.dirname(path)}/"
        for path in contents.files
        if posixpath.basename(path) == folder.RECORD
    )
    paths = dict(contents.files)
    for link, target in contents.links.items():
        real = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
        for path, file in contents.files.items():
            if path == real or path.startswith(f"{real}/"):
                paths[link + path[len(real) :]] = file
    return [
        File(
            path=path,
            data=content_of(file.path),
            # Only its owner may write it.
            mode=(0o600 | mode_of_copy(file.path, path)) & 0o755,
        )
        for path, file in sorted(paths.items())
        if not path.startswith(exported)
    ]


def write(
    program: ExportedProgram, name: str, request: Request, hosts: Sequence[Host]
) -> str:
    """Write the folder of the request, and return a message for the user. Raises `UsageError`."""
    assert request.export is not None
    spec = request.spec
    has_secret = _SECRET in dict(spec.env)
    if _ZIP in program.imports and not has_secret:
        # By this secret the nodes of a job authenticate to each other.
        spec = replace(spec, env=(*spec.env, (_SECRET, secrets.token_hex(16))))
    if request.python_hosts:
        raise UsageError(
            "--python HOST=PATH: an exported job has one interpreter for all nodes.",
            "Write --python PATH.",
        )
    job = ExportedJob(
        name=spec.name or name,
        program=program,
        spec=spec,
        request=request.export,
        hosts=tuple((host.name, host.slots) for host in hosts if not host.is_local),
        python=request.access.python_of("") or "",
    )
    where = work_files.new_folder(request.export.folder, "--export")
    folder.write(where, systems.files(job))
    form = (
        f"the call as it was pickled ({program.why})"
        if program.is_bundle
        else "a plain program"
    )
    return f"Exported to {where}: {PROGRAM}/ has {form}.\n{systems.readme(job)}"

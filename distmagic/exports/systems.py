"""The systems that a job can be exported for, and the whole folder of one. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.request.systems import named


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return all files of a job's folder. Raises `UsageError` for settings that its system does not support."""
    program = [
        replace(file, path=f"{PROGRAM}/{file.path}") for file in job.program.files
    ]
    own: tuple[File, ...] = _export_of(job).files(job)
    if job.request.setup:  # it may contain a secret
        own = tuple(replace(file, is_private=not file.is_for_all) for file in own)
    return (text_file("README.md", readme(job)), *own, *program)


def readme(job: ExportedJob) -> str:
    """Return the README: five lines."""
    lines = (
        f"# {job.title}, for {job.request.system}: written by distmagic",
        *_export_of(job).readme(job),
        _about_program(job),
    )
    title, *others = lines
    return f"{title}\n" + "".join(f"- {line}\n" for line in others)


def _export_of(job: ExportedJob) -> Any:
    system = named(job.request.system)
    assert system is not None  # checked by the request
    return system.part("export")


def _about_program(job: ExportedJob) -> str:
    program = job.program
    if program.is_bundle:
        return (
            f"`{PROGRAM}/` has the call of the cell as it was pickled ({program.why}): the nodes need Python "
            f"{program.python_version} and torch. Its value is not kept: let it write what should stay to files."
        )
    comes = (
        "comes with the part of distmagic that it uses"
        if program.imports
        else "needs no distmagic"
    )
    return (
        f"`{PROGRAM}/` has the program, which {comes}: the nodes need Python, torch and what it imports. "
        "Change it as you like."
    )

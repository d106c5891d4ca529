"""The systems that a job can be exported for, and the whole folder of one. Pure."""

from __future__ import annotations

from dataclasses import replace

from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.request.systems import part


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return all files of a job's folder.

    Raises `UsageError` for settings that its system does not support.
    """
    own: tuple[File, ...] = part(job.request.system, "export").files(job)
    # An image may run as another user, whose ranks read the program.
    is_image = any(file.is_for_all for file in own)
    program = [
        replace(
            file,
            path=f"{PROGRAM}/{file.path}",
            is_private=file.is_private and not is_image,
        )
        for file in job.program.files
    ]
    if job.request.setup:  # it may contain a secret
        own = tuple(replace(file, is_private=not file.is_for_all) for file in own)
    return (text_file("README.md", readme(job)), *own, *program)


def readme(job: ExportedJob) -> str:
    """Return the README: five lines."""
    text = f"# {job.title}, for {job.request.system}: written by distmagic\n"
    own = part(job.request.system, "export").readme(job)
    for line in (*own, _about_program(job)):
        text += f"- {line}\n"
    return text


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

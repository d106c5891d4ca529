"""The systems that a job can be exported for, and the whole folder of one. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distmagic.exports.job import PROGRAM, ExportedJob, File, text_file
from distmagic.systems.osmo import export as osmo
from distmagic.systems.sing import export as sing
from distmagic.systems.skypilot import export as skypilot
from distmagic.systems.slurm import export as slurm
from distmagic.systems.torchrun import export as by_hand

_FILES: dict[str, Callable[[ExportedJob], tuple[File, ...]]] = {
    "slurm": slurm.files,
    "skypilot": skypilot.files,
    "osmo": osmo.files,
    "sing": sing.files,
    "torchrun": by_hand.files,
}
_README: dict[str, Callable[[ExportedJob], tuple[str, ...]]] = {
    "slurm": slurm.readme,
    "skypilot": skypilot.readme,
    "osmo": osmo.readme,
    "sing": sing.readme,
    "torchrun": by_hand.readme,
}


def files(job: ExportedJob) -> tuple[File, ...]:
    """Return everything that the folder of a job has in it. Raises `SpecError` for what its system has no place for."""
    program = [
        replace(file, path=f"{PROGRAM}/{file.path}") for file in job.program.files
    ]
    own = _FILES[job.request.system](job)
    if job.request.setup:  # it may have a secret in it, but in what an image has for whatever user it runs as
        own = tuple(
            replace(file, is_private=file.path not in sing.IN_IMAGE) for file in own
        )
    return (text_file("README.md", readme(job)), *own, *program)


def readme(job: ExportedJob) -> str:
    """Return the README: five lines."""
    lines = (
        f"# {job.title}, for {job.request.system}: written by distmagic",
        *_README[job.request.system](job),
        _about_program(job),
    )
    title, *others = lines
    return f"{title}\n" + "".join(f"- {line}\n" for line in others)


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

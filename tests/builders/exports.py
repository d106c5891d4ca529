"""Jobs to export, for tests."""

from __future__ import annotations

from typing import Any

from distmagic.exports.job import ExportedJob, ExportedProgram, File
from distmagic.request.export import ExportRequest
from distmagic.request.spec import JobSpec

PLAIN = ExportedProgram(
    files=(File(path="cell.py", data=b"print('here')\n"),),
    words=("run_rank.py", "cell.py", "3"),
    launcher=("run_node.py",),
)
HOSTILE = (
    "two words",
    "it's",
    '"double"',
    "$HOME $(id) `id`",
    "a\nb\n",
    "é ü 日本 😀",
    "\\",
    "!x",
    "*",
    "#c",
    " edge ",
    "%j",
    "{{host:x}} {% raw %}",
    "\u2028\x85\r\x1b[31m\x7f",
    "",
    "-n",
    "a: b",
    "\t",
)


def job(
    system: str, *, program: ExportedProgram = PLAIN, spec: dict[str, Any] | None = None, name: str = "cell",
    hosts: tuple[tuple[str, int | str | None], ...] = (), python: str = "", **request: Any,
) -> ExportedJob:  # fmt: skip
    """Return a job for a system; `request` are fields of `ExportRequest`."""
    return ExportedJob(
        name=name,
        program=program,
        spec=JobSpec(**(spec or {})),
        request=ExportRequest(system=system, folder="out", **request),
        hosts=hosts,
        python=python,
    )


def texts(files: tuple[File, ...]) -> dict[str, str]:
    """Return what the files have in them, by their paths."""
    return {file.path: file.data.decode(errors="surrogateescape") for file in files}


def shown(files: tuple[File, ...]) -> str:
    """Return all files as one text, for comparing with a golden one."""
    parts = []
    for file in files:
        note = " (private)" if file.is_private else ""
        parts.append(f"---- {file.path}{note}\n{file.data.decode()}")
    return "".join(parts)

"""No text that becomes a word of a shell has a zero byte: each field of each request refuses one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from distmagic.errors import UsageError
from distmagic.exports.job import ExportedJob, ExportedProgram
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest, SlurmRequest
from distmagic.request.export import ExportRequest
from distmagic.request.flags import Program
from distmagic.request.hosts import parse_hosts
from distmagic.request.spec import JobSpec

BAD = "a\0(touch pwned)\0"
EXPORT = ExportRequest(system="slurm", folder="out")
PROGRAM = ExportedProgram(files=(), words=("train.py",))
REQUESTS = (
    JobSpec(), Access(), EXPORT, Program(target="train.py"), SlurmRequest(), SkyRequest(), PROGRAM,
    ExportedJob(name="x", program=PROGRAM, spec=JobSpec(), request=EXPORT),
)  # fmt: skip


def hostile(annotation: str) -> Any:
    """Return a value of a field's type, as it is written, with a zero byte in it; None where it has no text."""
    if annotation == "Pairs":
        return (("A", BAD),)
    if annotation.startswith("tuple[str"):
        return ("a", BAD)
    return BAD if annotation.startswith("str") else None


FIELDS = [
    (request, field.name, hostile(str(field.type)))
    for request in REQUESTS
    for field in dataclasses.fields(request)
    if hostile(str(field.type)) is not None
]


@pytest.mark.parametrize(
    ("request_", "name", "value"),
    FIELDS,
    ids=[f"{type(request).__name__}.{name}" for request, name, _ in FIELDS],
)
def test_no_field_of_a_request_takes_a_zero_byte(request_, name, value):
    with pytest.raises(UsageError):
        _changed(request_, name, value)


def _changed(request: Any, name: str, value: Any) -> object:
    changed = dataclasses.replace(request, **{name: value})
    if isinstance(changed, ExportedProgram):  # it is checked where it becomes a job
        return ExportedJob(name="x", program=changed, spec=JobSpec(), request=EXPORT)
    return changed


def test_no_host_has_one_in_its_name():
    with pytest.raises(UsageError):
        parse_hosts(BAD)

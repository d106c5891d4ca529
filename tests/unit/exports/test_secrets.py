"""Where secrets of an exported job are: in files that only their owner can read."""

from pathlib import Path

import pytest

from distmagic.errors import PayloadError
from distmagic.exports import folder, systems
from distmagic.exports.job import ExportedJob, ExportedProgram, File
from distmagic.payload.folder import Contents, LocalFile, contents_of
from distmagic.request.export import ExportRequest
from distmagic.request.spec import JobSpec
from distmagic.request.systems import that_can
from distmagic.session import exporting

SECRET = "hf_0123456789"


@pytest.mark.parametrize("system", [one.name for one in that_can("export")])
@pytest.mark.parametrize("setup", ["", f"export HF_TOKEN={SECRET}"])
def test_a_setup_is_in_no_file_that_others_can_read(system, setup):
    program = ExportedProgram(
        files=(File(path="train.py", data=b""),), words=("train.py",)
    )
    request = ExportRequest(system=system, folder="out", nodes=2, setup=setup)
    job = ExportedJob(
        name="x",
        program=program,
        spec=JobSpec(
            nproc_per_node=1, rdzv_endpoint="a:1" if system == "torchrun" else None
        ),
        request=request,
    )
    files = systems.files(job)
    assert [
        file.path
        for file in files
        if SECRET.encode() in file.data and not file.is_private
    ] == []
    assert any(SECRET.encode() in file.data for file in files) == bool(setup)
    assert not any(file.is_private for file in files if file.path == "program/train.py")
    if not setup:
        assert not any(file.is_private for file in files)
        assert b"No secret" not in b"".join(file.data for file in files)


def test_a_file_that_others_can_not_read_stays_so(tmp_path):
    modes = {
        ".env": 0o600,
        "train.py": 0o644,
        "key.sh": 0o700,
        "group": 0o640,
        "for_all": 0o777,
        "shut/in_it": 0o644,
        "of_group/in_it": 0o755,
    }
    source = tmp_path / "source"
    for name, mode in modes.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
        (source / name).chmod(mode)
    (source / "shut").chmod(0o700)
    (source / "of_group").chmod(0o750)
    folder.write(tmp_path / "out", exporting._files(contents_of(source)))
    found = {name: (tmp_path / "out" / name).stat().st_mode & 0o777 for name in modes}
    assert found == modes | {"for_all": 0o755, "shut/in_it": 0o600, "of_group/in_it": 0o750}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "is_private"), [(0o600, True), (0o640, True), (0o644, False)]
)
def test_a_workflow_of_osmo_is_as_private_as_the_files_that_it_carries(
    mode, is_private
):
    program = ExportedProgram(
        files=(File(path=".env", data=SECRET.encode(), mode=mode),), words=("-c", "")
    )
    request = ExportRequest(system="osmo", folder="out")
    job = ExportedJob(name="x", program=program, spec=JobSpec(), request=request)
    found = {file.path: file.is_private for file in systems.files(job)}
    assert found["workflow.yaml"] == found["workflow-ranks.yaml"] == is_private
    assert not found["node.sh"]


def test_a_file_that_can_not_be_read_is_named(golden):
    file = LocalFile(path=Path("/proc/self/mem"), size_bytes=1)
    with golden.raises(PayloadError):
        exporting._files(Contents(files={"mem": file}))
